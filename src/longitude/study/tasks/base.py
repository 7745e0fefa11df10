"""Base classes of tasks: data, examples and model for training, measurement, and names of the metrics."""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import pandas as pd
import torch

from longitude import models
from longitude.measure import Row
from longitude.positions.samplers import Sampler, sampler
from longitude.registry import Registry
from longitude.statistics import proportions
from longitude.study.config import BYTE, GENERATED, RANGED, StudyConfig
from longitude.study.data import Examples, StudyData, prepare
from longitude.study.tokens import reader

BYTES = 256
"""Ids of bytes are below it; a task's own tokens follow."""
TEST_SEED, SELECTION_SEED = 2**32, 2**32 + 1
"""Above every seed of a study: no model is trained on examples drawn from them."""
OnProgress = Callable[[int, int], None]
"""Callback with done and total work, in any unit."""


@dataclass(frozen=True, eq=False)
class Measuring:
    """A trained model, with the inputs of its measurement.

    Attributes:
        lengths: Lengths of the study for which the model has positions.
        labels: Columns that every row has.
    """

    model: Any
    config: StudyConfig
    data: StudyData
    lengths: Sequence[int]
    labels: dict[str, Any]
    on_progress: OnProgress

    def per_document(self, method: str, length: int, **numbers: Any) -> pd.DataFrame:
        """Data for statistics: a row for each document or example, with its numbers.

        For answers: `exact`, 0 to 1, and, if an example has one, `distance` from the question back to the relevant symbol.
        """
        trial = {"label": self.labels["label"], "seed": self.labels["seed"], "method": method, "length": length}
        return pd.DataFrame({**trial, "document": range(len(next(iter(numbers.values())))), **numbers})


