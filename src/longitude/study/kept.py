"""A study without its models: small files to keep or to commit, from which everything about its results is computed again.

study.json is the question, with the status of every trial and the digests of the two tables: the rows, without those by
position, and the sums of every document.
"""

import hashlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd

from longitude.measure.rows import from_frame, read_rows, to_frame
from longitude.runs.files import atomic, read_json, write_json
from longitude.study.config import StudyConfig
from longitude.study.results import BY_POSITION, KEPT as STUDY, Run, TrialResult, question_of
from longitude.study.trial import Status

TRIALS, DIGESTS = "trials", "digests"
"""Keys of study.json that only a kept study has."""
SCHEMA = 3
"""Version of study.json."""
ROWS, DOCUMENTS = "results.parquet", "documents.parquet"


def keep(run: Run, folder: Path) -> Path:
    """Write a study without its models; returns the folder.

    Args:
        run: Of `read_run`.
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
        with atomic(folder / name) as unfinished:
            table.to_parquet(unfinished, index=False, compression="zstd")
    names = [field.name for field in fields(Status)]
    trials = [{name: getattr(trial, name) for name in names} for trial in run.trials]
    write_json(
        folder / STUDY,
        {"schema": SCHEMA, **run.study, TRIALS: trials, DIGESTS: {name: _digest(folder / name) for name in tables}},
    )
    return folder


def is_kept(folder: Path) -> bool:
    """Whether a folder holds what `keep` writes."""
    study = read_json(folder / STUDY)
    return isinstance(study, dict) and TRIALS in study


def read_study(folder: Path) -> dict[str, Any] | None:
    """The study of a folder, with its models (what was asked last) or kept without them; None where there is none.

    Raises:
        ValueError: It is damaged, or of another release.
    """
    if not is_kept(folder):
        return question_of(folder)
    remedy = f"copy the whole folder again, or keep its study again into {folder}"
    study = read_json(folder / STUDY, remedy)
    if study.get("schema") != SCHEMA or not isinstance(study.get("configuration"), dict):
        found = study.get("schema")
        raise ValueError(f"{folder / STUDY} has schema {found}, of another release; this one reads {SCHEMA}; {remedy}")
    StudyConfig.of(study["configuration"])
    return study


def read_kept(folder: Path) -> Run:
    """A kept study; its trials have no losses of training and no models.

    Raises:
        ValueError: Its files are not those of one `keep`, or of a release whose study.json cannot be read.
    """
    remedy = f"copy the whole folder again, or keep its study again into {folder}"
    study = read_study(folder) if is_kept(folder) else None
    if study is None or not isinstance(study.get(TRIALS), list):
        raise ValueError(f"{folder} holds no study without models: expected a study.json with {TRIALS!r}; {remedy}")
    for name, digest in study[DIGESTS].items():
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing; {remedy}")
        if _digest(folder / name) != digest:
            raise ValueError(f"{folder / name} is not the table that its study.json was written with; {remedy}")
    documents = pd.read_parquet(folder / DOCUMENTS)
    trials = tuple(_trial(folder, status, documents, remedy) for status in study[TRIALS])
    return Run(folder, study, trials, from_frame(read_rows(folder / ROWS)))


def _trial(folder: Path, status: dict[str, Any], documents: pd.DataFrame, remedy: str) -> TrialResult:
    try:
        own = Status(**status)
    except TypeError as error:
        raise ValueError(f"{folder / STUDY} is not of this release ({error}); {remedy}") from None
    part = documents.loc[(documents["label"] == own.label) & (documents["seed"] == own.seed)]
    return TrialResult(**asdict(own), folder=folder, losses=[], documents=part)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
