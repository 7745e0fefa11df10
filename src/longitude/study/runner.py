"""A study: many trials in one run directory, with one writer. What it was killed in, it continues."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from longitude import plugins
from longitude.measure import read_rows, to_frame, write_rows
from longitude.runs.files import FRESH, locked, out_of_space, read_json, remove_unfinished, write_json
from longitude.runs.provenance import provenance
from longitude.study.config import StudyConfig, listed, option
from longitude.study.executors import Executor, InProcess, wait_for_workers
from longitude.study.ngrams import record_ngrams
from longitude.study.plan import StudyPlan
from longitude.study.run_trial import Note, TrialRun, ignore, run_trial
from longitude.study.tasks.base import task_of
from longitude.study.trial import Status, Trial

SCHEMA = 1
GROWING = ("encodings", "seeds")
"""Options of which a run directory may be given more: their trials are added."""
Watch = Callable[[str, float, float], None]
"""Called with what is being done, how much of the work is done, and all of it."""


@dataclass(frozen=True)
class Outcome:
    """What a run directory holds now: its trials in the order of the study, each with its status."""

    run: Path
    config: StudyConfig
    trials: list[tuple[Trial, Status]]

    @property
    def complete(self) -> bool:
        """Whether every trial is done, none diverged or failed."""
        return all(status.status == "done" for _, status in self.trials)


def study(
    planned: StudyPlan,
    fresh: bool = False,
    on_progress: Watch = ignore,
    note: Note = ignore,
    executor: Executor = InProcess(),  # noqa: B008 - it holds nothing
) -> Outcome:
    """Run the trials that are not finished yet, and gather all rows.

    A trial that raises is recorded as failed with its reason, and tried again by the next call; a diverged one is a result.

    Args:
        planned: Of `plan`.
        fresh: Remove the study that the directory holds.
        on_progress: Called with what is being done, the trials done, in fractions, and their number.
        note: Called with a sentence about the study, and about every trial when it ends.
        executor: Where trials run; it changes no result.

    Returns:
        Every trial with its status.

    Raises:
        ValueError: Another process writes here, the directory holds another study, or the disk is full; nothing is then
            half-written.
    """
    run = planned.run
    with _full_disk_is_a_user_error(run):
        run.mkdir(parents=True, exist_ok=True)
        with locked(run):
            wait_for_workers(run)
            remove_unfinished(run)
            if fresh:
                _remove_study(run)
            planned = _opened(planned, note)
            record_ngrams(planned)
            note(_introduction(planned))
            statuses = _run_trials(planned, executor, on_progress, note)
            return Outcome(run, planned.config, [(trial, statuses[trial]) for trial in planned.trials])


def _run_trials(planned: StudyPlan, executor: Executor, on_progress: Watch, note: Note) -> dict[Trial, Status]:
    """Run those that are not finished; rows are gathered whenever one ends."""
    statuses = {trial: trial.status for trial in planned.trials}
    finished = [trial for trial in planned.trials if statuses[trial].status in ("done", "diverged")]
    running: dict[Trial, tuple[float, str]] = {}

    def report(trial: Trial, share: float, words: str) -> None:
        running[trial] = share, f"{trial.label} seed {trial.seed}  {words}"
        shares, lines = zip(*running.values(), strict=True)
        on_progress("\n".join(lines), len(finished) + sum(shares), len(statuses))

    for trial in finished:
        note(_sentence(trial, statuses[trial]))
    waiting = [trial for trial in planned.trials if trial not in finished]
    _gather(planned)
    if not waiting:
        return statuses
    run = partial(run_trial, planned.config, data=planned.data, commit=provenance()["commit"])
    for trial, status in executor.map(run, waiting, report, note):
        if isinstance(status, str):
            status = TrialRun(planned.config, trial, planned.data).record("failed", 0, reason=status)
        statuses[trial] = status
        _gather(planned)
        report(trial, 1, status.status)
        del running[trial]
        finished.append(trial)
        note(_sentence(trial, status))
    return statuses


def _gather(planned: StudyPlan) -> None:
    """All trials' rows into one table."""
    paths = [trial.folder / "results.parquet" for trial in planned.trials]
    frames = [read_rows(path) for path in paths if path.exists()]
    write_rows(pd.concat(frames, ignore_index=True) if frames else to_frame([]), planned.run / "results.parquet")


