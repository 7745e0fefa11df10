"""Ask a checkpoint: one row per length (and depth), as soon as its last trial is answered; and its effective length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from math import isfinite
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from longitude.checkpoints.load import Checkpoint
from longitude.checkpoints.positions import last_position
from longitude.errors import UsageError, check_sizes, unknown
from longitude.measure.config import BOS, check_ascending, checked_lengths
from longitude.measure.retrieval import haystack
from longitude.measure.retrieval.prompts import DoesNotFit, Prompt, fit
from longitude.measure.retrieval.tasks import TASKS, Task
from longitude.measure.rows import Row, check_labels
from longitude.measure.windows import Progress, described
from longitude.runs.quiet import greedy
from longitude.statistics import proportions

if TYPE_CHECKING:
    from longitude.measure.endpoint import Endpoint

WEIGHTING = "trial"
"""Weighting of retrieval rows, which no other rows have."""
THRESHOLD = 0.856
"""RULER's threshold: the score of Llama2-7B at 4K, averaged over its 13 tasks (Hsieh et al. 2024, table of results)."""


DEFINITION = (
    "The effective length is the longest measured length up to which the score, averaged over depths and then over the tasks "
    f"with a score, stays at or above {THRESHOLD:.1%}, what Llama2-7B reaches at 4K on RULER's 13 tasks."
)
"""The meaning of `effective_length` at its usual threshold, for the reader."""


@dataclass(frozen=True)
class Answer:
    """Answer of a model to a question, which task, length, depth, trial and seed determine.

    Attributes:
        task: Name of the task.
        length: Tokens of prompt and answer.
        depth: Depth of the needle; None: at a random place, or there is none.
        trial: The number of the question.
        seed: Random seed of the questions.
        expected: Texts that a right answer contains.
        generated: Text that the model generated.
        score: Score from 0 to 1.
        at_limit: Whether a server says that the answer was cut at the limit of its tokens.
    """

    task: str
    length: int
    depth: float | None
    trial: int
    seed: int
    expected: tuple[str, ...]
    generated: str
    score: float
    at_limit: bool = False


# ---- the questions: they depend on task, length, depth, trial and seed alone -----------------------------------------
@dataclass(frozen=True)
class RetrievalPlan:
    """Checked options of a retrieval measurement. depths: [None] for a random one per trial."""

    task: Task
    lengths: list[int]
    depths: list[float | None]
    trials: int
    seed: int
    haystack: haystack.Haystack
    chat: bool = True
    bos: BOS = "tokenizer"
    begins: bool = True
    """Whether the start of the answer follows a chat template; else it ends the question."""

    @property
    def cells(self) -> list[tuple[int, float | None]]:
        """(length, depth) of every row, in order."""
        return list(product(self.lengths, self.depths))

    def prompt(self, tokenizer: Any, length: int, depth: float | None, trial: int) -> Prompt:
        """One trial, filled up. Raises as `fit`."""
        random = Random(f"{self.task.name}/{self.seed}/{length}/{depth}/{trial}")
        question = self.task.draw(random, length, depth, self.haystack)
        if self.chats_with(tokenizer) and not self.begins:
            question = replace(question, begin="")
        return fit(question, tokenizer, length, self.task.new_tokens, self.chats_with(tokenizer), self.bos)

    def chats_with(self, tokenizer: Any) -> bool:
        """Whether prompts are messages in a tokenizer's template."""
        return self.chat and getattr(tokenizer, "chat_template", None) is not None

    def require_prompt(self, tokenizer: Any, most: int | None) -> None:
        """ValueError unless there is a length, of at most `most` tokens, at which the task has a prompt."""
        if tokenizer is None:
            needed = "the checkpoint's tokenizer, because prompts are text"
            raise UsageError("retrieval", needed, "none", "load it with tokenizer=True")
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
    chat: bool = True,
    bos: BOS = "tokenizer",
) -> RetrievalPlan:
    """The plan of these options. ValueError for one that is not as `run` documents."""
    if not isinstance(task, Task):
        if task not in TASKS:
            raise unknown("retrieval task", task, TASKS, "They are listed in docs/measuring.md.")
        task = TASKS[task]
    check_sizes("retrieval", trials=trials)
    if depths is not None and not task.depths:
        raise ValueError(f"task {task.name} has no single needle to put at a depth; leave the depths out")
    if depths is not None:
        check_ascending("depths", depths, 0, 1)
    around = haystack.of_python() if task.text else haystack.LINES
    places: list[float | None] = [None] if depths is None else [float(depth) for depth in depths]
    return RetrievalPlan(task, checked_lengths(lengths), places, trials, seed, around, chat, bos)


