"""What a measurement will take before anything is loaded: FLOPs and memory from config.json, time from a short run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from longitude.checkpoints import load as checkpoints
from longitude.checkpoints.calibration import H100, WIDEST, flops_per_second, forward_flops
from longitude.checkpoints.config import trained_length
from longitude.measure import retrieval
from longitude.measure.config import PERPLEXITY, MeasureConfig, require_consistent, with_trained
from longitude.measure.plan import memory_of, outline_of
from longitude.measure.windows import plan_windows
from longitude.runs.device import device_of
from longitude.runs.memory import Memory, available_memory


@dataclass(frozen=True)
class MeasureCost:
    """Of one checkpoint at one length, about.

    Attributes:
        model: Its folder or name.
        length: Of the windows and prompts, in tokens.
        tokens: That are read: of all tasks, at most.
        flops: Of matrix products, every layer attending to all earlier tokens.
        memory: Bytes at the longest length.
        free: Bytes that there are here.
        seconds: On this machine as busy as it is now; None where the model's class could not be timed.
        h100_seconds: On one H100 in bfloat16 at 40% of its rate.
        reason: Why there is no time.
    """

    model: str
    length: int
    tokens: int
    flops: float
    memory: Memory
    free: int
    seconds: float | None
    h100_seconds: float
    reason: str = ""


def costs(
    config: MeasureConfig, models: tuple[str, ...], on_progress: Callable[[str, float, float], None] = lambda *_: None
) -> list[MeasureCost]:
    """The cost of every model at every length. Needs config.json alone: no weights, tokenizer or text.

    Args:
        config: What would be measured; perplexity counts as many documents as it may take, retrieval its prompts.
        models: Folders or names.
        on_progress: Called before each timing with what is timed, and how many of all models are done.

    Raises:
        ValueError: For options or a config.json that `measure` would refuse, too, and for a class whose FLOPs cannot be
            counted.
    """
    require_consistent(config)
    found, free = [], available_memory(device_of(config.device).type)
    outlines = {model: outline_of(model, checkpoints.config_of(model)) for model in models}
    trained = [trained_length(outline.config) for outline in outlines.values() if config.trained]
    lengths = with_trained(config.lengths, trained)
    for i, (model, outline) in enumerate(outlines.items()):
        flops, needs, reason = forward_flops(outline), memory_of(config, outline), ""
        dtype = getattr(torch, config.dtype) if config.dtype else outline.config.dtype or torch.float32
        rate, shape = None, (min(lengths[-1], WIDEST), max(1, config.batch // lengths[-1]))
        on_progress(f"timing a few layers of {model}, {shape[1]} windows of {shape[0]} tokens", i, len(models))
        try:  # once for all lengths, so that noise makes no shorter one slower
            rate = flops_per_second(outline, *shape, dtype)
        except ValueError as error:
            reason = str(error)
        for length in lengths:
            windows = _windows(config, length)
            work = windows * flops.of(length)
            here = None if rate is None else work / rate
            tokens = round(windows * length)
            found.append(MeasureCost(model, length, tokens, work, needs, free, here, work / H100, reason))
    return found


def _windows(config: MeasureConfig, length: int) -> float:
    """Windows of a length, of perplexity, and prompts of all tasks."""
    prompts = [len(config.depths) if retrieval.TASKS[task].depths else 1 for task in config.tasks if task != PERPLEXITY]
    windows = float(config.trials * sum(prompts))
    if PERPLEXITY in config.tasks:
        longest = config.lengths[-1]
        documents = config.documents if config.tokens is None else min(config.documents, config.tokens // longest)
        if "sliding" in config.methods:
            planned = plan_windows([longest] * documents, length, config.stride or max(1, length // 2))
            windows += sum(map(len, planned.values()))
        if {"non-overlapping", "per-position"} & {*config.methods}:
            windows += documents * longest / length
    return windows