# ---- in words --------------------------------------------------------------------------------------------------------
def _introduction(planned: StudyPlan) -> str:
    config, data = planned.config, planned.data.description
    if task_of(config.task).generated:
        trained = f"{config.steps * config.batch_size:,} examples ({data['source']})"
        measured = f"{data['test_examples_of_each_length']} of each length"
    else:
        trained = f"{config.training_tokens:,} bytes of {data['source']}"
        measured = f"{data['validation_documents']} documents"
    return f"{len(planned.trials)} models, each trained on {trained} and measured on {measured}; {planned.run}"


def _sentence(trial: Trial, status: Status) -> str:
    name = f"{trial.label} seed {trial.seed}"
    if status.status == "done":
        return "; ".join(filter(None, (f"{name}: done", status.untrained, status.reason)))
    if status.status == "failed":
        trace = trial.folder / "error.txt"
        return f"{name}: failed, {status.reason}" + (f"; see {trace}" if trace.exists() else "")
    return f"{name}: {status.status}, {status.reason}"


# ---- study.json ------------------------------------------------------------------------------------------------------
def _opened(planned: StudyPlan, note: Note) -> StudyPlan:
    """Write study.json, or continue the study in it; more encodings and seeds than saved are added to it."""
    path, here = planned.run / "study.json", provenance()
    saved = read_json(path, FRESH)
    if saved is None:
        begun = {"schema": SCHEMA, "begun": _now(), **here, "continued": []}
    else:
        planned = replace(planned, config=_continued(planned, saved))
        begun = {key: saved[key] for key in ("schema", "begun", *here, "continued")}
        last = begun["continued"][-1] if begun["continued"] else begun
        if changes := [name for name in here if here[name] != last[name]]:
            note(f"{planned.run} was begun with another {' and '.join(changes)}; study.json keeps both")
            begun["continued"] = [*begun["continued"], {"at": _now(), **here}]
    begun["plugins"] = plugins.records(planned.config.task, *planned.config.encodings)
    plugins.require_same((saved or {}).get("plugins", []), begun["plugins"], str(planned.run))
    whole = {**begun, "configuration": asdict(planned.config), "data": planned.data.description}
    if json.loads(json.dumps(whole)) != saved:
        write_json(path, whole)
    return planned


def _continued(planned: StudyPlan, saved: dict[str, Any]) -> StudyConfig:
    """The saved study, grown by new encodings and seeds. ValueError naming the first option that differs."""
    remedy = "--fresh starts over, another --out keeps both"
    if not isinstance(saved, dict) or saved.get("schema") != SCHEMA:
        raise ValueError(f"{planned.run} holds a study.json that this release cannot read; {remedy}")
    before = asdict(StudyConfig.of(saved["configuration"]))
    for name, now in asdict(planned.config).items():
        grown = name in GROWING and set(before[name]) <= set(now)
        if before[name] != now and not grown:
            old, new = (listed(each) if isinstance(each, tuple) else each for each in (before[name], now))
            raise ValueError(f"{planned.run} holds a study with {option(name)} {old}, not {new}; {remedy}")
    was, data = saved["data"], planned.data.description
    if was["sha256"] != data["sha256"]:
        raise ValueError(
            f"{planned.run} holds a study of another text ({was['source']}, sha256 {was['sha256'][:12]}), not "
            f"{data['source']}, sha256 {data['sha256'][:12]}; {remedy}"
        )
    both = {name: dict.fromkeys([*before[name], *getattr(planned.config, name)]) for name in GROWING}
    return replace(planned.config, **{name: tuple(values) for name, values in both.items()})


def _remove_study(run: Path) -> None:
    """Everything a study writes, study.json last; other files stay."""
    shutil.rmtree(run / "cells", ignore_errors=True)
    for pattern in ("figures/*.svg", "figures/*.png", "report.html", "results.parquet", "study.json"):
        for path in run.glob(pattern):
            path.unlink()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def _full_disk_is_a_user_error(run: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) or not out_of_space(error, run):
            raise
        raise ValueError(
            f"no space left on the disk of {run}; free some, then the same command continues where it stopped"
        ) from error
