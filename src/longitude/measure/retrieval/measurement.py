"""Ask a checkpoint: one row per length (and depth), as soon as its last trial is answered."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from random import Random
from typing import Any

import torch
from transformers import GenerationConfig

from longitude.checkpoints.load import Checkpoint
from longitude.checkpoints.positions import last_position
from longitude.checkpoints.quiet import quiet
from longitude.errors import unknown
from longitude.measure.checks import checked_lengths, positive
from longitude.measure.perplexity import described
from longitude.measure.retrieval import haystack, scoring
from longitude.measure.retrieval.prompts import DoesNotFit, Prompt, fit
from longitude.measure.retrieval.summary import WEIGHTING
from longitude.measure.retrieval.tasks import TASKS, Task
from longitude.measure.rows import Row
from longitude.measure.windows import Progress

LABELS = ("model", "encoding", "label", "train_length", "train_positions", "backend", "commit")


# ---- the questions: they depend on task, length, depth, trial and seed alone -----------------------------------------
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
    lengths = checked_lengths(lengths)
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


# ---- asking ----------------------------------------------------------------------------------------------------------
def run(
    checkpoint: Checkpoint,
    task: str | Task,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] | None = None,
    trials: int = 10,
    seed: int = 0,
    text: str | None = None,
    prefill: int | None = None,
    progress: Progress | None = None,
    **labels: Any,
) -> Iterator[Row]:
    """Ask one checkpoint the questions of a task, at each length and depth.

    The answer is the greedy continuation by model.generate with a cache, one prompt at a time; of the model's own generation
    settings only the end of sequence counts. Prompts are plain text, without a chat template, filled up to their length and
    never cut: a length that is too short for the task, or longer than a table of positions, gives a row without value, with
    the reason.

    Args:
        checkpoint: A model that generates, with its tokenizer.
        task: A name of `TASKS`, or a task of your own.
        lengths: Tokens in all, of prompt and answer, ascending.
        depths: Where the needle is, 0 (first) to 1 (last), for tasks with one needle; None: a random place per trial.
        trials: Questions per row.
        seed: Of the questions; they depend on it, task, length, depth and trial, on no model.
        text: What to hide needles in, for tasks that do so; None: prose that comes with Python.
        prefill: Tokens of the prompt per forward pass; None: the whole prompt in one, and no logits but the last.
        progress: Called as progress(done, total), in tokens, after every trial.
        labels: Columns of `Row`, `LABELS`. (Its `seed` is the training seed, which stays open.)

    Returns:
        Rows, each as soon as it is measured: the mean score over trials, with Wilson's 95 % interval.

    Raises:
        ValueError: When called, for each of these that is not so, and where no length suits the task.
    """
    planned = plan(task, lengths, depths, trials, seed, text)
    if prefill is not None:
        positive("prefill", prefill)
    for name in labels:
        if name not in LABELS:
            raise unknown("label", name, LABELS, "A caller fills columns in measure.retrieval.measurement.LABELS.")
    planned.check(checkpoint.tokenizer, last_position(checkpoint.model))
    return _rows(planned, checkpoint, prefill, progress, labels)


def _rows(
    planned: RetrievalPlan,
    checkpoint: Checkpoint,
    prefill: int | None,
    progress: Progress | None,
    labels: dict[str, Any],
) -> Iterator[Row]:
    model, tokenizer, last = checkpoint.model, checkpoint.tokenizer, last_position(checkpoint.model)
    done, total = 0, sum(length * planned.trials for length, _ in planned.cells)

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(done, total)

    for length, depth in planned.cells:
        columns = _protocol(planned, model, length, depth, prefill) | labels
        try:
            if last is not None and length > last:
                raise DoesNotFit(f"the model's table ends at {last} positions")
            prompts = [planned.prompt(tokenizer, length, depth, trial) for trial in range(planned.trials)]
        except DoesNotFit as reason:
            advance(length * planned.trials)
            yield Row(**columns, reason=str(reason), count=0)
            continue
        scores = []
        for prompt in prompts:
            scores.append(planned.task.score(answer(model, tokenizer, prompt, prefill), prompt.question.answers))
            advance(length)
        value, low, high = scoring.mean(scores)
        yield Row(**columns | _read(prompts, tokenizer, depth), count=len(scores), value=value, low=low, high=high)


def _protocol(
    planned: RetrievalPlan, model: Any, length: int, depth: float | None, prefill: int | None
) -> dict[str, Any]:
    text = f", in {planned.haystack.source}" if planned.task.text else ""
    return {
        "task": planned.task.name,
        "length": length,
        "depth": depth,
        "metric": planned.task.metric,
        "method": f"greedy, questions of seed {planned.seed}{text}",
        "weighting": WEIGHTING,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": backend_of(model.config),
        "prefill": described(prefill, length),
    }


def backend_of(config: Any) -> str | None:
    """The attention implementation of a model."""
    return getattr(config, "attention_backend", None) or getattr(config, "_attn_implementation", None)


def _read(prompts: list[Prompt], tokenizer: Any, depth: float | None) -> dict[str, Any]:
    """What the model read: the longest window, where the needles were if at a depth, and how the prompts began."""
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


@dataclass(frozen=True)
class Estimate:
    """What a measurement will take.

    Attributes:
        rows: Rows to come.
        prompts: Prompts to come.
        tokens: To read and to generate, at most.
    """

    rows: int
    prompts: int
    tokens: int


def estimate(
    task: str | Task, *, lengths: Sequence[int], depths: Sequence[float] | None = None, trials: int = 10
) -> Estimate:
    """How much `run` with the same options will do; nothing is run.

    Args:
        task: As for `run`, like the others.
        lengths: Tokens.
        depths: Of the needle.
        trials: Questions per row.

    Returns:
        Rows, prompts and tokens.

    Raises:
        ValueError: As `run`.
    """
    planned = plan(task, lengths, depths, trials)
    rows = len(planned.cells)
    return Estimate(rows, rows * planned.trials, sum(length * planned.trials for length, _ in planned.cells))


# ---- answers ---------------------------------------------------------------------------------------------------------
def answer(model: Any, tokenizer: Any, prompt: Prompt, prefill: int | None = None) -> str:
    """The greedy continuation of a prompt, as text; at most its new tokens. prefill: tokens per pass, None for all."""
    ids = torch.tensor([prompt.ids], device=model.device)
    with _greedy(model, prompt.new_tokens, prefill), torch.inference_mode():
        tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    return tokenizer.decode(tokens[0, len(prompt.ids) :], skip_special_tokens=True)


@contextmanager
def _greedy(model: Any, new_tokens: int, prefill: int | None) -> Iterator[None]:
    """The model with generation settings of ours: a checkpoint's penalties and temperatures would be part of the score.

    transformers' reminder that a prompt is longer than the model was trained for is what the rows are about.
    """
    own = model.generation_config
    end = own.eos_token_id
    model.generation_config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        prefill_chunk_size=prefill,
        bos_token_id=own.bos_token_id,
        eos_token_id=end,
        pad_token_id=0 if end is None else end if isinstance(end, int) else end[0],
    )
    try:
        with quiet():
            yield
    finally:
        model.generation_config = own
