"""Base classes of tasks: data, examples and model for training, measurement, and names of the metrics."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import pandas as pd
import torch

from longitude.measure.rows import Row
from longitude.positions.samplers import Sampler, sampler
from longitude.registry import Registry
from longitude.study.config import BYTE, RANGED, StudyConfig
from longitude.study.data import Examples, StudyData, prepare
from longitude.study.tokens import reader

BYTES = 256
"""Number of ids of bytes."""
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
        ngrams: Orders of the n-grams that its models must beat to have learned anything.
        symbols: Size of the vocabulary.
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
    ngrams: ClassVar[tuple[int, ...]] = ()
    symbols: ClassVar[int] = BYTES
    tokenized: ClassVar[bool] = False
    digits: ClassVar[tuple[int, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    ceiling: ClassVar[str | None] = None

    @property
    def generated(self) -> bool:
        """Whether its examples are drawn from a seed; else it reads --data."""
        return self.kind == "answers"

    def valid_methods(self) -> tuple[str, ...]:
        """`methods`, and those that plugins add."""
        return self.methods

    def vocabulary(self, config: StudyConfig) -> int:
        """`symbols`, or the size of the vocabulary of a --tokenizer. ValueError if that cannot be loaded."""
        return self.symbols if config.tokenizer == BYTE else reader(config.tokenizer).vocabulary

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


TASKS = Registry("task of --task", "`longitude study --help`", ("longitude.study.tasks",))
Kind = TypeVar("Kind", bound=type[Task])


def register_task(name: str) -> Callable[[Kind], Kind]:
    """Decorate a subclass of `Task`, or of `Questions`: `longitude study --task NAME`.

    Args:
        name: name of the task.

    Returns:
        The decorator; it raises ValueError if another class has this name.
    """

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
