"""One trial of a study: one encoding and seed, its folder and its status. Loads neither torch nor transformers."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longitude.runs.files import read_json
from longitude.study.labels import parse_label, safe


@dataclass(frozen=True)
class Status:
    """How far a trial is: status.json.

    Attributes:
        status: "done" may leave out lengths; "diverged" is a result; "failed" is tried again.
        reason: Why it is not done, or what of done is left out.
        untrained: What training never used, in words that follow the label.
        training_seconds: None where training was interrupted.
    """

    status: Literal["not run", "running", "done", "diverged", "failed"]
    label: str
    seed: int
    encoding: str = ""
    step: int = 0
    steps: int = 0
    reason: str | None = None
    untrained: str | None = None
    parameters: int | None = None
    training_seconds: float | None = None
    measuring_seconds: float | None = None


@dataclass(frozen=True)
class Trial:
    """Where a label and a seed live in a run directory."""

    run: Path
    label: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder: a hash keeps labels apart that differ in case, or after many letters."""
        return f"{safe(self.label)[:100]}-{self.seed}-{hashlib.sha256(self.label.encode()).hexdigest()[:6]}"

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
        """Whether its rows are there."""
        return all((self.folder / name).exists() for name in ("results.parquet", "documents.parquet"))

    @property
    def status(self) -> Status:
        """As status.json has it now."""
        saved = read_json(self.folder / "status.json", self.remedy) or {"status": "not run"}
        return Status(**{"label": self.label, "seed": self.seed, **saved})
