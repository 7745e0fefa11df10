"""Read a study from its run directory, for statistics, figures and the report, and keep it without its models."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pandas as pd

from longitude import plugins
from longitude.errors import UsageError
from longitude.measure.rows import Row, from_frame, read_rows, to_frame
from longitude.positions.samplers import Mixed
from longitude.report.wording import papers
from longitude.runs.files import atomic, read_bytes, read_json, write_json
from longitude.runs.machine import available_memory
from longitude.runs.store import QUESTION, RESULT, Store
from longitude.statistics.estimates import Sums
from longitude.study.blind import is_blind, seen
from longitude.study.config import StudyConfig
from longitude.study.rates import Choice, choices, recorded, shown
from longitude.study.tasks.base import TASKS, Task, task_for
from longitude.study.trial import Status, Trial
from longitude.study.units import Keys

VERB, KEPT = "study", "study.json"
"""The command of a study's question.json; the file of a study that is kept without its models."""
STATUS, FAILURE, ROWS, DOCUMENTS, WINDOW = (
    "status.json", "failure.json", "results.parquet", "documents.parquet", "one-text.parquet",
)  # fmt: skip
"""Files of units."""
TRIALS, DIGESTS, SCHEMA = "trials", "digests", 3
"""Keys of the file of a study that is kept, and its version."""
NOTHING_MEASURED = pd.DataFrame(columns=["label", "seed", "method", "length", "document"])
FIRST, LAST = "first quarter", "last quarter"
"""Methods of documents.parquet: the losses at a quarter of the positions of windows of the training length."""
BY_POSITION = "per-position"
"""The method with several values per length."""
COPIES, NEAR, FAR = "copies", "near copy", "far copy"
"""The method of losses on bytes that a copy predicts, and the two kinds of bytes that it measures."""


class Data(TypedDict):
    """What every question has of its data."""

    source: str
    sha256: str


class Question(TypedDict):
    """What every question has, asked or kept."""

    begun: str
    commit: str | None
    configuration: dict[str, Any]
    data: Data
    machine: dict[str, Any]
    plugins: list[plugins.Plugin]
    recipe: dict[str, Any]
    versions: dict[str, str | None]


class TrialAsked(TypedDict):
    """A trial of a question, with the keys of its units."""

    label: str
    seed: int
    rate: float
    training: str
    measuring: str


class QuestionAsked(Question):
    """A question.json."""

    ngrams: str
    trials: list[TrialAsked]