# ---- asking ----------------------------------------------------------------------------------------------------------
def run(
    checkpoint: Checkpoint,
    task: str | Task,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] | None = None,
    trials: int = 10,
    seed: int = 0,
    chat: bool = True,
    bos: BOS = "tokenizer",
    prefill: int | None = None,
    server: Endpoint | None = None,
    progress: Progress | None = None,
    on_answer: Callable[[Answer], object] | None = None,
    **labels: Any,
) -> Iterator[Row]:
    """Ask one checkpoint the questions of a task, at each length and depth.

    The answer is the greedy continuation by model.generate with a cache, one prompt at a time; of the model's own generation
    settings only the end of sequence counts. Prompts are filled up to their length and never cut: a length that is too short
    for the task, or longer than a table of positions, gives a row without value, with the reason.

    Args:
        checkpoint: A model that generates, with its tokenizer.
        task: A name of `TASKS`, or your Task.
        lengths: Total tokens of prompt and answer, ascending.
        depths: Depths of the needle, 0 (first) to 1 (last), for tasks with one needle; None: a random place per trial.
        trials: Questions per row.
        seed: Random seed of the questions, which depend on seed, task, length, depth and trial but not on the model.
        chat: Put each prompt into the tokenizer's chat template, if it has one, as a user's message; the start of the answer
            follows the template. False: plain text.
        bos: Whether the beginning-of-sequence token begins a prompt: as the tokenizer (or its template) has it, "always" or
            "never".
        prefill: Tokens of the prompt per forward pass; None: the whole prompt in one, and no logits but the last.
        server: A server that answers instead of the checkpoint's model; the start of the answer then ends the question.
        progress: Called as progress(done, total), in tokens, after every trial.
        on_answer: Called with every answer.
        labels: Other columns of `Row`. (Its `seed` is the training seed, which stays open.)

    Returns:
        Rows, each as soon as it is measured: the mean score over trials, with Wilson's 95% interval.

    Raises:
        ValueError: For invalid arguments, and if no length suits the task.
    """
    planned = replace(plan(task, lengths, depths, trials, seed, chat, bos), begins=server is None)
    check_sizes("retrieval", prefill=1 if prefill is None else prefill)
    check_labels(labels)
    planned.require_prompt(checkpoint.tokenizer, last_position(checkpoint.model))
    return _rows(planned, checkpoint, prefill, server, progress, on_answer, labels)


def _rows(
    planned: RetrievalPlan,
    checkpoint: Checkpoint,
    prefill: int | None,
    server: Endpoint | None,
    progress: Progress | None,
    on_answer: Callable[[Answer], object] | None,
    labels: dict[str, Any],
) -> Iterator[Row]:
    model, tokenizer, last, task = checkpoint.model, checkpoint.tokenizer, last_position(checkpoint.model), planned.task
    progress = progress or (lambda done, total: None)
    done, total = 0, sum(length * planned.trials for length, _ in planned.cells)
    text = f", in {planned.haystack.source}" if task.text else ""
    if server is not None:
        text += server.described
    elif planned.chats_with(tokenizer):
        text += f", in the chat template (sha256 {sha256(str(tokenizer.chat_template).encode()).hexdigest()[:12]})"
    protocol = {
        "task": task.name,
        "metric": task.metric,
        "method": f"greedy, questions of seed {planned.seed}{text}",
        "weighting": WEIGHTING,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": backend_of(model.config),
        **labels,
    }
    for length, depth in planned.cells:
        columns = protocol | {"length": length, "depth": depth, "prefill": described(prefill, length)}
        try:
            if last is not None and length > last:
                raise DoesNotFit(f"the model's table ends at {last} positions")
            prompts = [planned.prompt(tokenizer, length, depth, trial) for trial in range(planned.trials)]
        except DoesNotFit as reason:
            done += length * planned.trials
            progress(done, total)
            yield Row(**columns, reason=str(reason), count=0)
            continue
        scores = []
        of_model = ((answer(model, tokenizer, prompt, prefill), False) for prompt in prompts)
        answers = of_model if server is None else server.answers(prompts, tokenizer)
        for trial, (prompt, (generated, at_limit)) in enumerate(zip(prompts, answers, strict=True)):
            expected = prompt.question.answers
            scores.append(task.score(generated, expected))
            if on_answer is not None:
                asked = task.name, length, depth, trial, planned.seed
                on_answer(Answer(*asked, expected, generated, scores[-1], at_limit))
            done += length
            progress(done, total)
        value, low, high = proportions.mean(scores)
        columns |= _read(prompts, tokenizer, depth)
        if server is not None and (server.chat or server.text):
            columns["bos"] = "by the server"
        yield Row(**columns, count=len(scores), value=value, low=low, high=high)


