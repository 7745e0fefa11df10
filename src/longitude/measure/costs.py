"""Estimated costs of a measurement before weights are loaded: FLOPs and memory from config.json, time from a short run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from longitude.checkpoints import load as checkpoints
from longitude.checkpoints.costs import H100, WIDEST, Cost, flops_per_second, forward_flops
from longitude.checkpoints.declared import trained_length
from longitude.measure import retrieval
from longitude.measure.config import PERPLEXITY, SAME_TARGETS, MeasureConfig, require_consistent, with_trained
from longitude.measure.plan import memory_of, outline_of
from longitude.measure.windows import plan_windows


def costs(
    config: MeasureConfig, models: tuple[str, ...], on_progress: Callable[[str, float, float], None] = lambda *_: None
) -> list[Cost]:
    """The cost of every model at every length. Needs only config.json: no weights, tokenizer or text.

    Args:
        config: The measurement; perplexity counts the maximum number of documents, retrieval its prompts.
        models: Folders or names.
        on_progress: Called before each timing with a description, the number of finished models, and the number of models.

    Raises:
        ValueError: For options or a config.json for which `measure` also raises it, and for a class whose FLOPs cannot be
            counted.
    """
    require_consistent(config)
    found = []
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
            found.append(
                Cost(
                    model=model,
                    part="measuring",
                    length=length,
                    tokens=round(windows * length),
                    flops=work,
                    memory=needs,
                    seconds=None if rate is None else work / rate,
                    h100_seconds=work / H100,
                    reason=reason,
                )
            )
    return found


def _windows(config: MeasureConfig, length: int) -> float:
    """Number of windows of a length for perplexity, plus the number of prompts of all other tasks."""
    prompts = [len(config.depths) if retrieval.TASKS[task].depths else 1 for task in config.tasks if task != PERPLEXITY]
    windows = float(config.trials * sum(prompts))
    if PERPLEXITY in config.tasks:
        longest = config.lengths[-1]
        documents = config.documents if config.tokens is None else min(config.documents, config.tokens // longest)
        if "sliding" in config.methods:
            planned = plan_windows([longest] * documents, length, config.stride or max(1, length // 2))
            windows += sum(map(len, planned.values()))
        windows += config.text_figure and length == longest
        if {"non-overlapping", "per-position"} & {*config.methods}:
            windows += documents * longest / length
        windows += documents * (SAME_TARGETS in config.methods)
    return windows
