"""One cell of a study: one encoding and seed, trained through Hugging Face's Trainer and measured.

A cell's folder is a Hugging Face checkpoint (config.json, model.safetensors) with its losses, rows, sums per document
and status. Everything in it is written beside and renamed, but for losses.jsonl, which grows by one line per step, and
the Trainer's own checkpoints in trainer/, which `checkpoints` checks. A cell killed at any moment and run again ends
with the files of one never killed.
"""

import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from longitude.attention.mixer import Mixer
from longitude.hf import Trainer
from longitude.measure import write_rows
from longitude.models import LongitudeConfig
from longitude.positions.base import Encoding
from longitude.runs.files import FRESH, atomic, flush, read_json, remove_unfinished, write_json
from longitude.study.checkpoints import LossLog, newest, seal, step_of
from longitude.study.config import StudyConfig
from longitude.study.labels import parse_label, safe
from longitude.study.tasks import task_of
from longitude.study.work import StudyData, TaskRunner

UNTRAINED = "untrained.json"
SAVES = 4
"""Checkpoints during training."""


@dataclass(frozen=True)
class Status:
    """status.json. status: running | done | diverged | failed; reason: why not done, or what done leaves out; untrained: what
    training never used, in words.
    """

    status: str
    label: str
    seed: int
    encoding: str
    step: int
    steps: int
    reason: str | None = None
    untrained: str | None = None
    parameters: int | None = None
    training_seconds: float | None = None  # None when the training was interrupted
    measuring_seconds: float | None = None


@dataclass(frozen=True)
class Trial:
    """Where a label and a seed live in a run directory."""

    run: Path
    label: str
    seed: int

    @property
    def name(self) -> str:
        return f"{safe(self.label)}-{self.seed}"

    @property
    def folder(self) -> Path:
        return self.run / "cells" / self.name

    @property
    def encoding(self) -> str:
        """Registered names of its encodings, without options."""
        return parse_label(self.label).encoding

    @property
    def status(self) -> Status | None:
        saved = read_json(self.folder / "status.json", FRESH)
        return None if saved is None else Status(**saved)


class Watcher:
    """Hears how a cell goes on; this one ignores it."""

    def trained(self, cell: Trial, step: int, steps: int, loss: float) -> None: ...

    def measured(self, cell: Trial, done: int, total: int) -> None: ...

    def note(self, message: str) -> None: ...


def work_of(config: StudyConfig) -> TaskRunner:
    return task_of(config.task).work


def build_model(config: StudyConfig, label: str, seed: int) -> Any:
    """The model of a cell, with the weights that its seed draws. ValueError when the options do not fit the shape."""
    options, work = parse_label(label).options(config.layers), work_of(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return work.model(
            LongitudeConfig(
                hidden_size=config.hidden,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                max_position_embeddings=work.positions(config),
                **work.shape(config),
                **options,
            )
        )


def run_cell(config: StudyConfig, cell: Trial, data: StudyData, commit: str | None, watcher: Watcher) -> Status:
    """Train and measure a cell, or continue where it was killed. Its errors are the caller's to record."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(cell.folder)
    before = cell.status
    training_seconds = before.training_seconds if before and before.status == "running" else None

    def record(status: str, step: int, **more: Any) -> Status:
        now = Status(status, cell.label, cell.seed, cell.encoding, step, config.steps, **more)
        write_json(cell.folder / "status.json", asdict(now))
        return now

    if not _trained(cell):
        record("running", 0)
        model = build_model(config, cell.label, cell.seed)
        start = time.perf_counter()
        begun, diverged = train(model, config, cell, data, watcher)
        if diverged is not None:
            _forget_checkpoints(cell)
            return record("diverged", diverged, reason=f"the loss was not finite at step {diverged}")
        training_seconds = time.perf_counter() - start if begun == 0 else None
        save(model, cell.folder)
    more: dict[str, Any] = {"training_seconds": training_seconds, **(read_json(cell.folder / UNTRAINED, FRESH) or {})}
    record("running", config.steps, **more)
    model = work_of(config).model.from_pretrained(cell.folder)
    torch.nn.Module.to(model, device_of(config))
    start = time.perf_counter()
    finite, left_out = measure(model, config, cell, data, commit, watcher)
    _forget_checkpoints(cell)
    more |= {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "measuring_seconds": time.perf_counter() - start,
    }
    if not finite:
        return record("diverged", config.steps, reason="the loss is not finite after the last step", **more)
    return record("done", config.steps, reason=left_out, **more)


# ---- training ---------------------------------------------------------------------------------------------------------


def train(model: Any, config: StudyConfig, cell: Trial, data: StudyData, watcher: Watcher) -> tuple[int, int | None]:
    """Train in place, from the newest complete checkpoint.

    Returns the step it began from (0: the first weights), and the step whose loss was not finite, or None.
    """
    folder = cell.folder / "trainer"
    log = LossLog(cell.folder / "losses.jsonl")
    checkpoint, messages = newest(folder, len(log.read()))
    for message in messages:
        watcher.note(f"{cell.name}: {message}")
    if checkpoint is not None:
        watcher.note(f"{cell.name}: continues from step {step_of(checkpoint)}")
    log.cut(step_of(checkpoint))
    examples = work_of(config).examples(config, data, cell.seed)
    steps = Steps(
        model,
        folder,
        log,
        lambda step: examples.targets(step * config.batch_size),
        lambda step, loss: watcher.trained(cell, step, config.steps, loss),
    )
    on_cpu = device_of(config).type == "cpu"
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(config.warmup * config.steps),
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        seed=cell.seed,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        save_strategy="steps",
        save_steps=max(1, math.ceil(config.steps / SAVES)),
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one cell, one device: never split over several GPUs
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[steps])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    steps.remove()
    never = untrained(model, trainer.optimizer, config)
    (cell.folder / UNTRAINED).unlink(missing_ok=True)
    if never is not None:  # before the model is saved, which says that training is over
        write_json(cell.folder / UNTRAINED, {"untrained": never})
    return step_of(checkpoint), steps.diverged


def untrained(model: Any, optimizer: Any, config: StudyConfig) -> str | None:
    """What training never used, in words that follow a label; None where there is nothing: far parts of mixers, and parameters
    whose gradient was zero at every step, for which Adam's second moment is still zero.
    """
    reasons = []
    longest = work_of(config).task.positions(config.train_length)
    windows = [m.far_from for m in model.modules() if isinstance(m, Mixer) and m.far_from is not None]
    if windows and longest <= max(windows):
        reasons.append(
            f"never used its far part in training, whose {longest} positions fit its window of {max(windows)}"
        )
    moments = {name: optimizer.state.get(p, {}).get("exp_avg_sq") for name, p in model.named_parameters()}
    never = [name for name, moment in moments.items() if moment is None or not bool(moment.any())]
    if never:
        others = len(never) - 1
        more = f" and {others} other{'s' * (others > 1)}" if others else ""
        reasons.append(f"had no gradient in training for {never[0]}{more}")
    return " and ".join(reasons) or None


class Steps(TrainerCallback):
    """Logs every step's loss as the model computed it, seals checkpoints, and stops at a loss that is not finite."""

    def __init__(
        self,
        model: Any,
        folder: Path,
        log: LossLog,
        tokens: Callable[[int], int],
        heard: Callable[[int, float], None],
    ):
        """tokens: step -> targets up to it. heard(step, loss)."""
        self.folder, self.log, self.tokens, self.heard = folder, log, tokens, heard
        self.diverged: int | None = None
        self.loss = self.rate = math.nan
        self.remove = model.register_forward_hook(self.keep_loss).remove

    def keep_loss(self, module: Any, inputs: Any, output: Any) -> None:
        self.loss = output.loss.detach()

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.rate = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args, state, control, **kwargs) -> None:
        step, loss = state.global_step, float(self.loss)
        if not math.isfinite(loss):
            self.diverged = step
            control.should_training_stop, control.should_save = True, False
            return
        self.log.append({"step": step, "loss": loss, "learning_rate": self.rate, "tokens": self.tokens(step)})
        self.heard(step, loss)

    def on_save(self, args, state, control, **kwargs) -> None:
        self.log.flush()
        seal(self.folder / f"checkpoint-{state.global_step}")


