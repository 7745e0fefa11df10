"""A study: many trials in one run directory, with one writer. What it was killed in, it continues."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from longitude import plugins
from longitude.measure import from_frame, read_rows, write_rows
from longitude.runs.files import locked, out_of_space, read_json, remove_unfinished, write_json
from longitude.runs.provenance import provenance
from longitude.study import rates
from longitude.study.config import StudyConfig, listed
from longitude.study.executors import Executor, InProcess, wait_for_workers
from longitude.study.ngrams import record_ngrams
from longitude.study.plan import StudyPlan
from longitude.study.rates import choices, chosen, is_candidate, recorded, shown
from longitude.study.record import (
    SCHEMA,
    STUDY,
    demote,
    measured_by,
    read_study,
    require_own,
    require_same_recipe,
    require_same_text,
)
from longitude.study.run_trial import Note, TrialRun, ignore, run_trial
from longitude.study.tasks.base import task_for
from longitude.study.train import recipe
from longitude.study.trial import Status, Trial

ENDED = ("done", "diverged")
FEW = 3
"""Seeds below which intervals over them are wide, or none."""
Watch = Callable[[str, float, float], None]
"""Called with what is being done, how much of the work is done, and all of it."""


@dataclass(frozen=True)
class Outcome:
    """What a run directory holds now: of every label and seed the trial at its learning rate, with its status."""

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
            if planned.saved is not None and (new := sum(not trial.trained for trial in planned.trials)):
                note(f"{new} of them are to be trained: every encoding with every seed and learning rate of the study")
            if {*planned.named.learning_rates} < {*planned.config.learning_rates}:
                note(f"learning rates are chosen among all of the study: {listed(planned.config.learning_rates)}")
            if len(planned.config.seeds) < FEW:
                note(_few_seeds(planned.config.seeds))
            statuses = _run_trials(planned, executor, on_progress, note)
            found = recorded(read_json(run / STUDY))
            return Outcome(run, planned.config, [(trial, statuses[trial]) for trial in shown(statuses, found)])


def _run_trials(planned: StudyPlan, executor: Executor, on_progress: Watch, note: Note) -> dict[Trial, Status]:
    """Train every candidate where there are several learning rates, choose, and run what is chosen to its end.

    Rows are gathered whenever a trial ends.
    """
    trials = planned.trials
    statuses = {trial: trial.status for trial in trials}
    sweeps = len(planned.config.learning_rates) > 1
    running: dict[Trial, tuple[float, str]] = {}
    total = len(planned.config.encodings) * len(planned.config.seeds) + sweeps * len(trials)
    done = 0

    def report(trial: Trial, share: float, words: str) -> None:
        running[trial] = share, f"{trial.title}  {words}"
        shares, lines = zip(*running.values(), strict=True)
        on_progress("\n".join(lines), done + sum(shares), total)

    def complete(part: list[Trial], ended: Callable[[Status], bool], train_only: bool) -> None:
        nonlocal done
        waiting = [trial for trial in part if not ended(statuses[trial])]
        done += len(part) - len(waiting)
        if not waiting:
            return
        commit = provenance()["commit"]
        run = partial(run_trial, planned.config, data=planned.data, commit=commit, train_only=train_only)
        for trial, status in executor.map(run, waiting, report, note):
            if isinstance(status, str):
                status = TrialRun(planned.config, trial, planned.data).record("failed", 0, reason=status)
            statuses[trial] = status
            if not train_only:
                _gather(planned)
            report(trial, 1, status.status)
            del running[trial]
            done += 1
            note(_sentence(trial, status))

    if sweeps:
        complete(trials, is_candidate, train_only=True)
    study = _choose(planned)
    for words in (*rates.chosen_rates(recorded(study)), *rates.edges(recorded(study))):
        note(words)
    final = chosen(trials, recorded(study))
    for trial in final:
        if statuses[trial].status == "done" and not (require_own(trial, planned.config, study) and trial.measured):
            statuses[trial] = demote(trial, "it is measured again, at the lengths of the study")
        if statuses[trial].status in ENDED:
            note(_sentence(trial, statuses[trial]))
    _gather(planned)
    complete(final, lambda status: status.status in ENDED, train_only=False)
    return statuses


def _choose(planned: StudyPlan) -> dict[str, Any]:
    """study.json, with a learning rate for each label whose models are all trained."""
    path = planned.run / STUDY
    study = read_json(path)
    if (now := _chosen_now(planned)) != study["choices"]:
        study["choices"] = now
        write_json(path, study)
    return study


def _chosen_now(planned: StudyPlan) -> dict[str, Any]:
    found = choices({trial: trial.status for trial in planned.every_trial})
    return {label: choice.as_json for label, choice in found.items()}


def _gather(planned: StudyPlan) -> None:
    """The rows of all chosen trials into one table."""
    trials = chosen(planned.every_trial, recorded(read_json(planned.run / STUDY)))
    tables = [read_rows(trial.folder / "results.parquet") for trial in trials if trial.measured]
    write_rows([row for table in tables for row in from_frame(table)], planned.run / "results.parquet")


# ---- in words --------------------------------------------------------------------------------------------------------
def _introduction(planned: StudyPlan) -> str:
    config, data = planned.config, planned.data.description
    task = task_for(config)
    steps = [trial.steps for trial in planned.trials]
    amount = config.batch_size * (1 if task.generated else config.train_length)
    trained = " to ".join(f"{each * amount:,}" for each in sorted({min(steps), max(steps)}))
    if task.generated:
        trained += f" examples ({data['source']})"
        measured = f"{data['test_examples_of_each_length']} of each length"
    else:
        trained += f" {task.unit} of {data['source']}"
        measured = f"{data['validation_documents']} documents"
    trained += f" from {config.start}" if config.start else ""
    several = len(config.learning_rates)
    measured = f"measured on {measured}" + (f" at the best of {several} learning rates" if several > 1 else "")
    return f"{len(planned.trials)} models, each trained on {trained} and {measured}; {planned.run}"


def _few_seeds(seeds: Sequence[int]) -> str:
    more = [str(seed) for seed in range(FEW) if seed not in seeds][: FEW - len(seeds)]
    return f"fewer than {FEW} seeds give wide intervals over seeds, or none; --seeds {' '.join(more)} adds to them"


def _sentence(trial: Trial, status: Status) -> str:
    if status.status == "trained":
        return f"{trial.title}: trained, {status.selection:.3f} on the selection text"
    if status.status == "done":
        return "; ".join(filter(None, (f"{trial.title}: done", status.untrained, status.reason)))
    if status.status == "failed":
        trace = trial.folder / "error.txt"
        return f"{trial.title}: failed, {status.reason}" + (f"; see {trace}" if trace.exists() else "")
    return f"{trial.title}: {status.status}, {status.reason}"


# ---- study.json ------------------------------------------------------------------------------------------------------
def _open(planned: StudyPlan, note: Note) -> None:
    """Write study.json, or continue the study in it, with what is added to it."""
    run, config, here = planned.run, planned.config, provenance()
    saved, data = read_study(run), planned.data.description
    if (saved and saved["configuration"]) != (planned.saved and planned.saved["configuration"]):
        raise ValueError(f"{run} was changed by another process meanwhile; give the same command again")
    whole = {"schema": SCHEMA, "begun": _now(), **here, "continued": []} if saved is None else dict(saved)
    used = plugins.records(config.task, *config.encodings)
    plugins.require_same((saved or {}).get("plugins", []), used, str(run))
    whole |= {"plugins": used, "configuration": asdict(config), "data": data, "recipe": recipe(config)}
    whole |= {"train_steps": planned.steps, "choices": _chosen_now(planned)}
    if saved is not None:
        before = StudyConfig.of(saved["configuration"])
        alike = measured_by(before, data) == measured_by(config, data)
        adds = planned.grows or not planned.finished
        require_same_text(run, saved["data"], data, alike)
        if not alike:
            whole.pop("ngrams", None)  # of the text that was measured before
        if adds:
            require_same_recipe(run, saved["recipe"], recipe(config))
            if saved["data"]["sha256"] != data["sha256"]:
                note(
                    f"{run} is measured again on other documents, so values at lengths that were measured before change"
                )
        else:
            whole |= {name: saved[name] for name in ("data", "recipe", "train_steps")}
        last = saved["continued"][-1] if saved["continued"] else saved
        if changes := [name for name in here if here[name] != last[name]]:
            note(f"{run} was begun with another {' and '.join(changes)}; study.json keeps both")
            whole["continued"] = [*saved["continued"], {"at": _now(), **here}]
    whole = json.loads(json.dumps(whole))
    for trial in planned.every_trial:
        require_own(trial, config, whole)
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
