"""Run one trial of a study, from initial weights to rows; an executor calls this, in this process or in another."""

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

from longitude.measure.rows import write_rows
from longitude.models import LongitudeForCausalLM
from longitude.report.wording import and_
from longitude.runs.costs import TRAINING
from longitude.runs.files import atomic, out_of_space, write_json
from longitude.runs.machine import device_of, threads
from longitude.runs.store import Store, Unit
from longitude.study.config import StudyConfig
from longitude.study.data import StudyData
from longitude.study.results import DOCUMENTS, FAILURE, NOTHING_MEASURED, ROWS, STATUS, WINDOW, read_status
from longitude.study.resume import drop_unfinished, remove_checkpoints
from longitude.study.tasks.base import Measuring, OnProgress, Task, task_for
from longitude.study.tokens import reader
from longitude.study.train import (
    first_model,
    flops_per_token,
    measurable,
    save,
    selection_loss,
    tokens_read,
    train,
)
from longitude.study.trial import Status, Trial
from longitude.study.units import TrialUnits

NOT_FINITE = "the loss is not finite after the last step"
Note = Callable[[str], None]
OnShare = Callable[[float, str], None]
"""Called with the share of the trial that is done, and words."""


def ignore(*arguments: Any) -> None:
    """A callback that does nothing."""


