"""`fine_tune`: a checkpoint trained on through Hugging Face's Trainer, full or LoRA."""

from __future__ import annotations

import importlib.util
import inspect
import math
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from longitude.checkpoints.declared import of_full_attention
from longitude.checkpoints.load import Source, differences, load, open_source, require_fit, require_shards, ropes_of
from longitude.errors import check_sizes
from longitude.extend.short_contexts import MINUTES, CostMeasurement, ShortContextLoss
from longitude.extend.units import TRAINING, digest_of_tokens, digest_of_weights, work_of, working
from longitude.hf import Trainer
from longitude.measure.sources import read_text
from longitude.positions.hugging_face import ORIGINAL
from longitude.positions.samplers import Contiguous, Sampler, sampler
from longitude.positions.scaling.linear import is_unrotated
from longitude.runs.costs import training_memory
from longitude.runs.files import make_folder, new_folder, require_plain, require_space
from longitude.runs.machine import require_memory, total_memory
from longitude.runs.quiet import quiet
from longitude.runs.store import key_of

Positions = Literal["contiguous", "randomized", "skipped"]
RANK = 16
"""Rank of the matrices that LoRA adds to every linear layer."""
WARMUP = 0.05
"""Share of the steps in which the learning rate rises; afterwards it stays."""
SAVES, FEWEST = 10, 20
"""The Trainer saves so many times, and not more often than after so many steps."""


@dataclass(frozen=True)
class Training:
    """Result of `fine_tune`.

    Attributes:
        losses: Loss of each step, in nats per token.
        tokens: Number of training tokens.
        parameters: Number of trained parameters.
        seconds: Time from the first step to the last in this process.
        tokens_per_second: Training throughput.
        costs: Bits per byte before and after, if `cost_text` was passed.
    """

    losses: list[float]
    tokens: int
    parameters: int
    seconds: float
    tokens_per_second: float
    costs: list[ShortContextLoss] = field(default_factory=list)


