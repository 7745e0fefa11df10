"""What an extension will take before anything is loaded: time, memory and FLOPs of what is measured, searched and trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longitude.checkpoints.calibration import H100, TRAINING, flops_per_second, forward_flops
from longitude.checkpoints.source import Source, open_source
from longitude.extend.fine_tune import Positions, window_of
from longitude.extend.plan import Target, original_length
from longitude.extend.short_contexts import BATCH, memory_within, sample_within
from longitude.runs.memory import training_memory

RECOMPUTED = 4 / 3
"""Of a training step's work with gradient checkpointing, which runs each layer forward twice."""


@dataclass(frozen=True)
class ExtendCost:
    """Of one part of an extension, about.

    Attributes:
        part: "measuring", "searching" or "training".
        tokens: That are read.
        flops: Of matrix products, every layer attending to all earlier tokens.
        memory: Bytes at its height.
        seconds: On this machine as busy as it is now.
        h100_seconds: On one H100 in bfloat16 at 40% of its rate.
    """

    part: str
    tokens: int
    flops: float
    memory: int
    seconds: float
    h100_seconds: float


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Of `fine_tune`: its options that cost."""

    steps: int
    batch: int
    length: int | None
    positions: Positions
    gradient_checkpointing: bool


def costs(
    model: str,
    target: Target | None,
    tuning: Tuning | None,
    budget: float,
    minutes: float | None,
    on_progress: Callable[[str], object] = lambda what: None,
) -> list[ExtendCost]:
    """The parts of an extension, a few layers of the model timed for each. Needs config.json alone.

    Low-rank training (LoRA) counts as training of all weights: its steps take up to a third less.

    Args:
        model: Folder or name of the checkpoint.
        target: What it is extended to; None: it is trained as it is.
        tuning: How it is trained; None: it is not.
        budget: Minutes of a search.
        minutes: About how long the cost on short contexts is measured; None: it is not.
        on_progress: Called before each timing with what is timed.

    Raises:
        ValueError: For what `extend` would refuse of lengths, and for a class whose FLOPs cannot be counted, or of which
            nothing can be timed.
    """
    source = open_source(model, allow_pickle=True)
    original = source.declared or 1
    if target is not None:
        original = original_length(source, target)
    found = []
    if minutes is not None and source.causal:
        on_progress(f"timing a few layers of {model} for the measured cost")
        sample = sample_within(source, original, minutes)
        found.append(_reading("measuring", source, sample.length, 2 * sample.tokens, sample.seconds))
    if target is not None and target.searched and target.to > original:
        on_progress(f"timing windows of {target.to} tokens for the search")
        window = _reading("searching", source, target.to, target.to).seconds
        windows = max(1, round(60 * budget / window))
        found.append(_reading("searching", source, target.to, windows * target.to, windows * window))
    if tuning is not None:
        length = _window(source, target, original, tuning)
        on_progress(f"timing a training step of {tuning.batch} windows of {length} tokens")
        found.append(_training(source, length, tuning))
    return found


def _window(source: Source, target: Target | None, original: int, tuning: Tuning) -> int:
    """Tokens of a window of the training, of the checkpoint that is not there yet."""
    if target is None:
        return window_of(source.config, tuning.length, tuning.positions)[0]
    short = tuning.positions != "contiguous" or target.method == "drope"
    return tuning.length or (original if short else target.to)


def _reading(part: str, source: Source, length: int, tokens: int, seconds: float | None = None) -> ExtendCost:
    """seconds: of all of it, where this machine was timed already."""
    windows, rows = max(1, round(tokens / length)), max(1, BATCH // length)
    flops = windows * forward_flops(source.skeleton).of(length)
    if seconds is None:
        seconds = flops / flops_per_second(source.skeleton, length, rows, source.dtype)
    return ExtendCost(part, windows * length, flops, memory_within(source, length).total, seconds, flops / H100)


def _training(source: Source, length: int, tuning: Tuning) -> ExtendCost:
    windows = tuning.steps * tuning.batch
    times = TRAINING * (RECOMPUTED if tuning.gradient_checkpointing else 1)
    flops = windows * times * forward_flops(source.skeleton).of(length)
    rate = flops_per_second(source.skeleton, length, tuning.batch, torch.float32, training=True)
    given: Any = (tuning.batch, length, tuning.gradient_checkpointing)
    memory = 2**29 + training_memory(source.skeleton, source.config, *given)
    return ExtendCost("training", windows * length, flops, memory, flops / rate, flops / H100)
