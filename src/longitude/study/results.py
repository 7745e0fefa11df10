"""A study as its run directory holds it: what the statistics, the figures and the report are made of, and all of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from longitude import plugins
from longitude.measure.rows import Row, from_frame, read_rows
from longitude.study.config import StudyConfig
from longitude.study.rates import Choice, recorded, shown
from longitude.study.record import read_study, require_own
from longitude.study.resume import LossLog
from longitude.study.tasks.base import Task, task_for
from longitude.study.trial import Status, Trial, trials_of

REMEDY = "run the same `longitude study` again, it continues"
GATHERED = "run the same `longitude study` again, it gathers them"
NOTHING_MEASURED = pd.DataFrame(columns=["label", "seed", "method", "length", "document"])
FIRST, LAST = "first quarter", "last quarter"
"""Methods of documents.parquet: the losses at a quarter of the positions of windows of the training length."""
BY_POSITION = "per-position"
"""The method with several values per length."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrialResult(Status):
    """One encoding and seed, at its learning rate.

    Attributes:
        folder: Its checkpoint.
        losses: Of each step its step, loss (nats per token), learning_rate, tokens.
        documents: Sums of each document, of a trial that is done.
    """

    folder: Path
    losses: list[dict[str, Any]]
    documents: pd.DataFrame

    @cached_property
    def measured(self) -> dict[Any, pd.DataFrame]:
        """Of `documents` those of each (length, method), in their order."""
        return dict(iter(self.documents.sort_values("document", kind="stable").groupby(["length", "method"])))


RULE = "rule without positions"
"""The name of what does without a model where answers are right or wrong."""


def ngrams_named(order: int) -> str:
    """Bigrams, trigrams, 4-grams."""
    return {1: "unigrams", 2: "bigrams", 3: "trigrams"}.get(order, f"{order}-grams")


class Sums(NamedTuple):
    """A metric's sums over documents, of the same documents for every seed.

    Attributes:
        seeds: Of the trials.
        of: [seeds, documents], such as nats.
        over: Of the same shape, such as bytes.
    """

    seeds: tuple[int, ...]
    of: np.ndarray
    over: np.ndarray

    @property
    def pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """[documents] each, summed over the seeds: the models as they are."""
        return self.of.sum(0), self.over.sum(0)

    def only(self, seeds: Sequence[int]) -> "Sums":
        """Of these seeds."""
        rows = [self.seeds.index(seed) for seed in seeds]
        return Sums(tuple(seeds), self.of[rows], self.over[rows])


@dataclass(frozen=True, eq=False)
class Run:
    """A run directory, read.

    Attributes:
        study: study.json.
        trials: Of every label and seed the one at the label's learning rate.
        rows: `measure.Row` of trials that are done.
    """

    path: Path
    study: dict[str, Any]
    trials: tuple[TrialResult, ...]
    rows: list[Row]

    @cached_property
    def config(self) -> StudyConfig:
        return StudyConfig.of(self.study["configuration"])

    @property
    def task(self) -> Task:
        return task_for(self.config)

    @property
    def labels(self) -> list[str]:
        """Encodings in the order of the study."""
        return list(self.config.encodings)

    @property
    def train_length(self) -> int:
        return self.config.train_length

    @property
    def floor(self) -> dict[int, float]:
        """Bits of n-grams counted on the training windows, by their length; empty where there are none."""
        return {int(order): bits for order, bits in (self.study.get("ngrams") or {}).items()}

    @property
    def best_ngrams(self) -> tuple[str, float] | None:
        """Of `floor` the name and bits of those with the fewest bits: on little text bigrams are better than trigrams."""
        order = min(self.floor, key=self.floor.__getitem__, default=None)
        return None if order is None else (ngrams_named(order), self.floor[order])

    @property
    def guessing(self) -> dict[int, float]:
        """The share of right answers of the best rule without positions, by length; empty where the task states none."""
        return {int(length): share for length, share in (self.study["data"].get("floor") or {}).items()}

    @property
    def choices(self) -> dict[str, Choice]:
        """Learning rates by label; empty where there was one for all."""
        return {label: each for label, each in recorded(self.study).items() if label in self.labels}

    def steps(self, label: str) -> int:
        """Of the training of a label."""
        return self.study["train_steps"].get(label, self.config.steps)

    def tokens(self, label: str) -> int:
        """Targets of the training of a label."""
        return replace(self.config, steps=self.steps(label)).training_tokens

    @property
    def sampled_positions(self) -> str:
        """Positions of the training windows, in words; empty where they were 0, 1, 2, ..."""
        sampler = self.config.positions
        return "" if sampler == "contiguous" else f"{sampler} positions out of {self.config.position_range}"

    @property
    def lengths(self) -> list[int]:
        return list(self.config.test_lengths)

    @property
    def methods(self) -> list[str]:
        """Methods with one value per length that were measured; the first is the one that the study concludes from.

        Those of plugins come last, whether they are loaded here or not.
        """
        known = self.task.methods
        order = sorted(self.config.methods, key=lambda each: known.index(each) if each in known else len(known))
        return [method for method in order if method != BY_POSITION]

    @property
    def reference(self) -> int:
        """The length that others are compared with: the training length, else the nearest measured (below, if any)."""
        return max((length for length in self.lengths if length <= self.train_length), default=self.lengths[0])

    @property
    def beyond(self) -> list[int]:
        """Measured lengths above both the training length and the reference."""
        return [length for length in self.lengths if length > max(self.train_length, self.reference)]

    def part(self, named: StudyConfig) -> "Run":
        """The encodings, seeds, lengths and methods that `named` names, of those that are here."""
        names = ("encodings", "seeds", "test_lengths", "methods")
        kept = {name: [x for x in getattr(self.config, name) if x in getattr(named, name)] for name in names}
        study = {**self.study, "configuration": {**self.study["configuration"], **kept}}

        def inside(each: Any) -> bool:
            return each.label in kept["encodings"] and each.seed in kept["seeds"]

        rows = [
            row
            for row in self.rows
            if inside(row)
            and row.length in kept["test_lengths"]
            and (row.method in kept["methods"] or row.distance is not None)
        ]
        return Run(self.path, study, tuple(filter(inside, self.trials)), rows)

    def of(self, label: str) -> list[TrialResult]:
        """The trials of a label, one per seed."""
        return [trial for trial in self.trials if trial.label == label]

    def untrained(self, label: str) -> str | None:
        """What training never used of a label, in words that follow it."""
        return next((trial.untrained for trial in self.of(label) if trial.untrained), None)

    @cached_property
    def undone(self) -> list[TrialResult]:
        return [trial for trial in self.trials if trial.status != "done"]

    def sums(self, label: str, length: int, method: str, columns: Sequence[str]) -> Sums | None:
        """Two columns of the documents of the trials that are done; None where nothing was measured."""
        done = [trial for trial in self.of(label) if trial.status == "done"]
        parts = [trial.measured[length, method] for trial in done if (length, method) in trial.measured]
        if not parts:
            return None
        names = {tuple(part["document"]) for part in parts}
        if len(names) > 1 or len(parts) < len(done):
            raise ValueError(
                f"{self.path}: the seeds of {label} were not measured on the same documents at length {length}; {REMEDY}"
            )
        of, over = (np.stack([part[name].to_numpy(np.float64) for part in parts]) for name in columns)
        return Sums(tuple(trial.seed for trial in done), of, over)


