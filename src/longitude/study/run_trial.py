"""One trial of a study from its first weights to its rows: what an executor calls, in this process or in another."""

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import torch
import transformers

from longitude.attention.backends import routes
from longitude.measure import write_rows
from longitude.report.wording import and_
from longitude.runs.device import device_of
from longitude.runs.files import atomic, out_of_space, read_json, remove_unfinished, write_json
from longitude.runs.provenance import provenance
from longitude.study.budget import BACKWARD, flops_per_token, tokens_read
from longitude.study.config import StudyConfig
from longitude.study.data import StudyData
from longitude.study.record import TRIAL, measured_by, record_of
from longitude.study.results import NOTHING_MEASURED
from longitude.study.resume import drop_unfinished
from longitude.study.tasks.base import Measuring, OnProgress, Task, rows_by_distance, task_for
from longitude.study.tokens import reader
from longitude.study.train import (
    UNTRAINED,
    first_model,
    measurable,
    recipe,
    remove_checkpoints,
    save,
    selection_loss,
    train,
)
from longitude.study.trial import Status, Trial

KEPT = ("selection", "untrained", "parameters", "training_seconds")
"""Of status.json, as long as the model is there."""
NOT_FINITE = "the loss is not finite after the last step"
Note = Callable[[str], None]


def ignore(*arguments: Any) -> None:
    """A callback for callers that do not watch."""


