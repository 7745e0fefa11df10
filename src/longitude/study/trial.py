"""One trial of a study: one label, seed and learning rate, its folder and its status. Loads neither torch nor transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longitude.labels import folder, parse_label
from longitude.runs.files import parquet_rows, read_json
from longitude.study.config import StudyConfig


@dataclass(frozen=True)
class Status:
    """How far a trial is: status.json.

    Attributes:
        status: "trained": not measured, as one of several learning rates; "done" may leave out lengths; "diverged" is a
            result; "failed" is tried again.
        steps: Of its whole training.
        reason: Why it is not done, or what of done is left out.
        selection: Loss at the training length on the selection text, in nats per target; None where it is not known, or the
            model diverged before.
        untrained: What training never used, in words that follow the label.
        training_seconds: None where training was interrupted.
    """

    status: Literal["not run", "running", "trained", "done", "diverged", "failed"]
    label: str
    seed: int
    rate: float
    encoding: str = ""
    step: int = 0
    steps: int = 0
    reason: str | None = None
    selection: float | None = None
    untrained: str | None = None
    parameters: int | None = None
    training_seconds: float | None = None
    measuring_seconds: float | None = None


@dataclass(frozen=True)
class Trial:
    """A label, a seed and a learning rate, and where they live in a run directory.

    Attributes:
        rate: Peak of the learning rate's schedule.
        steps: Of the training.
    """

    run: Path
    label: str
    seed: int
    rate: float
    steps: int

    @property
    def name(self) -> str:
        """Of its folder."""
        begin, end = folder(self.label)
        return f"{begin}-{self.seed}-lr={self.rate}-{end}"

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.label} seed {self.seed} lr {self.rate:g}"

    @property
    def folder(self) -> Path:
        """A Hugging Face checkpoint, with losses, rows, sums per document and status."""
        return self.run / "cells" / self.name

    @property
    def encoding(self) -> str:
        """Registered names of its encodings, without options."""
        return parse_label(self.label).encoding

    @property
    def trained(self) -> bool:
        """Whether its model is there; config.json is its last file."""
        return (self.folder / "config.json").exists()

    @property
    def remedy(self) -> str:
        """What mends it where its folder is broken: the others stay."""
        return f"move {self.folder} away, and the same `longitude study` trains this one again"

    @property
    def measured(self) -> bool:
        """Whether its rows are there, whole; none only where no document was measured."""
        rows, documents = (parquet_rows(self.folder / name) for name in ("results.parquet", "documents.parquet"))
        return rows is not None and documents is not None and (rows > 0 or documents == 0)

    @property
    def status(self) -> Status:
        """As status.json has it now."""
        saved = read_json(self.folder / "status.json", self.remedy)
        if saved is None:
            return Status("not run", self.label, self.seed, self.rate)
        try:
            return Status(**{"label": self.label, "seed": self.seed, "rate": self.rate, **saved})
        except TypeError as error:
            raise ValueError(f"{self.folder / 'status.json'} is not of this release ({error}); {self.remedy}") from None


def trials_of(run: Path, config: StudyConfig, steps: Mapping[str, int]) -> list[Trial]:
    """Every trial of a study in its order; steps: of the labels that have steps of their own."""
    return [
        Trial(run, label, seed, rate, steps.get(label, config.steps))
        for seed in config.seeds
        for rate in config.learning_rates
        for label in config.encodings
    ]