def backend_of(config: Any) -> str | None:
    """The attention implementation of a model."""
    return getattr(config, "attention_backend", None) or getattr(config, "_attn_implementation", None)


def _read(prompts: list[Prompt], tokenizer: Any, depth: float | None) -> dict[str, Any]:
    """Facts of the prompts: the longest window, positions of needles at a fixed depth, and the beginning-of-sequence token."""
    spans = [prompt.needles for prompt in prompts if prompt.needles] if depth is not None else []
    begun = tokenizer.bos_token_id is not None and all(prompt.ids[0] == tokenizer.bos_token_id for prompt in prompts)
    return {
        "window": max(prompt.tokens for prompt in prompts),
        "tokens": sum(prompt.new_tokens for prompt in prompts),
        "position_from": min((first for first, _ in spans), default=None),
        "position_to": max((last for _, last in spans), default=None),
        "bos": "first" if begun else "none",
        "truncation": "none, prompts are filled",
    }


# ---- answers ---------------------------------------------------------------------------------------------------------
def answer(model: Any, tokenizer: Any, prompt: Prompt, prefill: int | None = None) -> str:
    """The greedy continuation of a prompt, as text; at most its new tokens. prefill: tokens per pass, None for all."""
    ids, end = torch.tensor([prompt.ids], device=model.device), model.generation_config.eos_token_id
    settings = {
        "max_new_tokens": prompt.new_tokens,
        "prefill_chunk_size": prefill,
        "bos_token_id": model.generation_config.bos_token_id,
        "eos_token_id": end,
        "pad_token_id": 0 if end is None else end if isinstance(end, int) else end[0],
    }
    with greedy(model, **settings), torch.inference_mode():
        tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    return tokenizer.decode(tokens[0, len(prompt.ids) :], skip_special_tokens=True)


# ---- summaries --------------------------------------------------------------------------------------------------------
def effective_length(rows: Iterable[Row], threshold: float = THRESHOLD) -> int | None:
    """The longest length of one model's retrieval rows up to which the mean over tasks stays at or above the threshold.

    Within a task and length, depths count equally; within a length, tasks do. A length at which some of the tasks have no
    score (their prompts do not fit) is left out, since its mean would be about other tasks.

    Args:
        rows: Rows of one model; rows of other measurements are left out.
        threshold: A score from 0 to 1.

    Returns:
        The length in tokens; None if the score at the shortest one is below the threshold.

    Raises:
        ValueError: For rows of two models, or a threshold outside 0 to 1.

    Source:
        The threshold: Hsieh et al. 2024, RULER, arXiv 2404.06654, https://arxiv.org/abs/2404.06654.
    """
    if not 0 <= threshold <= 1:
        raise UsageError("the threshold of the effective length", "within 0 and 1", threshold, "85.6% is 0.856")
    rows = [row for row in rows if row.weighting == WEIGHTING]
    models = {(row.model, row.label, row.seed) for row in rows}
    if len(models) > 1:
        raise ValueError(f"an effective length is of one model, got rows of {len(models)}; take the rows of one")
    longest = None
    for length, score in scores_by_length(rows).items():
        if score < threshold:
            break
        longest = length
    return longest


def scores_by_length(rows: Iterable[Row]) -> dict[int, float]:
    """Scores of one model by length.

    Args:
        rows: Rows of one model; rows of other measurements are left out.

    Returns:
        Length -> mean over tasks, ascending, for lengths at which every task of the rows has all its scores.
    """
    values = [(row.length, row.task, row.value) for row in rows if row.weighting == WEIGHTING]
    scores = pd.DataFrame(values, columns=["length", "task", "score"]).astype({"score": float})
    by_task = scores.groupby(["length", "task"])["score"].agg(fmean).unstack()
    return {length: mean for length, row in by_task.iterrows() if isfinite(mean := fmean(row))}  # type: ignore[misc]
