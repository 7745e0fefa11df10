"""A study without its models: small files to keep or to commit, from which everything about its results is computed again.

study.json is the question, with the status of every trial and the digests of the two tables: the rows, without those by
position, and the sums of every document.
"""

from dataclasses import fields
from pathlib import Path

import pandas as pd

from longitude.measure.rows import to_frame
from longitude.runs.files import atomic, write_json
from longitude.study.results import BY_POSITION, DIGESTS, DOCUMENTS, KEPT, ROWS, SCHEMA, TRIALS, Run, digest_of
from longitude.study.trial import Status


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
        with atomic(folder / name) as unfinished:
            table.to_parquet(unfinished, index=False, compression="zstd")
    names = [field.name for field in fields(Status)]
    trials = [{name: getattr(trial, name) for name in names} for trial in run.trials]
    write_json(
        folder / KEPT,
        {"schema": SCHEMA, **run.study, TRIALS: trials, DIGESTS: {name: digest_of(folder / name) for name in tables}},
    )
    return folder