def fine_tune(
    directory: Path,
    text: Path | str,
    *,
    steps: int,
    out: Path,
    length: int | None = None,
    learning_rate: float = 2e-5,
    batch: int = 1,
    lora: bool = False,
    positions: Positions = "contiguous",
    seed: int = 0,
    gradient_checkpointing: bool = False,
    cost_text: str | None = None,
    minutes: float = MINUTES,
    on_progress: Callable[[str, float, float], None] = lambda what, done, total: None,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> Training:
    """Continue the training of a checkpoint, extended or not, and write it atomically to the new folder `out`.

    `out` gets config.json, tokenizer and generation config unchanged, and new weights as safetensors in the dtype of the old
    ones. LoRA is merged, so that unmodified Transformers loads it.

    Memory is estimated first, because a Transformers model computes the logits of its whole batch for the loss. The Trainer
    saves the training next to `out` after each tenth of the steps, so that the same call continues after a kill. What it saved
    is removed once `out` is written.

    Args:
        directory: The checkpoint; it is only read.
        text: A file, a folder, "stdlib" or "datasets:NAME". Its documents are joined, with the end-of-text token between them.
        steps: Number of training steps.
        out: Folder of the new checkpoint.
        length: Tokens of a window. By default the length that the configuration declares; the original length if positions are
            not contiguous or "drope" removed the rotation.
        learning_rate: Learning rate after a warmup of 5% of the steps.
        batch: Windows per step.
        lora: Train low-rank matrices only (peft), merged at the end.
        positions: "contiguous", "randomized" or "skipped" (lg.samplers). The last two draw positions from the whole declared
            length for windows of any length.
        seed: Random seed for the order of windows and for positions.
        gradient_checkpointing: Recompute activations in backward: less memory, a third more time.
        cost_text: Text for comparing both checkpoints; None: no comparison.
        minutes: Approximate time of the comparison.
        on_progress: Called as on_progress(description with the perplexity, steps done, total steps).
        on_note: Called with a sentence on the cost of the comparison, and on tensors that are not trained.

    Returns:
        The losses, and how much was trained.

    Raises:
        ValueError: For text shorter than a window, a model without position_ids if positions are not contiguous, LoRA without
            peft, too little memory, or a loss that is not finite (nothing is written then).
    """
    if out.exists():
        raise ValueError(f"{out} exists already, and nothing is written over; name another")
    check_sizes("fine-tuning", steps=steps, batch=batch)
    if lora and importlib.util.find_spec("peft") is None:
        raise ValueError("--lora needs the package peft; install it with pip install 'longitude[peft]'")
    with working(out) as store:
        source = open_source(str(directory))
        if source.quantization is not None:
            raise ValueError(
                f"{directory}: its weights are quantized ({source.quantization}); train the original checkpoint"
            )
        cost = None
        if cost_text is not None:
            cost = CostMeasurement(source, cost_text, store, on_progress, minutes, on_note)
            cost.measure_original(source.declared or 1)
        checkpoint = load(source.folder, dtype=None if lora else torch.float32, images=True)
        model, config = checkpoint.model, checkpoint.config.get_text_config(decoder=True)
        if positions != "contiguous" and "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(f"--positions {positions}: a {config.model_type} model takes no positions; leave it out")
        for tensors in differences(model, checkpoint.unused)[1]:
            on_note(f"{tensors}: the trained checkpoint does not have them.")
        # a model without rotation ("drope") is recalibrated at the original length
        short = source.kind == "rotary" and is_unrotated(of_full_attention(ropes_of(source)).scaling)
        length, rule = window_of(config, length, positions, short)
        model.config.use_cache = False
        weights = digest_of_weights(model)
        if lora:
            model = _with_lora(model, seed)
        stream = _stream(checkpoint.tokenizer, text, length)
        question = {"steps": steps, "length": length, "learning_rate": learning_rate, "batch": batch, "lora": lora}
        question |= {"positions": positions, "seed": seed, "weights": weights}
        question |= {"declared": source.declared, "text": digest_of_tokens(stream)}
        state = work_of(out) / f"{TRAINING}-{key_of(question)}"
        with new_folder(out) as unfinished:
            arguments = _arguments(state, steps, batch, learning_rate, seed, gradient_checkpointing)
            _require_memory(model, config, batch, length, gradient_checkpointing)
            newest = _newest(state, model)
            windows = Windows(stream, length, steps * batch, seed, rule)
            trainer = Trainer(model=model, args=arguments, train_dataset=windows, callbacks=[Steps(on_progress)])
            trainer.remove_callback(PrinterCallback)
            begun = time.perf_counter()
            with quiet():  # no bars while shards are written, and no logs: Steps reports
                trainer.train(resume_from_checkpoint=newest and str(newest))
            seconds = time.perf_counter() - begun
            share = 1 - (_step_of(newest) if newest else 0) / steps
            losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
            trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            _save(model, source, unfinished, lora)
        costs = [] if cost is None else [cost.compare(out)]
        tokens = len(windows) * length
        return Training(losses, tokens, trained, seconds, share * tokens / seconds, costs)


def _arguments(
    folder: Path, steps: int, batch: int, learning_rate: float, seed: int, gradient_checkpointing: bool
) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=int(WARMUP * steps),
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=on_gpu and torch.cuda.is_bf16_supported(),
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        train_sampling_strategy="sequential",  # the windows are in their order already
        remove_unused_columns=False,
        seed=seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=max(FEWEST, math.ceil(steps / SAVES)),
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        activation_checkpointing=gradient_checkpointing,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # else the Trainer splits each batch over all GPUs
    return arguments


# ---- what it is trained on -------------------------------------------------------------------------------------------
class Windows(Dataset):
    """`count` windows of a stream of tokens [n], each of `length`, in the order of training.

    Every window comes once, then again in another order. Window i and its positions are decided by the seed and i alone.
    """

    def __init__(self, stream: Tensor, length: int, count: int, seed: int, positions: Sampler):
        self.rows = stream[: len(stream) // length * length].view(-1, length)
        generator = torch.Generator().manual_seed(seed)
        passes = math.ceil(count / len(self.rows))
        self.order = torch.cat([torch.randperm(len(self.rows), generator=generator) for _ in range(passes)])[:count]
        self.seed, self.positions = seed, positions

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """input_ids, labels [length]; if positions are not contiguous, position_ids and a mask of ones [length] too."""
        tokens = self.rows[self.order[i]]
        labels = tokens.clone()
        labels[0] = -100  # nothing predicts it: the mean is over predicted tokens only
        item = {"input_ids": tokens, "labels": labels}
        if not isinstance(self.positions, Contiguous):
            seed = np.random.SeedSequence(self.seed, spawn_key=(i,)).generate_state(1)[0]
            generator = torch.Generator().manual_seed(int(seed))
            # without a mask, transformers takes a gap between positions for the border between two documents
            item["attention_mask"] = torch.ones_like(tokens)
            item["position_ids"] = self.positions(1, len(tokens), generator)[0]
        return item


def _stream(tokenizer: Any, text: Path | str, length: int) -> Tensor:
    """The tokens [n] of all documents."""
    documents = [content.decode("utf-8") for _, content in read_text(str(text), "--fine-tune").documents]
    ids = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream = torch.tensor([token for document in ids for token in (*document, *end)])
    if len(stream) < length:
        raise ValueError(f"--fine-tune {text}: expected at least one window of {length} tokens, got {len(stream)}")
    return stream


def window_of(config: Any, length: int | None, positions: str, short: bool = False) -> tuple[int, Sampler]:
    """Tokens of a window, and the rule of its positions; short: by default of the original length."""
    declared = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, ORIGINAL, None) or parameters.get(ORIGINAL)
    rule = sampler(positions, **({} if positions == "contiguous" else {"max_length": declared}))
    length = length or (declared if positions == "contiguous" and not short else original)
    if length is None or not 2 <= length <= (declared or length):
        wanted = f"windows of 2 to {declared or 'any number of'} tokens"
        raise ValueError(f"fine-tuning: expected {wanted}, got {length or 'no length'}; pass the tokens of a window")
    return length, rule


# ---- the model -------------------------------------------------------------------------------------------------------
def _with_lora(model: Any, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft uses the old name
        return get_peft_model(model, adapters)


def _save(model: Any, source: Source, out: Path, lora: bool) -> None:
    """Write new weights, and copy every other file of the checkpoint. ValueError if these weights do not fit its model."""
    if lora:
        model = model.merge_and_unload()
    with quiet():
        model.to(source.dtype).save_pretrained(out)
    for path in out.iterdir():
        if ".safetensors" not in path.name:
            path.unlink()
    for path in source.folder.iterdir():
        if path.is_file() and ".safetensors" not in path.name and path.name != "serve.md":
            shutil.copyfile(path, out / path.name)
    require_shards(out)
    require_fit(str(source.folder), out, source.skeleton)


class Steps(TrainerCallback):
    """Reports the loss of every step; ValueError if it is not finite."""

    def __init__(self, on_progress: Callable[[str, float, float], None]):
        self.on_progress = on_progress

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in (logs or {}):
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            diverged = f"the loss of step {state.global_step} is {loss}, and nothing is written"
            shutil.rmtree(args.output_dir, ignore_errors=True)  # the same command would meet it again
            raise ValueError(f"fine-tuning diverged: {diverged}; try a learning rate below {args.learning_rate:g}")
        self.on_progress(f"training, perplexity {math.exp(min(loss, 700)):.4g}", state.global_step, state.max_steps)


def _step_of(saved: Path) -> int:
    return int(saved.name.rpartition("-")[2])


def _newest(folder: Path, model: Any) -> Path | None:
    """The newest state that the Trainer saved whole."""
    make_folder(folder)
    require_plain(folder)
    moments = sum(p.numel() * 12 for p in model.parameters() if p.requires_grad)
    require_space(folder, 2 * moments, "what a training saves, while the older one is there")
    whole = (path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}"))  # written last
    return max(whole, key=_step_of, default=None)


# ---- memory ---------------------------------------------------------------------------------------------------
def _require_memory(model: Any, config: Any, batch: int, length: int, gradient_checkpointing: bool) -> None:
    needed = training_memory(model, config, batch, length, gradient_checkpointing).total
    there = total_memory("cuda" if torch.cuda.is_available() else "cpu")
    smaller = "take shorter windows with --positions skipped, a smaller batch, or --lora"
    require_memory(needed, there, f"fine-tuning {batch} windows of {length} tokens takes", smaller)