def save(model: Any, folder: Path) -> None:
    """config.json and model.safetensors into the folder; config.json comes last, so it says that all are there."""
    beside = folder / f".model.{os.getpid()}.tmp"
    try:
        model.save_pretrained(beside)
        for path in sorted(beside.iterdir(), key=lambda path: path.name == "config.json"):
            flush(path)
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _trained(cell: Trial) -> bool:
    return (cell.folder / "config.json").exists()


def _forget_checkpoints(cell: Trial) -> None:
    """Of the Trainer's folder only its state is kept: nothing continues from here."""
    folder = cell.folder / "trainer"
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        os.replace(state, folder / state.name)
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)


# ---- measuring --------------------------------------------------------------------------------------------------------


def measure(
    model: Any, config: StudyConfig, cell: Trial, data: StudyData, commit: str | None, watcher: Watcher
) -> tuple[bool, str | None]:
    """Write results.parquet and documents.parquet. Returns whether all is finite, and what could not be measured."""
    work = work_of(config)
    limit = min((m.max_length for m in model.modules() if isinstance(m, Encoding) and m.max_length), default=None)
    lengths = [length for length in config.test_lengths if limit is None or work.task.positions(length) <= limit]
    left_out = None
    if missing := [str(length) for length in config.test_lengths if length not in lengths]:
        left_out = f"{cell.label} has no positions from {limit} on, so it was not measured at {', '.join(missing)}"
    labels = {
        "task": config.task,
        "model": f"cells/{cell.name}",
        "encoding": cell.encoding,
        "label": cell.label,
        "seed": cell.seed,
        "train_length": config.train_length,
        "backend": model.config.attention_backend,
        "commit": commit,
        "train_positions": None if config.positions == "contiguous" else config.train_positions,
    }
    rows, documents = work.measure(
        model, config, data, lengths, labels, lambda done, total: watcher.measured(cell, done, total)
    )
    with atomic(cell.folder / "documents.parquet") as beside:
        documents.to_parquet(beside, index=False)
    write_rows(rows, cell.folder / "results.parquet")
    return all(row.value is not None for row in rows), left_out


def device_of(config: StudyConfig) -> torch.device:
    """ValueError when this machine does not have the device."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    name = config.device
    if name == "auto":
        name = next(each for each in ("cuda", "mps", "cpu") if available[each])
    if not available[name]:
        raise ValueError(f"--device {name}: this machine has none that torch {torch.__version__} can use; try cpu")
    return torch.device(name)