def read_run(run: Run | Path | str) -> Run:
    """Read a run directory (a Run comes back as it is).

    Raises ValueError naming what is missing: the directory, study.json, results.parquet, or the results of a trial that
    is done; or what is of another study or trial. A trial that diverged, failed, or was not run is no error: it is part of
    the result.
    """
    if isinstance(run, Run):
        return run
    path = Path(run)
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such run directory; `longitude study --out {path}` makes one")
    study = read_study(path)
    if study is None:
        raise ValueError(f"{path} holds no study: study.json is missing; give a directory that `longitude study` wrote")
    plugins.require_loaded(study.get("plugins", []), str(path))
    config = StudyConfig.of(study["configuration"])
    every = trials_of(path, config, study["train_steps"])
    current = {trial: require_own(trial, config, study) for trial in every}
    found = recorded(study)
    trials = tuple(
        _read_trial(trial, current[trial]) for trial in shown({trial: trial.status for trial in every}, found)
    )
    if not (path / "results.parquet").exists():
        raise ValueError(f"{path}: results.parquet is missing, no trial of the study has ended; {REMEDY}")
    done = {(trial.label, trial.seed, trial.rate) for trial in trials if trial.status == "done"}
    rows = from_frame(read_rows(path / "results.parquet"))
    for trial in trials:
        if trial.status == "done" and (own := trial.folder / "results.parquet").exists():
            here = [row for row in rows if (row.label, row.seed) == (trial.label, trial.seed)]
            if from_frame(read_rows(own)) != [row for row in here if row.learning_rate == trial.rate]:
                raise ValueError(f"{path / 'results.parquet'} does not hold the rows of {own}; {GATHERED}")
    return Run(path, study, trials, [row for row in rows if (row.label, row.seed, row.learning_rate) in done])


def _read_trial(trial: Trial, current: bool) -> TrialResult:
    path, status = trial.folder / "documents.parquet", trial.status
    documents = NOTHING_MEASURED
    if status.status == "done" and not current:
        raise ValueError(f"{trial.folder} was measured at other lengths or documents than its study; {REMEDY}")
    if status.status == "done":
        for name in ("documents.parquet", "losses.jsonl"):
            if not (trial.folder / name).exists():
                raise ValueError(f"{trial.folder / name} is missing although its trial is done; {trial.remedy}")
        try:
            documents = pd.read_parquet(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} is not a readable parquet table ({error}); {trial.remedy}") from error
        if (rows := trial.folder / "results.parquet").exists() and not trial.measured:
            raise ValueError(f"{rows} is cut short or empty although its trial is done; {REMEDY}")
    losses = LossLog(trial.folder / "losses.jsonl").read()
    if status.status == "done" and len(losses) != trial.steps:
        raise ValueError(f"{trial.folder / 'losses.jsonl'} ends at step {len(losses)} of {trial.steps}; {trial.remedy}")
    return TrialResult(**asdict(status), folder=trial.folder, losses=losses, documents=documents)