def run_trial(
    config: StudyConfig,
    trial: Trial,
    data: StudyData,
    commit: str | None = None,
    train_only: bool = False,
    on_progress: Callable[[float, str], None] = ignore,
    note: Note = ignore,
) -> Status:
    """Train a trial and measure it, or continue it where it was killed.

    Args:
        config: Of the study.
        trial: Which one; everything is written into its folder.
        data: Of the study.
        commit: Of the code, for the rows.
        train_only: It is not measured: it has one of several learning rates.
        on_progress: Called with the share of the trial that is done, and words.
        note: Called with a sentence that stays.

    Returns:
        How it ended. An error is recorded in its folder, not raised; a full disk is raised.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        return TrialRun(config, trial, data, commit, train_only, on_progress, note).attempt()
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class TrialRun:
    """A trial that is trained and measured, or continued where it was killed.

    Attributes:
        train_only: It is not measured.
        on_progress: Called with the share of the trial that is done, and words.
    """

    config: StudyConfig
    trial: Trial
    data: StudyData
    commit: str | None = None
    train_only: bool = False
    on_progress: Callable[[float, str], None] = ignore
    note: Note = ignore

    @property
    def task(self) -> Task:
        return task_for(self.config)

    def attempt(self) -> Status:
        """Run it; an error is recorded, a full disk raised."""
        trace = self.trial.folder / "error.txt"
        trace.unlink(missing_ok=True)
        try:
            with routes.repeated(self.routes()):
                return self.run()
        except Exception as error:
            if out_of_space(error, self.trial.run):
                drop_unfinished(self.trial.folder / "trainer")
                raise
            with atomic(trace) as unfinished:
                unfinished.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
            return self.record("failed", 0, reason=reason)

    def routes(self) -> routes.Routes:
        """Which attention runs in our loop: as the trial was begun, on whatever machine that was."""
        own = read_json(self.trial.folder / TRIAL, self.trial.remedy)
        here = routes.routes()
        begun = here if own is None else own.get("routes", {})
        if begun and not routes.is_on():
            self.note(f"{self.trial.folder} was begun with our loop for attention, which is off here: rounding differs")
        return begun

    def record(self, status: Any, step: int, **more: Any) -> Status:
        """Write status.json."""
        trial = self.trial
        before = trial.status
        kept = {name: getattr(before, name) for name in KEPT} if trial.trained else {}
        now = Status(status, trial.label, trial.seed, trial.rate, trial.encoding, step, trial.steps, **kept | more)
        if not (trial.folder / TRIAL).exists():
            self.record_own()
        write_json(trial.folder / "status.json", asdict(now))
        return now

    def record_own(self, measured: dict[str, Any] | None = None) -> None:
        """Write trial.json, the first file of the folder: what decides the numbers of the trial, and where it runs."""
        folder = self.trial.folder
        folder.mkdir(parents=True, exist_ok=True)
        own = read_json(folder / TRIAL, self.trial.remedy)
        own = own or record_of(self.config, self.trial, self.data.description, recipe(self.config))
        write_json(folder / TRIAL, {"routes": routes.routes()} | own | {"measured": measured, **provenance()})

    def run(self) -> Status:
        """Train and measure; errors are the caller's to record."""
        config, trial = self.config, self.trial
        self.record_own()
        remove_unfinished(trial.folder)
        training = BACKWARD * replace(config, steps=trial.steps).training_tokens
        share = 1.0 if self.train_only else training / (training + self.task.measured_tokens(config))

        def trained(step: int, loss: float) -> None:
            words = f"training {step}/{trial.steps}  loss {loss:.3f} nats/{self.task.loss_unit}"
            self.on_progress(share * step / trial.steps, words)

        def measured(done: int, total: int) -> None:
            self.on_progress(share + (1 - share) * done / total, f"measuring {done / total:.0%}")

        if not trial.trained:
            self.record("running", 0)
            model = first_model(config, trial, self.data)
            start = time.perf_counter()
            first, diverged = train(model, config, trial, self.data, trained, self.note)
            if diverged is not None:
                remove_checkpoints(trial)
                return self.record("diverged", diverged, reason=f"the loss was not finite at step {diverged}")
            seconds = time.perf_counter() - start if first == 0 else None
            save(model, trial.folder, reader(config.tokenizer).tokenizer)
            self.record("running", trial.steps, training_seconds=seconds)
        try:
            model = self.task.model.from_pretrained(trial.folder)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{trial.folder} holds no whole model ({reason}); {trial.remedy}") from error
        torch.nn.Module.to(model, device_of(config.device))
        status = trial.status
        if status.selection is None:
            status = self.select(model)
        if self.train_only or status.selection is None:
            return status
        start = time.perf_counter()
        finite, left_out = self.measure(model, measured)
        self.record_own(measured_by(config, self.data.description))
        seconds = time.perf_counter() - start
        if not finite:
            return self.record("diverged", trial.steps, reason=NOT_FINITE, measuring_seconds=seconds)
        return self.record("done", trial.steps, reason=left_out, measuring_seconds=seconds)

    def select(self, model: Any) -> Status:
        """The loss on the selection text, by which learning rates are chosen."""
        loss = selection_loss(model, self.task.selection(self.config, self.data))
        more: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
        more |= read_json(self.trial.folder / UNTRAINED, self.trial.remedy) or {}
        remove_checkpoints(self.trial)
        if not math.isfinite(loss):
            return self.record("diverged", self.trial.steps, reason=NOT_FINITE, **more)
        return self.record("trained", self.trial.steps, selection=loss, **more)

    def cost(self) -> dict[str, Any]:
        """Columns of what the training of the model was and took."""
        config, trial = self.config, self.trial
        read = tokens_read(config, self.data, trial.steps)
        return {
            "learning_rate": trial.rate,
            "train_steps": trial.steps,
            "train_tokens": read,
            "train_bytes": None if self.task.generated else round(read * self.data.bytes_per_token),
            "train_seconds": trial.status.training_seconds,
            "parameters": trial.status.parameters,
            "flops_per_token": flops_per_token(config, trial.label),
        }

    def measure(self, model: Any, on_progress: OnProgress) -> tuple[bool, str | None]:
        """Write results.parquet and documents.parquet. Returns whether all is finite, and what could not be measured."""
        config, trial = self.config, self.trial
        limit, lengths = measurable(model, config)
        missing = [length for length in config.test_lengths if length not in lengths]
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
            **self.cost(),
        }
        of = Measuring(model, config, self.data, lengths, labels, on_progress)
        rows, tables = self.task.measure(of)
        left_out = [f"{trial.label} {words}" for words in [self.task.left_out(of)] if words]
        if missing:
            others = and_(list(dict.fromkeys(row.method or "" for row in rows if row.length in missing)))
            at = ", ".join(map(str, missing)) + (f" but by {others}" if others else "")
            left_out.append(f"{trial.label} has no positions from {limit} on, so it was not measured at {at}")
        rows += [row for table in tables for row in rows_by_distance(table, self.task.metric, labels)]
        documents = pd.concat(tables, ignore_index=True) if tables else NOTHING_MEASURED
        with atomic(trial.folder / "documents.parquet") as unfinished:
            documents.to_parquet(unfinished, index=False)
        write_rows(rows, trial.folder / "results.parquet")
        return all(row.value is not None for row in rows), "; ".join(left_out) or None
