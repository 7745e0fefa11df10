"""A study: many trials in one run directory, with one writer. What it was killed in, it continues."""

import json
import math
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

from longitude.measure import read_rows, to_frame, write_rows
from longitude.positions.base import Encoding
from longitude.runs.device import device_of
from longitude.runs.files import FRESH, atomic, locked, out_of_space, read_json, remove_unfinished, write_json
from longitude.runs.provenance import provenance
from longitude.study.config import StudyConfig, listed, option
from longitude.study.data import StudyData
from longitude.study.plan import StudyPlan
from longitude.study.results import NOTHING_MEASURED
from longitude.study.resume import drop_unfinished
from longitude.study.tasks.base import Measuring, OnProgress, Task, task_of
from longitude.study.train import UNTRAINED, build_model, remove_checkpoints, save, train
from longitude.study.trial import Status, Trial

SCHEMA = 1
GROWING = ("encodings", "seeds")
"""Options of which a run directory may be given more: their trials are added."""
BACKWARD = 3
"""Work of a training token, in tokens of measuring."""
Watch = Callable[[str, float, float], None]
"""Called with what is being done, how much of the work is done, and all of it."""
Note = Callable[[str], None]


def ignore(*arguments: Any) -> None:
    """A callback for callers that do not watch."""


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


def study(planned: StudyPlan, fresh: bool = False, on_progress: Watch = ignore, note: Note = ignore) -> Outcome:
    """Run the trials that are not finished yet, one after the other, and gather all rows.

    A trial that raises is recorded as failed with its reason, and tried again by the next call; a diverged one is a result.

    Args:
        planned: Of `plan`.
        fresh: Remove the study that the directory holds.
        on_progress: Called with what is being done, the trials done, in fractions, and their number.
        note: Called with a sentence about the study, and about every trial when it ends.

    Returns:
        Every trial with its status.

    Raises:
        ValueError: Another process writes here, the directory holds another study, or the disk is full; nothing is then
            half-written.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run = planned.run
    with _full_disk_is_a_user_error(run):
        run.mkdir(parents=True, exist_ok=True)
        with locked(run):
            remove_unfinished(run)
            if fresh:
                _remove_study(run)
            planned = _opened(planned, note)
            note(_introduction(planned))
            commit = provenance()["commit"]
            outcome = []
            for i, trial in enumerate(trials := planned.trials):

                def report(share: float, words: str, i: int = i, trial: Trial = trial) -> None:
                    on_progress(f"{trial.label} seed {trial.seed}  {words}", i + share, len(trials))

                status = trial.status
                if status.status not in ("done", "diverged"):
                    status = TrialRun(planned.config, trial, planned.data, commit, report, note).attempt()
                outcome.append((trial, status))
                _gather(planned)
                report(1, status.status)
                note(_sentence(trial, status))
            return Outcome(run, planned.config, outcome)


def _gather(planned: StudyPlan) -> None:
    """All trials' rows into one table."""
    paths = [trial.folder / "results.parquet" for trial in planned.trials]
    frames = [read_rows(path) for path in paths if path.exists()]
    write_rows(pd.concat(frames, ignore_index=True) if frames else to_frame([]), planned.run / "results.parquet")


# ---- one trial -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class TrialRun:
    """A trial that is trained and measured, or continued where it was killed.

    Attributes:
        on_progress: Called with the share of the trial that is done, and words.
    """

    config: StudyConfig
    trial: Trial
    data: StudyData
    commit: str | None = None
    on_progress: Callable[[float, str], None] = ignore
    note: Note = ignore

    @property
    def task(self) -> Task:
        return task_of(self.config.task)

    def attempt(self) -> Status:
        """Run it; an error is recorded, a full disk raised."""
        trace = self.trial.folder / "error.txt"
        trace.unlink(missing_ok=True)
        try:
            return self.run()
        except Exception as error:
            if out_of_space(error, self.trial.run):
                drop_unfinished(self.trial.folder / "trainer")
                raise
            with atomic(trace) as unfinished:
                unfinished.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
            return self.record("failed", 0, reason=reason)

    def record(self, status: Any, step: int, **more: Any) -> Status:
        """Write status.json."""
        trial = self.trial
        now = Status(status, trial.label, trial.seed, trial.encoding, step, self.config.steps, **more)
        write_json(trial.folder / "status.json", asdict(now))
        return now

    def run(self) -> Status:
        """Train and measure; errors are the caller's to record."""
        config, trial = self.config, self.trial
        trial.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(trial.folder)
        before = trial.status
        training_seconds = before.training_seconds if before.status == "running" else None
        training = BACKWARD * config.training_tokens
        training_share = training / (training + self.task.measured_tokens(config))

        def trained(step: int, loss: float) -> None:
            words = f"training {step}/{config.steps}  loss {loss:.3f} nats/{self.task.loss_unit}"
            self.on_progress(training_share * step / config.steps, words)

        def measured(done: int, total: int) -> None:
            self.on_progress(training_share + (1 - training_share) * done / total, f"measuring {done / total:.0%}")

        if not trial.trained:
            self.record("running", 0)
            model = build_model(config, trial.label, trial.seed)
            start = time.perf_counter()
            first, diverged = train(model, config, trial, self.data, trained, self.note)
            if diverged is not None:
                remove_checkpoints(trial)
                return self.record("diverged", diverged, reason=f"the loss was not finite at step {diverged}")
            training_seconds = time.perf_counter() - start if first == 0 else None
            save(model, trial.folder)
        more: dict[str, Any] = {"training_seconds": training_seconds}
        more |= read_json(trial.folder / UNTRAINED, FRESH) or {}
        self.record("running", config.steps, **more)
        model = self.task.model.from_pretrained(trial.folder)
        torch.nn.Module.to(model, device_of(config.device))
        start = time.perf_counter()
        finite, left_out = self.measure(model, measured)
        remove_checkpoints(trial)
        more["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        more["measuring_seconds"] = time.perf_counter() - start
        if not finite:
            reason = "the loss is not finite after the last step"
            return self.record("diverged", config.steps, reason=reason, **more)
        return self.record("done", config.steps, reason=left_out, **more)

    def measure(self, model: Any, on_progress: OnProgress) -> tuple[bool, str | None]:
        """Write results.parquet and documents.parquet. Returns whether all is finite, and what could not be measured."""
        config, trial = self.config, self.trial
        limit = min(
            (m.max_length for m in model.modules() if isinstance(m, Encoding) and m.max_length), default=math.inf
        )
        lengths = [length for length in config.test_lengths if self.task.positions(length) <= limit]
        left_out = None
        if missing := [str(length) for length in config.test_lengths if length not in lengths]:
            left_out = f"{trial.label} has no positions from {limit} on, so it was not measured at {', '.join(missing)}"
        labels = {
            "task": config.task,
            "model": f"cells/{trial.name}",
            "encoding": trial.encoding,
            "label": trial.label,
            "seed": trial.seed,
            "train_length": config.train_length,
            "backend": model.config.attention_backend,
            "commit": self.commit,
            "train_positions": None if config.positions == "contiguous" else config.train_positions,
        }
        rows, tables = self.task.measure(Measuring(model, config, self.data, lengths, labels, on_progress))
        documents = pd.concat(tables, ignore_index=True) if tables else NOTHING_MEASURED
        with atomic(trial.folder / "documents.parquet") as unfinished:
            documents.to_parquet(unfinished, index=False)
        write_rows(rows, trial.folder / "results.parquet")
        return all(row.value is not None for row in rows), left_out


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
        return f"{name}: failed, {status.reason}; see {trial.folder / 'error.txt'}"
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