class Task(ABC):
    """A task; `task_for` builds the task of a study.

    A subclass registered with `register_task` in a file of study/tasks is a choice of `longitude study --task`. By default it
    reads documents of bytes from --data.

    Attributes:
        name: Set by `register_task`.
        kind: "losses", lower is better, or "answers", right or wrong: decides statistics, figures and the words of the page.
        metric: Metric of the rows that a conclusion is drawn from.
        words: The metric for readers.
        unit: Unit of lengths.
        loss_unit: Unit that a training loss is per.
        methods: Ways to measure.
        stack: Kind of model: "decoder", "encoder" or "encoder-decoder".
        model_class: Name of its model class in longitude.models.
        ngrams: Orders of the n-grams that its models must beat to have learned anything.
        tokens: Options of LongitudeConfig that the task sets: the vocabulary and special tokens.
        tokenized: Whether it supports --tokenizer.
        digits: Ids of digits, if it writes numbers least significant digit first: encodings with an option `digits` count them.
        defaults: Options of the study with defaults that differ from `StudyConfig`.
        ceiling: A label that solves the task at the training length with these defaults; None if none is known.
    """

    name: ClassVar[str]
    kind: ClassVar[Literal["losses", "answers"]] = "losses"
    metric: ClassVar[str]
    words: ClassVar[str]
    unit: str = "bytes"
    loss_unit: str
    methods: ClassVar[tuple[str, ...]]
    stack: ClassVar[Literal["decoder", "encoder", "encoder-decoder"]] = "decoder"
    model_class: ClassVar[str] = "LongitudeForCausalLM"
    ngrams: ClassVar[tuple[int, ...]] = ()
    tokens: ClassVar[Mapping[str, int]] = {"vocab_size": BYTES}
    tokenized: ClassVar[bool] = False
    digits: ClassVar[tuple[int, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    ceiling: ClassVar[str | None] = None

    @property
    def generated(self) -> bool:
        """Whether its examples are drawn from a seed; else it reads --data."""
        return self.defaults.get("data") == (GENERATED,)

    @property
    def model(self) -> Any:
        """The class that is trained."""
        return getattr(models, self.model_class)

    def valid_methods(self) -> tuple[str, ...]:
        """`methods`, and those that plugins add."""
        return self.methods

    def vocabulary(self, config: StudyConfig) -> Mapping[str, int]:
        """`tokens`, or the vocabulary of a --tokenizer. ValueError if that cannot be loaded."""
        return self.tokens if config.tokenizer == BYTE else {"vocab_size": reader(config.tokenizer).vocabulary}

    def positions(self, length: int) -> int:
        """How many positions a model needs for a length."""
        return length

    def places(self, length: int) -> int:
        """How many places an encoding that counts digits needs for a length."""
        return self.positions(length)

    def require_length(self, length: int) -> None:  # noqa: B027 (most tasks have every length)
        """ValueError for a length that no example has."""

    def trained_positions(self, config: StudyConfig) -> int:
        """Positions that a table must cover for training."""
        return config.position_range or self.positions(config.train_length)

    def prepare(self, config: StudyConfig) -> StudyData:
        """Everything that is read before a run begins. ValueError for the user."""
        return prepare(config)

    def try_out(self, model: Any, config: StudyConfig) -> None:
        """Run the model once. ValueError for the user if options contradict its shape."""
        model(torch.zeros(1, 2, dtype=torch.long))
        if config.position_range is not None:  # also at the highest position
            ends = torch.tensor([[0, config.position_range - 1]])
            model(torch.zeros(1, 2, dtype=torch.long), position_ids=ends)

    @abstractmethod
    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        """The training examples, as many as all steps together need."""

    @abstractmethod
    def selection(self, config: StudyConfig, data: StudyData) -> Examples:
        """Examples of one shape, of the training length at contiguous positions, to choose learning rates on.

        No seed trains on them, and nothing else is measured on them.
        """

    @abstractmethod
    def measure(self, of: Measuring) -> tuple[list[Row], list[pd.DataFrame]]:
        """Rows, and for each length and method a table `of.per_document`."""

    def window(self, of: Measuring) -> pd.DataFrame | None:
        """Losses of a typical held-out window of the longest length, for one figure of all models; None without a text.

        Columns: text, of each byte or token; nats.
        """
        return None

    def left_out(self, of: Measuring) -> str | None:
        """Methods that do not apply to a model, in words that follow its label; None if all apply."""
        return None

    def measured_tokens(self, config: StudyConfig) -> int:
        """Work of measuring a model, in tokens read, for the progress bar and the estimates of --plan."""
        passes = 3 if "sliding" in config.methods else 1
        return config.documents * config.longest * len(config.test_lengths) * passes


class Generated(Task):
    """A task whose examples are drawn from a seed, and whose answers are right or wrong; its first line says what is drawn.

    Attributes:
        version: Version of the generated data; another version makes another study.
        grows: Whether training examples have all lengths from 1 to the training length, or that length alone.
    """

    kind, unit, loss_unit = "answers", "symbols", "symbol"
    version: ClassVar[int] = 1
    grows: ClassVar[bool] = True

    @abstractmethod
    def drawn_tests(self, config: StudyConfig) -> Iterator[np.ndarray]:
        """Test examples, int64."""

    @abstractmethod
    def floor(self, length: int) -> float:
        """The share of right answers of the best rule that does not know where the tokens are."""

    def prepare(self, config: StudyConfig) -> StudyData:
        digest = hashlib.sha256()
        for part in self.drawn_tests(config):
            digest.update(part.astype("<i8").tobytes())
        drawn, _, _ = (inspect.getdoc(type(self)) or "").partition("\n")
        lengths = f"1 to {config.train_length}, from 1 on over the first half of the steps"
        description = {
            "source": f"generated: {drawn.rstrip('.')}",
            "version": self.version,
            "sha256": digest.hexdigest(),
            "training_sha256": None,
            "training_lengths": lengths if self.grows else f"{config.train_length}",
            "test_examples_of_each_length": config.documents,
            "floor": {str(length): self.floor(length) for length in config.test_lengths},
            "ceiling": self.ceiling,
        }
        return StudyData([], [], description)


def scored(of: Measuring, scores: torch.Tensor, **columns: Any) -> Row:
    """The row of a mean of scores from 0 to 1, one for each example, with Wilson's interval."""
    value, low, high = proportions.mean(scores.tolist())
    columns = {"count": len(scores), **of.labels, **columns}
    dtype = str(of.model.dtype).removeprefix("torch.")
    same = {"weighting": "example", "truncation": "none", "dtype": dtype, "documents": len(scores)}
    return Row(**same, **columns, value=value, low=low, high=high)


def growing(longest: int, steps: int) -> np.ndarray:
    """Maximum length at each step: from 1 evenly to `longest` over the first half (Zaremba and Sutskever 2014)."""
    return np.minimum(longest, 1 + 2 * longest * np.arange(steps) // steps)


def rows_by_distance(answers: pd.DataFrame, metric: str, labels: dict[str, Any]) -> Iterator[Row]:
    """The share of exact answers at each distance, of a table `Measuring.per_document`; none if it has no distances."""
    if "distance" not in answers:
        return
    groups: Any = answers.groupby(["method", "length", "distance"])["exact"]
    for (method, length, distance), exact in groups:
        value, low, high = proportions.mean(exact.tolist())
        counted = {"documents": len(exact), "count": len(exact), "value": value, "low": low, "high": high}
        place = {"method": method, "length": int(length), "distance": int(distance)}
        yield Row(**labels, metric=metric, weighting="example", **place, **counted)


TASKS = Registry("task of --task", "`longitude study --help`", ("longitude.study.tasks",))
Kind = TypeVar("Kind", bound=type[Task])


def register_task(name: str) -> Callable[[Kind], Kind]:
    """Decorate a subclass of `Task`: `longitude study --task NAME`. ValueError if another class has this name."""

    def add(kind: Kind) -> Kind:
        kind.name = name
        return TASKS.register(name)(kind)

    return add


def task_of(name: str) -> Task:
    """The task of a name. ValueError with the nearest name for an unknown one."""
    return TASKS[name]()


def task_for(config: StudyConfig) -> Task:
    """The task of a study, in the units of its --tokenizer. ValueError for an unknown one."""
    task = task_of(config.task)
    if config.tokenizer != BYTE:
        task.unit, task.loss_unit = "tokens", "token"
    return task


def of_task(name: str, **options: Any) -> StudyConfig:
    """A study of this task, with its defaults for options that are not given. ValueError for an unknown task."""
    return StudyConfig(**{"task": name, **task_of(name).defaults, **options})


def sampler_of(config: StudyConfig) -> Sampler | None:
    """Sampler of the positions of training examples; None: the model counts them."""
    if config.positions == "contiguous":
        return None
    return sampler(config.positions, **({"max_length": config.position_range} if config.positions in RANGED else {}))
