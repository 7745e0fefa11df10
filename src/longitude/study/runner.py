"""A study: many trials in one run directory, with one writer. What it was killed in, it continues."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pandas as pd

from longitude import plugins
from longitude.measure import read_rows, to_frame, write_rows
from longitude.runs.files import locked, out_of_space, remove_unfinished, write_json
from longitude.runs.provenance import provenance
from longitude.study.config import StudyConfig
from longitude.study.executors import Executor, InProcess, wait_for_workers
from longitude.study.ngrams import record_ngrams
from longitude.study.plan import StudyPlan
from longitude.study.record import (
    SCHEMA,
    STUDY,
    demote,
    measured_by,
    migrate,
    read_study,
    require_own,
    require_same_recipe,
    require_same_text,
)
from longitude.study.run_trial import Note, TrialRun, ignore, run_trial
from longitude.study.tasks.base import task_for
from longitude.study.train import recipe
from longitude.study.trial import Status, Trial

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
            _open(planned, note)
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
    paths = [trial.folder / "results.parquet" for trial in planned.every_trial]
    frames = [read_rows(path) for path in paths if path.exists()]
    write_rows(pd.concat(frames, ignore_index=True) if frames else to_frame([]), planned.run / "results.parquet")


# ---- in words --------------------------------------------------------------------------------------------------------
def _introduction(planned: StudyPlan) -> str:
    config, data = planned.config, planned.data.description
    task = task_for(config)
    if task.generated:
        trained = f"{config.steps * config.batch_size:,} examples ({data['source']})"
        measured = f"{data['test_examples_of_each_length']} of each length"
    else:
        trained = f"{config.training_tokens:,} {task.unit} of {data['source']}"
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
def _open(planned: StudyPlan, note: Note) -> None:
    """Write study.json, or continue the study in it, with what is added to it."""
    run, config, here = planned.run, planned.config, provenance()
    migrate(run)
    saved, data = read_study(run), planned.data.description
    if (saved and saved["configuration"]) != (planned.saved and planned.saved["configuration"]):
        raise ValueError(f"{run} was changed by another process meanwhile; give the same command again")
    whole = {"schema": SCHEMA, "begun": _now(), **here, "continued": []} if saved is None else dict(saved)
    used = plugins.records(config.task, *config.encodings)
    plugins.require_same((saved or {}).get("plugins", []), used, str(run))
    whole |= {"plugins": used, "configuration": asdict(config), "data": data, "recipe": recipe(config)}
    if saved is not None:
        before = StudyConfig.of(saved["configuration"])
        alike = measured_by(before, data) == measured_by(config, data)
        require_same_text(run, saved["data"], data, alike)
        if not alike:
            whole.pop("ngrams", None)  # of the text that was measured before
        if planned.grows or any(trial.status.status not in ("done", "diverged") for trial in planned.trials):
            require_same_recipe(run, saved["recipe"], recipe(config))
        else:
            whole |= {name: saved[name] for name in ("data", "recipe")}
        last = saved["continued"][-1] if saved["continued"] else saved
        if changes := [name for name in here if here[name] != last[name]]:
            note(f"{run} was begun with another {' and '.join(changes)}; study.json keeps both")
            whole["continued"] = [*saved["continued"], {"at": _now(), **here}]
    whole = json.loads(json.dumps(whole))
    for trial in planned.every_trial:
        current = require_own(trial, config, whole) and trial.measured
        if trial.status.status == "done" and not current:
            demote(trial, "it is measured again, at the lengths of the study")
    if whole != saved:
        write_json(run / STUDY, whole)


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
