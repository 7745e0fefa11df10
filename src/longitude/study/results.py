"""A study as its run directory holds it: what the statistics, the figures and the report are made of, and all of it.

Loading needs neither the text nor a model, and loads neither transformers nor the Trainer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from longitude.measure.rows import Row, from_frame, read_rows
from longitude.runs.files import FRESH, read_json
from longitude.study.labels import safe
from longitude.study.tasks import Task, task_of

REMEDY = "run the same `longitude study` again, it continues"
BY_LENGTH = ("non-overlapping", "sliding", "greedy")
"""Methods with one value per length; the first that a study measured is the one it concludes from."""


@dataclass(frozen=True, eq=False)
class CellResult:
    """One encoding and seed.

    status: done | diverged | failed | running | not run; reason: why not done, or what of done is left out; untrained: what
    training never used, in words that follow the label.
    losses: of each step its step, loss (nats per token), learning_rate, tokens. documents: sums of each document of a
    done cell.
    """

    label: str
    seed: int
    status: str
    losses: list[dict[str, Any]]
    documents: pd.DataFrame
    step: int = 0
    steps: int = 0
    reason: str | None = None
    untrained: str | None = None
    parameters: int | None = None
    training_seconds: float | None = None
    measuring_seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """A run directory, read. study: study.json. rows: `measure.Row` of done cells. cells: every planned one."""

    path: Path
    study: dict[str, Any]
    cells: tuple[CellResult, ...]
    rows: list[Row]

    @property
    def config(self) -> dict[str, Any]:
        return self.study["configuration"]

    @property
    def task(self) -> Task:
        return task_of(self.config.get("task", "text"))  # older studies do not say

    @property
    def labels(self) -> list[str]:
        """Encodings in the order of the study."""
        return list(self.config["encodings"])

    @property
    def train_length(self) -> int:
        return self.config["train_length"]

    @property
    def sampled_positions(self) -> str:
        """Positions of the training windows, in words; empty where they were 0, 1, 2, ..."""
        sampler = self.config.get("positions", "contiguous")  # studies of the first release do not say
        return "" if sampler == "contiguous" else f"{sampler} positions out of {self.config['position_range']}"

    @property
    def lengths(self) -> list[int]:
        return list(self.config["test_lengths"])

    @property
    def methods(self) -> list[str]:
        """Methods with one value per length that were measured."""
        return [method for method in BY_LENGTH if method in self.config["methods"]]

    @property
    def reference(self) -> int:
        """The length that others are compared with: the training length, else the nearest measured (below, if any)."""
        return max((length for length in self.lengths if length <= self.train_length), default=self.lengths[0])

    @property
    def beyond(self) -> list[int]:
        """Measured lengths above both the training length and the reference."""
        return [length for length in self.lengths if length > max(self.train_length, self.reference)]

    def of(self, label: str) -> list[CellResult]:
        """The cells of a label, one per seed."""
        return [cell for cell in self.cells if cell.label == label]

    def untrained(self, label: str) -> str | None:
        """What training never used of a label, in words that follow it."""
        return next((cell.untrained for cell in self.of(label) if cell.untrained), None)

    @cached_property
    def undone(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.status != "done"]

    def sums(self, label: str, length: int, method: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(nats, bytes), each [seeds, documents], of the cells that are done; None where nothing was measured."""
        stacked = self.stacked(label, length, method, ("nats", "bytes"))
        return None if stacked is None else (stacked[0], stacked[1])

    def stacked(self, label: str, length: int, method: str, columns: Sequence[str]) -> list[np.ndarray] | None:
        """Columns of the cells that are done, each [seeds, documents]; None where nothing was measured."""
        tables = [cell.documents for cell in self.of(label) if cell.status == "done"]
        parts = [table.query(f"length == {length} and method == {method!r}") for table in tables]
        parts = [part.sort_values("document") for part in parts if len(part)]
        if not parts:
            return None
        names = {tuple(part["document"]) for part in parts}
        if len(names) > 1 or len(parts) < len(tables):
            raise ValueError(
                f"{self.path}: the seeds of {label} were not measured on the same documents at length {length}; "
                f"start over with --fresh"
            )
        return [np.stack([part[name].to_numpy(np.float64) for part in parts]) for name in columns]


def read_run(run: Run | Path | str) -> Run:
    """Read a run directory (a Run comes back as it is).

    Raises ValueError naming what is missing: the directory, study.json, results.parquet, or the results of a cell that
    is said to be done. A cell that diverged, failed, or was not run is no error: it is part of the result.
    """
    if isinstance(run, Run):
        return run
    path = Path(run)
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such run directory; `longitude study --out {path}` makes one")
    study = read_json(path / "study.json", FRESH)
    if study is None:
        raise ValueError(f"{path} holds no study: study.json is missing; give a directory that `longitude study` wrote")
    if missing := [key for key in ("configuration", "data", "versions", "machine") if key not in study]:
        raise ValueError(f"{path / 'study.json'} lacks {', '.join(missing)}; start over with --fresh")
    config = study["configuration"]
    cells = tuple(_read_cell(path, label, seed) for label in config["encodings"] for seed in config["seeds"])
    if not (path / "results.parquet").exists():
        raise ValueError(f"{path}: results.parquet is missing, no cell of the study has ended; {REMEDY}")
    done = {(cell.label, cell.seed) for cell in cells if cell.status == "done"}
    rows = [row for row in from_frame(read_rows(path / "results.parquet")) if (row.label, row.seed) in done]
    return Run(path, study, cells, rows)


def _read_cell(run: Path, label: str, seed: int) -> CellResult:
    folder = run / "cells" / f"{safe(label)}-{seed}"
    status: dict[str, Any] = read_json(folder / "status.json", FRESH) or {"status": "not run"}
    known = ("status", "step", "steps", "reason", "untrained", "parameters", "training_seconds", "measuring_seconds")
    said = {name: status[name] for name in known if status.get(name) is not None}
    documents = pd.DataFrame(columns=["method", "length", "document"])
    if status["status"] == "done":
        documents = _read_documents(folder / "documents.parquet")
    losses = _read_losses(folder / "losses.jsonl", status["status"])
    return CellResult(label, seed, losses=losses, documents=documents, **said)


def _read_documents(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing although its cell is done; start over with --fresh") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet table ({error}); start over with --fresh") from error


def _read_losses(path: Path, status: str) -> list[dict[str, Any]]:
    """One entry per step; a last line that a killed process left half-written is dropped."""
    entries = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
    elif status == "done":
        raise ValueError(f"{path} is missing although its cell is done; start over with --fresh")
    return entries
