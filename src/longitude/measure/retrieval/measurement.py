"""Ask a checkpoint: one row per length (and depth), as soon as its last trial is answered."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from longitude.checkpoints.load import Checkpoint
from longitude.checkpoints.positions import last_position
from longitude.errors import unknown
from longitude.measure.retrieval import answers, scoring
from longitude.measure.retrieval.plan import RetrievalPlan, plan, positive
from longitude.measure.retrieval.prompts import DoesNotFit, Prompt
from longitude.measure.retrieval.summary import WEIGHTING
from longitude.measure.retrieval.tasks import Task
from longitude.measure.rows import Row

Progress = Callable[[int, int], None]
"""progress(done, total), in tokens."""
LABELS = ("model", "encoding", "label", "train_length", "train_positions", "backend", "commit")


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
    """Yield one row per length, and per depth where depths are given, each as soon as it is measured.

    checkpoint: a model that generates, with its tokenizer. Prompts are plain text, without a chat template.
    task: a name of `TASKS`, or a task of your own.
    lengths: tokens in all, of prompt and answer, ascending. A prompt is filled up to its length and never cut: a length that
        is too short for the task, or longer than a table of positions, gives a row without value; `truncation` says why.
    depths: where the needle stands, 0 (first) to 1 (last), for tasks with one needle; None: a random place per trial.
    trials: questions per row. seed: of the questions; they depend on it, task, length, depth and trial, on no model.
    text: what to hide needles in, for tasks that do so; None: prose that comes with Python.
    prefill: tokens of the prompt per forward pass; None: the whole prompt in one, and no logits but the last.
    progress: called as progress(done, total), in tokens, after every trial.
    labels: columns of `Row`, `LABELS`. (Its `seed` is the training seed, which stays open.)

    The answer is the greedy continuation by model.generate with a cache, one prompt at a time; of the model's own generation
    settings only the end of sequence counts. The value is the mean score over trials, its interval Wilson's, 95 %.
    Raises ValueError, when called, for each of these that is not so, and where no length suits the task.
    """
    asked = plan(task, lengths, depths, trials, seed, text)
    if prefill is not None:
        positive("prefill", prefill)
    for name in labels:
        if name not in LABELS:
            raise unknown(
                "label",
                name,
                LABELS,
                "The columns a caller fills are in longitude.measure.retrieval.measurement.LABELS.",
            )
    asked.check(checkpoint.tokenizer, last_position(checkpoint.model))
    return _rows(asked, checkpoint, prefill, progress, labels)


def _rows(
    asked: RetrievalPlan, checkpoint: Checkpoint, prefill: int | None, progress: Progress | None, labels: dict[str, Any]
) -> Iterator[Row]:
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    counter = _Counter(sum(length * asked.trials for length, _ in asked.cells), progress)
    for length, depth in asked.cells:
        prompts = _prompts(asked, checkpoint, length, depth)
        columns = _protocol(asked, model, length, depth, prefill) | labels
        if isinstance(prompts, str):
            counter.add(length * asked.trials)
            yield Row(**columns, truncation=f"not asked: {prompts}", count=0)
            continue
        scores = []
        for prompt in prompts:
            scores.append(asked.task.score(answers.answer(model, tokenizer, prompt, prefill), prompt.question.answers))
            counter.add(length)
        value, low, high = scoring.mean(scores)
        yield Row(**columns | _read(prompts, tokenizer, depth), count=len(scores), value=value, low=low, high=high)


class _Counter:
    def __init__(self, total: int, progress: Progress | None):
        self.done, self.total, self.progress = 0, total, progress

    def add(self, tokens: int) -> None:
        self.done += tokens
        if self.progress is not None:
            self.progress(self.done, self.total)


def _prompts(asked: RetrievalPlan, checkpoint: Checkpoint, length: int, depth: float | None) -> list[Prompt] | str:
    """The prompts of a row, or why it cannot be measured."""
    most = last_position(checkpoint.model)
    if most is not None and length > most:
        return f"the model's table ends at {most} positions"
    try:
        return [asked.prompt(checkpoint.tokenizer, length, depth, trial) for trial in range(asked.trials)]
    except DoesNotFit as error:
        return str(error)


def _protocol(
    asked: RetrievalPlan, model: Any, length: int, depth: float | None, prefill: int | None
) -> dict[str, Any]:
    method = [f"greedy, questions of seed {asked.seed}"]
    method += [f"in {asked.haystack.source}"] if asked.task.text else []
    method += [f"depth {depth:g}"] if depth is not None else []
    return {
        "task": asked.task.name,
        "length": length,
        "metric": asked.task.metric,
        "method": ", ".join(method),
        "weighting": WEIGHTING,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": getattr(model.config, "attention_backend", None)
        or getattr(model.config, "_attn_implementation", None),
        "prefill": f"pieces of {prefill} with the cache" if prefill is not None and prefill < length else "one pass",
    }


def _read(prompts: list[Prompt], tokenizer: Any, depth: float | None) -> dict[str, Any]:
    """What the model read: the longest window, where the needles stood if at a depth, and how the prompts began."""
    places = [prompt.needles for prompt in prompts if prompt.needles] if depth is not None else []
    begun = tokenizer.bos_token_id is not None and all(prompt.ids[0] == tokenizer.bos_token_id for prompt in prompts)
    return {
        "window": max(prompt.tokens for prompt in prompts),
        "tokens": sum(prompt.new_tokens for prompt in prompts),
        "position_from": min((first for first, _ in places), default=None),
        "position_to": max((last for _, last in places), default=None),
        "bos": "first" if begun else "none",
        "truncation": "none, prompts are filled",
    }


@dataclass(frozen=True)
class Estimate:
    """Rows and prompts to come; tokens to read and to generate, at most."""

    rows: int
    prompts: int
    tokens: int


def estimate(
    task: str | Task, *, lengths: Sequence[int], depths: Sequence[float] | None = None, trials: int = 10
) -> Estimate:
    """How much `run` with the same options will do; nothing is run. Errors as `run`."""
    asked = plan(task, lengths, depths, trials)
    return Estimate(
        rows=len(asked.cells),
        prompts=len(asked.cells) * asked.trials,
        tokens=sum(length * asked.trials for length, _ in asked.cells),
    )