class QuestionKept(Question):
    """The file of a study that is kept."""

    choices: dict[str, dict[str, Any]]
    digests: dict[str, str]
    ngrams: dict[str, float]
    trials: list[dict[str, Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class TrialResult(Status):
    """One encoding and seed, at its learning rate.

    Attributes:
        folder: Folder of its training unit, with its model.
        documents: Sums of each document; empty unless the trial is done.
        window: Columns text, nats: every byte or token of one held-out window of text; None if it was not measured.
    """

    folder: Path
    documents: pd.DataFrame
    window: pd.DataFrame | None = None

    @cached_property
    def measured(self) -> dict[Any, pd.DataFrame]:
        """Groups of `documents` by (length, method), in document order."""
        return dict(iter(self.documents.sort_values("document", kind="stable").groupby(["length", "method"])))


RULE = "rule without positions"
"""Name of the baseline without a model, for tasks with right or wrong answers."""


def ngrams_named(order: int) -> str:
    """Name of n-gram counts of this order."""
    return {1: "unigram", 2: "bigram", 3: "trigram"}.get(order, f"{order}-gram") + " counts"


@dataclass(frozen=True, eq=False)
class Run:
    """The contents of a run directory.

    Attributes:
        study: The question, with the chosen learning rates and the n-grams: configuration, data, recipe, choices,
            ngrams, versions, machine.
        trials: For every label and seed, the trial at the label's learning rate.
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

    def is_blind(self, label: str) -> bool:
        """Whether a label is a blind control of the study."""
        return is_blind(label, self.train_length)

    def sight(self, blind: str) -> str:
        """How much a blind control sees, as text to follow its name."""
        return f"sees {seen(blind, self.config.layers)} {self.task.unit}"

    @property
    def names(self) -> dict[str, str]:
        """Label -> its name on charts and pages: the paper's, or what a blind control sees."""
        return {
            label: self.sight(label) if self.is_blind(label) else name for label, name in papers(self.labels).items()
        }

    @property
    def floor(self) -> dict[int, float]:
        """Order -> bits per byte of n-grams counted on the training windows; empty if there are none."""
        return {int(order): bits for order, bits in (self.study.get("ngrams") or {}).items()}

    @property
    def best_ngrams(self) -> tuple[str, float] | None:
        """Name and bits of the best n-grams in `floor`: on little text bigrams are better than trigrams."""
        order = min(self.floor, key=self.floor.__getitem__, default=None)
        return None if order is None else (ngrams_named(order), self.floor[order])

    @property
    def guessing(self) -> dict[int, float]:
        """The share of right answers of the best rule without positions, by length; empty if the task states none."""
        return {int(length): share for length, share in (self.study["data"].get("floor") or {}).items()}

    @property
    def choices(self) -> dict[str, Choice]:
        """Choice of the learning rate by label; empty if there was one rate for all."""
        return {label: choice for label, choice in recorded(self.study).items() if label in self.labels}

    @property
    def sampled_positions(self) -> str:
        """Positions of the training windows, in words; empty if they were 0, 1, 2, ..."""
        sampler = self.config.positions
        if sampler == "mixed":
            return f"positions that restart (1 to {2**Mixed.halvings} documents in each)"
        return "" if sampler == "contiguous" else f"{sampler} positions out of {self.config.position_range}"

    @property
    def lengths(self) -> list[int]:
        return list(self.config.test_lengths)

    @property
    def methods(self) -> list[str]:
        """Methods with one value per length that were measured; the first is the one that the study concludes from.

        Those that extend models come last, in the order of the study, whether their plugins are loaded here or not.
        """
        known = self.task.methods
        order = sorted(self.config.methods, key=lambda name: known.index(name) if name in known else len(known))
        parts = {BY_POSITION: (), COPIES: (NEAR, FAR)}
        return [part for method in order for part in parts.get(method, (method,))]

    @property
    def reference(self) -> int:
        """The length that others are compared with: the training length, else the nearest measured (below, if any)."""
        return max((length for length in self.lengths if length <= self.train_length), default=self.lengths[0])

    @property
    def beyond(self) -> list[int]:
        """Measured lengths above both the training length and the reference."""
        return [length for length in self.lengths if length > max(self.train_length, self.reference)]

    @property
    def complete(self) -> bool:
        """Whether every trial is done, none diverged or failed."""
        return not self.undone

    def of(self, label: str) -> list[TrialResult]:
        """The trials of a label, one per seed."""
        return [trial for trial in self.trials if trial.label == label]

    def untrained(self, label: str) -> str | None:
        """Parts of a label that training never used, as text to follow the label."""
        return next((trial.untrained for trial in self.of(label) if trial.untrained), None)

    @cached_property
    def undone(self) -> list[TrialResult]:
        return [trial for trial in self.trials if trial.status != "done"]

    def sums(self, label: str, length: int, method: str, columns: Sequence[str]) -> Sums | None:
        """Sums of two columns, for the documents of the trials that are done; None if nothing was measured."""
        done = [trial for trial in self.of(label) if trial.status == "done"]
        parts = [trial.measured[length, method] for trial in done if (length, method) in trial.measured]
        if not parts:
            return None
        names = {tuple(part["document"]) for part in parts}
        if len(names) > 1 or len(parts) < len(done):
            what = f"the seeds of {label} were not measured on the same documents at length {length}"
            raise ValueError(f"{self.path}: {what}; run the same `longitude study` again, it continues")
        of, over = (np.stack([part[name].to_numpy(np.float64) for part in parts]) for name in columns)
        return Sums(tuple(trial.seed for trial in done), of, over)


# ---- reading ----------------------------------------------------------------------------------------------------------
def question_of(run: Path) -> dict[str, Any] | None:
    """Last question of `longitude study` in a folder, or the question of a study kept there; None if there is none.

    Raises:
        ValueError: The file is damaged, of another release, or was edited into a configuration that does not exist.
    """
    kept = is_kept(run)
    path, remedy = (
        (run / KEPT, "keep the study again") if kept else (run / QUESTION, "give the command again with its options")
    )
    question = read_json(path, remedy)
    if question is None or not (kept or question.get("verb") == VERB):
        return None
    if kept and question.get("schema") != SCHEMA:
        raise UsageError(str(path), f"schema {SCHEMA}, which this release reads", question.get("schema"), remedy)
    _converted(question, QuestionKept if kept else QuestionAsked, path, remedy)
    try:
        labels = StudyConfig.of(question["configuration"]).encodings
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {remedy}") from None
    if strange := {str(trial.get("label")) for trial in question["trials"]}.difference(labels):
        raise UsageError(f"{path}: label of a trial", ", ".join(labels), min(strange), remedy)
    return question


def is_kept(folder: Path) -> bool:
    """Whether a folder has a study that is kept without its models."""
    return (folder / KEPT).is_file()


def is_study(folder: Path) -> bool:
    """Whether a folder has a study, with its models or kept without them."""
    return is_kept(folder) or (read_json(folder / QUESTION) or {}).get("verb") == VERB


def read_run(run: Run | Path | str, numbers_only: bool = False) -> Run:
    """The study that a folder was asked for last, or that is kept there; a Run is returned unchanged.

    numbers_only: Whether plugins of its encodings may be missing: saved numbers are read, and no model is built.

    Raises:
        ValueError: There is no such folder or no study in it, a plugin is missing, or a unit is damaged. A trial that diverged,
            failed, or was not run raises no error: it is part of the result.
    """
    if isinstance(run, Run):
        return run
    path = Path(run)
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such run directory; `longitude study --out {path}` makes one")
    question = question_of(path)
    if question is None:
        raise ValueError(f"{path} has no study; give a directory that `longitude study` wrote")
    if is_kept(path):
        return _read_kept(path, question)
    if not numbers_only or question["configuration"]["task"] not in TASKS:
        plugins.require_loaded(question["plugins"], str(path))
    return run_of(Store(path), question)


def _read_kept(folder: Path, study: dict[str, Any]) -> Run:
    """Read a kept study, whose trials have no models."""
    for name in (ROWS, DOCUMENTS):
        if not (folder / name).exists() or digest_of(folder / name) != study[DIGESTS].get(name):
            what = f"not the table that its {KEPT} was written with"
            raise ValueError(f"{folder / name} is {what}; copy the folder again")
    documents, trials = pd.read_parquet(folder / DOCUMENTS), []
    for saved in study[TRIALS]:
        sums = documents.loc[(documents["label"] == saved["label"]) & (documents["seed"] == saved["seed"])]
        status = _converted(saved, Status, folder / KEPT, "copy the folder again")
        trials.append(TrialResult(**asdict(status), folder=folder, documents=sums))
    return Run(folder, study, tuple(trials), from_frame(read_rows(folder / ROWS)))


def digest_of(path: Path) -> str:
    """A hash of the contents of a file."""
    return hashlib.sha256(read_bytes(path, limit=available_memory())).hexdigest()


def keys_of(question: Mapping[str, Any]) -> list[Keys]:
    """The trials of a question, in order."""
    return [
        Keys(Trial(item["label"], item["seed"], item["rate"]), item["training"], item["measuring"])
        for item in question["trials"]
    ]


def run_of(store: Store, question: Mapping[str, Any], known: Mapping[Trial, Status] | None = None) -> Run:
    """Results of a question in the store. known: statuses of its trials."""
    every = keys_of(question)
    statuses = known or {keys.trial: status_of(store, keys) for keys in every}
    chosen = choices(statuses)
    study = {**question, "choices": {label: choice.as_json for label, choice in chosen.items()}}
    counted = store.find("ngrams", question["ngrams"])
    study["ngrams"] = {} if counted is None else read_json(counted / RESULT)
    kept = {*shown(statuses, chosen)}
    trials, rows = [], []
    for keys in every:
        if keys.trial in kept:
            trial, of_trial = _read_trial(store, keys, statuses[keys.trial])
            trials.append(trial)
            rows += of_trial
    return Run(store.run, study, tuple(trials), rows)


def status_of(store: Store, keys: Keys) -> Status:
    """Status of a trial, from its finished units, or from the failure recorded in an unfinished one."""
    trained, measured = store.find("train", keys.training), store.find("measure", keys.measuring)
    if trained is None:
        unfinished = store.unfinished("train", keys.training)
        if (unfinished / FAILURE).exists():
            return read_status(unfinished, FAILURE)
        return keys.trial.status("running" if unfinished.is_dir() else "not run", 0)
    if measured is not None:
        return read_status(measured)
    failed, status = store.unfinished("measure", keys.measuring), read_status(trained)
    return read_status(failed, FAILURE) if status.status == "trained" and (failed / FAILURE).exists() else status


def read_status(folder: Path, name: str = STATUS) -> Status:
    """Read the status of a trial from a unit or a failure. ValueError if it is of another type."""
    path, remedy = folder / name, f"move {folder} away, and the same `longitude study` makes it again"
    return _converted(read_json(path, remedy), Status, path, remedy)


def _converted(value: Any, kind: Any, path: Path, remedy: str) -> Any:
    """JSON as a type; keys of other releases are ignored. ValueError for a value of another type."""
    import msgspec  # the options of a study, which need this module, do not need it

    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}, as $: {error}; {remedy}") from None


def _read_trial(store: Store, keys: Keys, status: Status) -> tuple[TrialResult, list[Row]]:
    """A trial, and its rows if it is done."""
    folder = store.find("train", keys.training) or store.unfinished("train", keys.training)
    if status.status != "done":
        return TrialResult(**asdict(status), folder=folder, documents=NOTHING_MEASURED), []
    measured = store.find("measure", keys.measuring)
    assert measured is not None  # a trial that is done is measured
    documents, rows = pd.read_parquet(measured / DOCUMENTS), from_frame(read_rows(measured / ROWS))
    window = pd.read_parquet(measured / WINDOW) if (measured / WINDOW).exists() else None
    return TrialResult(**asdict(status), folder=folder, documents=documents, window=window), rows


# ---- keeping ---------------------------------------------------------------------------------------------------------
def keep(run: Run, folder: Path) -> Path:
    """Write a study without its models; returns the folder.

    Args:
        run: Result of `read_run`.
        folder: Its files of the same names are replaced.

    Raises:
        ValueError: No trial of the study is done.
    """
    done = [trial for trial in run.trials if trial.status == "done"]
    if not done:
        raise ValueError(f"{run.path}: no trial of the study is done, so there is nothing to keep")
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        ROWS: to_frame(row for row in run.rows if row.method != BY_POSITION),
        DOCUMENTS: pd.concat([trial.documents for trial in done], ignore_index=True),
    }
    for name, table in tables.items():
        # A dictionary of sums, of which no two are equal, would be larger than they are; split by bytes they take a third less.
        sums = [column for column, kind in table.dtypes.items() if kind == np.float64]
        split = dict.fromkeys(sums, "BYTE_STREAM_SPLIT")
        rest = [column for column in table if column not in sums]
        with atomic(folder / name) as unfinished:
            table.to_parquet(unfinished, index=False, compression="zstd", column_encoding=split, use_dictionary=rest)
    names = [field.name for field in fields(Status)]
    trials = [{name: getattr(trial, name) for name in names} for trial in run.trials]
    digests = {name: digest_of(folder / name) for name in tables}
    kept = {"schema": SCHEMA, **run.study, TRIALS: trials, DIGESTS: digests}
    write_json(folder / KEPT, kept)
    return folder
