"""What a task must know how to do: make data, examples and the shape of a model, and measure one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from longitude.measure import Row
from longitude.positions.samplers import Sampler, sampler
from longitude.study.config import StudyConfig
from longitude.study.tasks import Task

BYTES = 256
"""Every model of a study reads bytes; a task's own tokens follow."""


@dataclass(frozen=True)
class StudyData:
    """training, validation: documents of bytes, uint8 [n] and int64 [n]; none where examples are drawn. description: for
    study.json.
    """

    training: list[np.ndarray]
    validation: list[Tensor]
    description: dict[str, Any]


class Examples(torch.utils.data.Dataset, ABC):
    """Training examples in their order, which the seed decides, and no model: example i as the model's forward takes it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def targets(self, examples: int) -> int:
        """Tokens that the first so many examples ask for."""


class TaskRunner(ABC):
    """One task at work. model: the class that is trained."""

    model: ClassVar[Any]

    def __init__(self, task: Task):
        self.task = task

    @abstractmethod
    def prepare(self, config: StudyConfig) -> StudyData:
        """Everything that is read before a run begins. ValueError for the user."""

    @abstractmethod
    def shape(self, config: StudyConfig) -> dict[str, Any]:
        """What the task decides of LongitudeConfig: vocabulary, and special tokens."""

    @abstractmethod
    def try_out(self, model: Any, config: StudyConfig) -> None:
        """Run the model once, so that options that contradict its shape show. ValueError for the user."""

    @abstractmethod
    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        """As many as all steps together need."""

    @abstractmethod
    def measure(
        self,
        model: Any,
        config: StudyConfig,
        data: StudyData,
        lengths: Sequence[int],
        labels: dict[str, Any],
        heard: Callable[[int, int], None],
    ) -> tuple[list[Row], pd.DataFrame]:
        """Rows, and what statistics need of each document or example. labels: columns of the rows; heard(done, total)."""

    def positions(self, config: StudyConfig) -> int:
        """Positions that a table must hold for training."""
        return config.position_range or self.task.positions(config.train_length)


def sampler_of(config: StudyConfig) -> Sampler | None:
    """Where the positions of training examples come from; None: the model counts them itself."""
    if config.positions == "contiguous":
        return None
    return sampler(config.positions, max_length=config.position_range)


def sampled(positions: Sampler, length: int, *seeds: int) -> Tensor:
    """Positions [length] of one training sequence, which the seeds alone decide."""
    first, *rest = seeds
    own = np.random.SeedSequence(first, spawn_key=rest).generate_state(1)[0]
    return positions(1, length, torch.Generator().manual_seed(int(own)))[0]
