"""Estimated time, memory and FLOPs of measuring, searching and training in an extension, before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from longitude.checkpoints.costs import H100, TRAINING, Cost, flops_per_second, forward_flops
from longitude.checkpoints.source import Source, open_source
from longitude.extend.fine_tune import Positions, window_of
from longitude.extend.plan import Target, original_length
from longitude.extend.short_contexts import BATCH, memory_within, sample_within
from longitude.runs.memory import Memory, training_memory

RECOMPUTED = 4 / 3
"""Work of a training step with gradient checkpointing relative to one without: each layer runs forward twice."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Options of `fine_tune` that determine its cost."""

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
) -> list[Cost]:
    """Estimate the costs of the parts of an extension by timing a few layers of the model. Needs only config.json.

    Low-rank training (LoRA) counts as training of all weights: its steps take up to a third less.

    Args:
        model: Folder or name of the checkpoint.
        target: The extension; None: the model is only trained.
        tuning: Options of the training; None: no training.
        budget: Minutes of a search.
        minutes: Approximate time for measuring the cost on short contexts; None: it is not measured.
        on_progress: Called before each timing with a description.

    Raises:
        ValueError: For lengths that `extend` does not support, and for a class that cannot be timed or has unknown FLOPs.
    """
    source = open_source(model, allow_pickle=True)
    original = source.declared or 1
    if target is not None:
        original = original_length(source, target)
    found = []
    if minutes is not None and source.causal:
        on_progress(f"timing a few layers of {model} for the measured cost")
        sample = sample_within(source, original, minutes)
        found.append(reading("measuring", source, sample.length, 2 * sample.tokens, sample.seconds))
    if target is not None and target.searched and target.to > original:
        on_progress(f"timing windows of {target.to} tokens for the search")
        window = _seconds(source, target.to)
        windows = max(1, round(60 * budget / window))
        found.append(reading("searching", source, target.to, windows * target.to, windows * window))
    if tuning is not None:
        length = _window(source, target, original, tuning)
        on_progress(f"timing a training step of {tuning.batch} windows of {length} tokens")
        found.append(_training(source, length, tuning))
    return found


def _window(source: Source, target: Target | None, original: int, tuning: Tuning) -> int:
    """Tokens of a window of the training, for the checkpoint that is not written yet."""
    if target is None:
        return window_of(source.config, tuning.length, tuning.positions)[0]
    short = tuning.positions != "contiguous" or target.method == "drope"
    return tuning.length or (original if short else target.to)


def _seconds(source: Source, length: int) -> float:
    """Seconds to evaluate a window."""
    rate = flops_per_second(source.skeleton, length, max(1, BATCH // length), source.dtype)
    return forward_flops(source.skeleton).of(length) / rate


def reading(part: str, source: Source, length: int, tokens: int, seconds: float | None) -> Cost:
    """The cost of evaluating this number of tokens in windows of `length`; seconds: of all of it, if known."""
    windows = max(1, round(tokens / length))
    flops = windows * forward_flops(source.skeleton).of(length)
    return _cost(part, source, length, windows, flops, memory_within(source, length), seconds)


def _training(source: Source, length: int, tuning: Tuning) -> Cost:
    windows = tuning.steps * tuning.batch
    times = TRAINING * (RECOMPUTED if tuning.gradient_checkpointing else 1)
    flops = windows * times * forward_flops(source.skeleton).of(length)
    rate = flops_per_second(source.skeleton, length, tuning.batch, torch.float32, training=True)
    memory = training_memory(source.skeleton, source.config, tuning.batch, length, tuning.gradient_checkpointing)
    return _cost("training", source, length, windows, flops, memory, flops / rate)


def _cost(
    part: str, source: Source, length: int, windows: int, flops: float, memory: Memory, seconds: float | None
) -> Cost:
    return Cost(
        model=source.name,
        part=part,
        length=length,
        tokens=windows * length,
        flops=flops,
        memory=memory,
        seconds=seconds,
        h100_seconds=flops / H100,
    )