@dataclass(frozen=True, eq=False)
class TrialRunner:
    """Runs the trials of a study; it can be sent to another process.

    Args:
        config: The study's configuration.
        data: The study's data.
        store: Store of the units.
        commit: Commit of the code, for the rows.
        train_only: Trials are trained but not measured, to choose among several learning rates.
    """

    config: StudyConfig
    data: StudyData
    store: Store
    commit: str | None = None
    train_only: bool = False

    @property
    def task(self) -> Task:
        return task_for(self.config)

    def run(self, units: TrialUnits, on_progress: OnShare = ignore, note: Note = ignore) -> Status:
        """Train a trial and measure it, unless that is done already; a killed trial continues from its last checkpoint.

        Returns:
            How it ended. An error is recorded in the unfinished folder of its unit.

        Raises:
            BusyError: Another process works on it.
            OSError: The disk is full.
        """
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        trial = units.trial
        training = TRAINING * self.config.training_tokens
        share = 1.0 if self.train_only else training / (training + self.task.measured_tokens(self.config))

        def trained(step: int, loss: float) -> None:
            steps = self.config.steps
            on_progress(share * step / steps, f"{step}/{steps} {loss / math.log(2):.2f}")

        def measured(done: int, total: int) -> None:
            on_progress(share + (1 - share) * done / total, f"measuring {done / total:.0%}")

        try:
            with threads(self.config.threads):
                make = partial(self.train, trial, on_step=trained, note=note)
                status, model = self.made(units.training, trial, note, make)
                if status.status == "diverged" or self.train_only:
                    return status
                make = partial(self.measure, status, trial, model, on_progress=measured)
                return self.made(units.measuring, trial, note, make)[0]
        except FailedError as failed:
            return trial.status("failed", 0, reason=str(failed))

    def made(self, unit: Unit, trial: Trial, note: Note, make: Callable[[Path], Status]) -> tuple[Status, Path]:
        """Find or make a unit; its status and folder. If `make` raises, that is recorded in the unfinished folder: FailedError.

        make: computes an unfinished unit in a folder.
        """
        if (finished := self.store.find(unit.kind, unit.key)) is not None:
            return read_status(finished), finished
        with self.store.making(unit) as folder:
            (folder / FAILURE).unlink(missing_ok=True)
            try:
                status = make(folder)
                write_json(folder / STATUS, asdict(status))
            except Exception as error:
                if out_of_space(error, self.store.run):
                    drop_unfinished(folder / "trainer")
                    raise
                reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
                trace = "".join(traceback.format_exception(error))
                write_json(folder / FAILURE, {**asdict(trial.status("failed", 0, reason=reason)), "trace": trace})
                raise FailedError(reason) from error
        return status, self.store.folder(unit)

    def train(self, trial: Trial, folder: Path, on_step: Callable[[int, float], None], note: Note) -> Status:
        """Train into a folder, and measure the loss that learning rates are chosen by."""
        model = first_model(self.config, trial, self.data)
        start = time.perf_counter()
        trained = train(model, self.config, trial, self.data, folder, on_step, note)
        if trained.diverged is not None:
            remove_checkpoints(folder / "trainer")
            reason = f"the loss was not finite at step {trained.diverged}"
            return trial.status("diverged", trained.diverged, reason=reason)
        seconds = time.perf_counter() - start if trained.first == 0 else None
        loss = selection_loss(model, self.task.selection(self.config, self.data))
        more = {"parameters": sum(each.numel() for each in model.parameters()), "untrained": trained.untrained}
        save(model, folder, reader(self.config.tokenizer).tokenizer)
        remove_checkpoints(folder / "trainer")
        if not math.isfinite(loss):
            return trial.status("diverged", self.config.steps, reason=NOT_FINITE, training_seconds=seconds, **more)
        return trial.status("trained", self.config.steps, selection=loss, training_seconds=seconds, **more)

    def measure(
        self, status: Status, trial: Trial, model_folder: Path, folder: Path, on_progress: OnProgress
    ) -> Status:
        """Write rows and documents of a trained model into a folder."""
        try:
            model = LongitudeForCausalLM.from_pretrained(model_folder)
        except Exception as error:
            reason = " ".join(str(error).split())
            remedy = f"move {model_folder} away, and the same `longitude study` trains it again"
            raise ValueError(f"{model_folder} has no whole model ({reason}); {remedy}") from error
        torch.nn.Module.to(model, device_of(self.config.device))
        start = time.perf_counter()
        finite, left_out = self.write(status, trial, model, f"units/{model_folder.name}", folder, on_progress)
        seconds = time.perf_counter() - start
        if not finite:
            return replace(status, status="diverged", reason=NOT_FINITE, measuring_seconds=seconds)
        return replace(status, status="done", reason=left_out, measuring_seconds=seconds)

    def write(
        self, status: Status, trial: Trial, model: Any, name: str, folder: Path, on_progress: OnProgress
    ) -> tuple[bool, str | None]:
        """Write results.parquet and documents.parquet. Returns whether all is finite, and what could not be measured."""
        config = self.config
        limit, lengths = measurable(model, config)
        missing = [length for length in config.test_lengths if length not in lengths]
        labels = {
            "task": config.task,
            "model": name,
            "encoding": trial.encoding,
            "label": trial.label,
            "seed": trial.seed,
            "train_length": config.train_length,
            "backend": model.config.attention_backend,
            "commit": self.commit,
            "train_positions": None if config.positions == "contiguous" else config.train_positions,
            **self.training(trial, status, model),
        }
        of = Measuring(model, config, self.data, lengths, labels, on_progress)
        rows, tables = self.task.measure(of)
        left_out = [f"{trial.label} {words}" for words in [self.task.left_out(of)] if words]
        if missing:
            others = and_(list(dict.fromkeys(row.method or "" for row in rows if row.length in missing)))
            at = ", ".join(map(str, missing)) + (f" but by {others}" if others else "")
            left_out.append(f"{trial.label} has no positions from {limit} on, so it was not measured at {at}")
        documents = pd.concat(tables, ignore_index=True) if tables else NOTHING_MEASURED
        with atomic(folder / DOCUMENTS) as unfinished:
            documents.to_parquet(unfinished, index=False)
        if (window := self.task.window(of)) is not None:
            with atomic(folder / WINDOW) as unfinished:
                window.to_parquet(unfinished, index=False)
        write_rows(rows, folder / ROWS)
        return all(row.value is not None for row in rows), "; ".join(left_out) or None

    def training(self, trial: Trial, status: Status, model: Any) -> dict[str, Any]:
        """Columns about the training of the model: settings, amount and time."""
        read = tokens_read(self.config, self.data)
        return {
            "learning_rate": trial.rate,
            "train_steps": self.config.steps,
            "train_tokens": read,
            "train_bytes": None if self.task.generated else round(read * self.data.bytes_per_token),
            "train_seconds": status.training_seconds,
            "parameters": status.parameters,
            "flops_per_token": flops_per_token(self.config, model),
        }


class FailedError(Exception):
    """A unit failed with this reason, which is recorded in its folder."""
