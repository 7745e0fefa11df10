"""Training one model of a study with Hugging Face's Trainer, from the newest complete checkpoint.

Losses go to losses.jsonl, one line per step; the Trainer's own checkpoints are in trainer/. The Trainer saves a checkpoint file
by file: it is complete if it has `COMPLETE`, which is written last. Incomplete ones, left by a killed process, are removed when
the run continues, so that a training killed at any moment and run again ends with the files of one never killed.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from longitude.attention.mixer import Mixer
from longitude.hf import Trainer
from longitude.labels import parse_label
from longitude.measure.windows import evaluating
from longitude.models import LongitudeConfig, LongitudeForCausalLM
from longitude.models.causal import IGNORED
from longitude.positions.base import Encoding
from longitude.runs.costs import TRAINING, products_per_token
from longitude.runs.files import flush
from longitude.study.config import StudyConfig
from longitude.study.data import Examples, StudyData
from longitude.study.resume import LOSSES, LossLog, newest, seal, step_of
from longitude.study.tasks.base import task_of
from longitude.study.trial import Trial
from longitude.training import RULE

SAVES = 4
"""Checkpoints during training, evenly over its steps."""
SECONDS = 120
"""Maximum seconds between two checkpoints; a kill loses at most this and a step."""
TOKENS = 16384
"""Tokens of a forward pass on the selection text."""
ARGUMENTS: dict[str, Any] = {
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "cosine",
}
"""Options of TrainingArguments for every model of every study."""
MODEL = (
    "norm", "norm_position", "rms_norm_eps", "hidden_act", "intermediate_size", "mlp_bias", "attention_bias",
    "attention_dropout", "hidden_dropout", "initializer_range", "embedding_scale", "attention_scale", "tie_word_embeddings",
    "vocab_size",
)  # fmt: skip
"""Keys of LongitudeConfig that are equal in every model of a study."""


# ---- training --------------------------------------------------------------------------------------------------------
def recipe(config: StudyConfig) -> dict[str, Any]:
    """Settings for building and training every model of a study, besides the options of the study."""
    model = model_config(config, "nope")
    initial = "normal with standard deviation 1/sqrt(width of a layer's input)"
    built = {name: getattr(model, name) for name in MODEL}
    built["initializer_range"] = built["initializer_range"] or initial
    return {**ARGUMENTS, "parameter_groups": RULE, **built}


def model_config(config: StudyConfig, label: str) -> LongitudeConfig:
    """Configuration of the models of a label. ValueError if the options do not fit the shape."""
    task = task_of(config.task)
    return LongitudeConfig(
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=task.trained_positions(config),
        vocab_size=task.vocabulary(config),
        **parse_label(label).options(config.layers),
    )


def build_model(config: StudyConfig, label: str, seed: int) -> Any:
    """The model of a trial, with the weights that its seed draws. ValueError when the options do not fit the shape."""
    shape = model_config(config, label)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LongitudeForCausalLM(shape)


def on_meta(config: StudyConfig, label: str) -> Any:
    """The model of a label on the meta device, without weights."""
    with torch.device("meta"):
        return build_model(config, label, 0)


def flops_per_token(config: StudyConfig, model: Any) -> float:
    """FLOPs of matrix products per training token, forward and backward: three times those of the forward pass."""
    keys = task_of(config.task).positions(config.train_length) / 2  # per query, on average
    return TRAINING * 2 * products_per_token(model, keys)


def tokens_read(config: StudyConfig, data: StudyData) -> int:
    """Tokens that a model reads in its training."""
    return task_of(config.task).examples(config, data, config.seeds[0]).read(config.steps * config.batch_size)


def measurable(model: Any, config: StudyConfig) -> tuple[float, list[int]]:
    """How many positions a model has, and the lengths of a study that it can be measured at."""
    task, tables = task_of(config.task), [m for m in model.modules() if isinstance(m, Encoding) and m.max_length]
    bounds = [(task.places if m.reads_ids else task.positions, m.max_length or math.inf) for m in tables]
    lengths = [length for length in config.test_lengths if all(needed(length) <= bound for needed, bound in bounds)]
    return min((bound for _, bound in bounds), default=math.inf), lengths


def first_model(config: StudyConfig, trial: Trial, data: StudyData) -> Any:
    """The model of a trial before its training: with the weights that its seed draws, or those of --start."""
    model = build_model(config, trial.label, trial.seed)
    if data.start:
        take_weights(model, data.start[trial.seed])
    return model


def take_weights(model: Any, weights: bytes) -> None:
    """Copy the weights of a file into a model. ValueError names the first parameter that does not fit."""
    saved, built = load(weights), dict(model.named_parameters())
    for name in {**built, **saved}:
        ours, theirs = (
            str([*parameters[name].shape]) if name in parameters else "none" for parameters in (built, saved)
        )
        if ours != theirs:
            raise ValueError(f"expected {name} {ours}, got {theirs}")
    with torch.no_grad():
        for name, parameter in built.items():
            parameter.copy_(saved[name])


class Trained(NamedTuple):
    """Result of a training.

    Attributes:
        first: The step it started from; 0: the initial weights.
        diverged: The step with a loss that was not finite, or None.
        untrained: Parts that training never used, as text to follow a label; None if there are none.
    """

    first: int
    diverged: int | None
    untrained: str | None


def train(
    model: Any,
    config: StudyConfig,
    trial: Trial,
    data: StudyData,
    folder: Path,
    on_step: Callable[[int, float], None],
    note: Callable[[str], None],
) -> Trained:
    """Train in place; losses and checkpoints are in the folder, from which a killed training continues."""
    log, task, checkpoints = LossLog(folder / LOSSES), task_of(config.task), folder / "trainer"
    checkpoint, messages = newest(checkpoints, log.steps())
    first = step_of(checkpoint)
    for message in [*messages, *([f"continues from step {first}"] if first else [])]:
        note(f"{trial.title}: {message}")
    log.cut(first)
    on_cpu = config.device == "cpu"
    examples = task.examples(config, data, trial.seed)
    tokens = lambda step: examples.targets(step * config.batch_size)  # noqa: E731
    steps = Steps(model, checkpoints, log, tokens, on_step)
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        bf16=config.precision == "bfloat16",
        learning_rate=trial.rate,
        warmup_steps=round(config.warmup * config.steps),
        weight_decay=config.weight_decay,
        **ARGUMENTS,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        seed=trial.seed,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        save_strategy="steps",
        save_steps=max(1, math.ceil(config.steps / SAVES)),
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process, one device: never split over several GPUs
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[steps])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    steps.remove()
    return Trained(first, steps.diverged, untrained(model, trainer.optimizer, task.positions(config.train_length)))


def selection_loss(model: Any, examples: Examples) -> float:
    """Mean loss over the examples in nats per target; they have one shape."""
    items = [examples[i] for i in range(len(examples))]
    rows = max(1, TOKENS // items[0]["input_ids"].numel())
    total = targets = 0.0
    with evaluating(model):
        for some in (items[i : i + rows] for i in range(0, len(items), rows)):
            batch = {name: torch.stack([item[name] for item in some]).to(model.device) for name in some[0]}
            scored = int((batch["shift_labels"] != IGNORED).sum())
            total, targets = total + model(**batch).loss.double().item() * scored, targets + scored
    return total / targets


def untrained(model: Any, optimizer: Any, longest: int) -> str | None:
    """Parts of a model that training never used, as text to follow a label; None if there are none.

    These are the far parts of mixers if `longest` positions fit the near part, and parameters with zero gradients at every
    step, for which Adam's second moment is still zero.
    """
    reasons = []
    windows = [m.far_from for m in model.modules() if isinstance(m, Mixer) and m.far_from is not None]
    if windows and longest <= max(windows):
        far = f"its far part, which begins beyond {max(windows)} positions"
        reasons.append(f"never used {far}, in training at {longest}")
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
        on_step: Callable[[int, float], None],
    ):
        """tokens: step -> targets up to it. on_step(step, loss)."""
        self.folder, self.log, self.tokens, self.on_step = folder, log, tokens, on_step
        self.diverged: int | None = None
        self.saved = time.monotonic()
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
        self.on_step(step, loss)
        if time.monotonic() - self.saved > SECONDS:
            control.should_save = True

    def on_save(self, args, state, control, **kwargs) -> None:
        flush(self.log.path)
        self.saved = time.monotonic()
        seal(self.folder / f"checkpoint-{state.global_step}")


def save(model: Any, folder: Path, tokenizer: Any = None) -> None:
    """Save the model and its tokenizer into the folder of a unit, which is renamed into place when it is complete."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
