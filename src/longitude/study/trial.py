"""One model of a study: a label, a seed and a learning rate, and its status."""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from longitude.labels import parse_label, safe
from longitude.study.config import StudyConfig


@dataclass(frozen=True)
class Status:
    """Status of a trial.

    Attributes:
        status: "trained": not measured, as one of several learning rates; "done" may leave out lengths; "diverged" is a
            result; "failed" is tried again.
        label: The trial's label.
        seed: The trial's seed.
        rate: The trial's learning rate.
        encoding: Registered names of its encodings, without options.
        step: The last step of its training.
        reason: Why it is not done, or which lengths are left out.
        selection: Loss at the training length on the selection text, in nats per target; None if it is not known, or the model
            diverged before.
        untrained: Parts that training never used, as text to follow the label.
        parameters: Number of parameters of the model.
        training_seconds: Seconds of training; None if it was interrupted.
        measuring_seconds: Seconds of measuring; None if it was not measured.
    """

    status: Literal["not run", "running", "trained", "done", "diverged", "failed"]
    label: str
    seed: int
    rate: float
    encoding: str = ""
    step: int = 0
    reason: str | None = None
    selection: float | None = None
    untrained: str | None = None
    parameters: int | None = None
    training_seconds: float | None = None
    measuring_seconds: float | None = None


@dataclass(frozen=True)
class Trial:
    """A label, a seed and a learning rate.

    Attributes:
        rate: Peak of the learning rate's schedule.
    """

    label: str
    seed: int
    rate: float

    @property
    def name(self) -> str:
        """The trial in names of folders."""
        return f"{safe(self.label)[:60]}-{self.seed}-lr={self.rate}"

    @property
    def title(self) -> str:
        """The trial in words."""
        return f"{self.label} seed {self.seed} lr {self.rate:g}"

    @property
    def encoding(self) -> str:
        """Registered names of its encodings, without options."""
        return parse_label(self.label).encoding

    def status(
        self, status: Literal["not run", "running", "trained", "diverged", "failed"], step: int, **more
    ) -> Status:
        """A status of this trial."""
        return Status(status, self.label, self.seed, self.rate, self.encoding, step, **more)


def trials_of(config: StudyConfig) -> list[Trial]:
    """Every trial of a study in order."""
    every = product(config.seeds, config.learning_rates, config.encodings)
    return [Trial(label, seed, rate) for seed, rate, label in every]
