"""The questions of a measurement: a task at lengths and depths; they depend on nothing but these and a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from random import Random
from typing import Any

from longitude.errors import unknown
from longitude.measure.checks import positive
from longitude.measure.retrieval import haystack
from longitude.measure.retrieval.prompts import DoesNotFit, Prompt, fit
from longitude.measure.retrieval.tasks import TASKS, Task


@dataclass(frozen=True)
class RetrievalPlan:
    """depths: [None] for a random one per trial. text: the user's, None for our own."""

    task: Task
    lengths: list[int]
    depths: list[float | None]
    trials: int
    seed: int = 0
    text: str | None = None

    @property
    def cells(self) -> list[tuple[int, float | None]]:
        """(length, depth) of every row, in order."""
        return list(product(self.lengths, self.depths))

    @cached_property
    def haystack(self) -> haystack.Haystack:
        """The running text: the filler for a task that takes no other."""
        if not self.task.text:
            return haystack.of_filler()
        return haystack.of_python() if self.text is None else haystack.of_text(self.text)

    def prompt(self, tokenizer: Any, length: int, depth: float | None, trial: int) -> Prompt:
        """One trial, filled up. Raises as `fit`."""
        random = Random(f"{self.task.name}/{self.seed}/{length}/{depth}/{trial}")
        question = self.task.draw(random, length, depth, self.haystack)
        return fit(question, tokenizer, length, self.task.new_tokens)

    def check(self, tokenizer: Any, most: int | None) -> None:
        """ValueError unless there is a length, of at most `most` tokens, at which the task has a prompt."""
        if tokenizer is None:
            raise ValueError(
                "prompts are text: retrieval needs the checkpoint's tokenizer; load it with tokenizer=True"
            )
        reason = f"the model's table ends at {most} positions; ask for shorter lengths"
        for length in reversed([length for length in self.lengths if most is None or length <= most]):
            try:
                self.prompt(tokenizer, length, self.depths[0], 0)
            except DoesNotFit as error:
                reason = f"{error}; ask for longer lengths"
            else:
                return
        raise ValueError(f"task {self.task.name} has no prompt at lengths {self.lengths}: {reason}")


def plan(
    task: str | Task,
    lengths: Sequence[int],
    depths: Sequence[float] | None,
    trials: int,
    seed: int = 0,
    text: str | None = None,
) -> RetrievalPlan:
    """The plan of these options. Raises ValueError for each that is not as `run` documents."""
    if not isinstance(task, Task):
        if task not in TASKS:
            raise unknown("retrieval task", task, TASKS, "They are listed in docs/retrieval.md.")
        task = TASKS[task]
    lengths = [positive("each length", length) for length in lengths]
    if not lengths or lengths != sorted(set(lengths)):
        raise ValueError(f"lengths must be one or more, strictly ascending, got {lengths}")
    if text is not None and not task.text:
        raise ValueError(f"task {task.name} hides nothing in running text; leave the text out")
    planned = RetrievalPlan(task, lengths, _depths(task, depths), positive("trials", trials), seed, text)
    _ = planned.haystack  # ValueError for an empty text
    return planned


def _depths(task: Task, depths: Sequence[float] | None) -> list[float | None]:
    if depths is None:
        return [None]
    if not task.depths:
        raise ValueError(f"task {task.name} has no single needle to put at a depth; leave the depths out")
    if not depths or list(depths) != sorted(set(depths)) or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(
            f"depths must be one or more, from 0 (first) to 1 (last), strictly ascending, got {list(depths)}"
        )
    return [float(depth) for depth in depths]
