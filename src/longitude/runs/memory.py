"""Memory: how much is free, how much a model needs, and by how much a call raises the peak of this process."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from longitude.runs.device import GROUP

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


# ---- what there is ---------------------------------------------------------------------------------------------------
def available_memory(device: str = "cpu") -> int:
    """Bytes that can be allocated now: on the device, or on the machine within the limits of this process and its group."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0]
    free = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # not Linux, or no limit ("max")
        free.append(int((GROUP / "memory.max").read_text()) - int((GROUP / "memory.current").read_text()))
    with suppress(AttributeError):  # not Linux
        process = psutil.Process()
        if (limit := process.rlimit(psutil.RLIMIT_AS)[0]) != psutil.RLIM_INFINITY:  # ulimit -v
            free.append(limit - process.memory_info().vms)
    return max(0, min(free))


def total_memory(device: str = "cpu") -> int:
    """Bytes of the device or of the machine, for each of the processes that `accelerate launch` started on it."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[1]
    return psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def require_memory(needed: float, free: float, what: str, remedy: str) -> None:
    """ValueError if more bytes are needed than are free. what: such as "reading takes"; remedy: such as "take less"."""
    if needed > free:
        there = f"{free / 2**30:.1f} GiB are available"
        raise ValueError(f"{what} about {needed / 2**30:.1f} GiB of memory, {there}; {remedy}")


# ---- what a model needs ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Memory:
    """Estimated bytes of a forward pass or a training step.

    Attributes:
        weights: Bytes of the weights; in training with gradients and moments.
        cache: Keys and values of the longest window.
        layer: Intermediate results of one layer for a chunk of tokens; in training those kept for the backward pass.
        logits: Bytes of the logits that are computed at once.
        base: Python and its libraries.
    """

    weights: int
    cache: int
    layer: int
    logits: int
    base: int = 2**29

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.layer + self.logits + self.base

    def __str__(self) -> str:
        sizes = {
            "weights": self.weights,
            "cache": self.cache,
            "layer": self.layer,
            "logits": self.logits,
            "Python": self.base,
        }
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
        return f"about {self.total / 1e9:.1f} GB ({parts})"


def forward_memory(
    model: Any, head_dim: int, dtype: torch.dtype, width: int, rows: int, chunk: int, logits: int
) -> Memory:
    """Memory to read `rows` windows of `width` tokens, `chunk` tokens at once, with `logits` numbers of the head's output.

    The model may be on the meta device. head_dim: 0 if no layer keeps keys and values.
    """
    config, chunk = model.config.get_text_config(), min(chunk, width)
    heads, hidden = getattr(config, "num_attention_heads", 0), config.hidden_size
    groups = getattr(config, "num_key_value_heads", None) or heads
    inner = inner_size(config)
    keys_and_values = 2 * width * head_dim * (groups + heads)  # grown by a chunk, and repeated for all heads
    layer = chunk * (10 * hidden + 3 * inner) + keys_and_values
    if has_square_scores(config):
        layer += 3 * heads * chunk * width
    elif chunk < width:
        layer += 2 * chunk * width  # the mask of a chunk
    size = dtype.itemsize
    return Memory(
        weights=sum(parameter.numel() for parameter in model.parameters()) * size,
        cache=2 * config.num_hidden_layers * groups * head_dim * width * rows * size if chunk < width else 0,
        layer=layer * rows * size,
        logits=3 * 4 * min(logits, chunk * rows * config.vocab_size),
    )


def inner_size(config: Any) -> int:
    """Inner width of the MLPs; the largest if layers differ (Gemma 3n)."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(size) if isinstance(size, list | tuple) else size


def has_square_scores(config: Any) -> bool:
    """Whether attention stores a score for every pair of tokens. Our models attend with our backends."""
    if config.model_type == "longitude":
        return config.attention_backend == "reference"
    return getattr(config, "_attn_implementation", None) == "eager"


def training_memory(model: Any, config: Any, batch: int, length: int, gradient_checkpointing: bool) -> Memory:
    """Peak memory of a training step with Adam, for `batch` windows of `length` tokens.

    Weights, gradients and two moments; what layers keep for the backward pass; logits and their gradient in float32.
    """
    fixed = sum(p.numel() * (p.element_size() + (12 if p.requires_grad else 0)) for p in model.parameters())
    tokens, width = batch * length, config.hidden_size
    inner = inner_size(config)
    size = next(model.parameters()).element_size()
    layer = tokens * (10 * width + 4 * inner) * size
    saved = config.num_hidden_layers * (tokens * width * size if gradient_checkpointing else layer)
    kept = saved + (layer if gradient_checkpointing else 0)
    return Memory(weights=fixed, cache=0, layer=kept, logits=3 * tokens * config.vocab_size * 4)


# ---- what a call takes -----------------------------------------------------------------------------------------------
def can_measure_peak() -> bool:
    """Whether /proc has the peak of a process and can reset it, as on Linux."""
    return STATUS.exists() and RESET.exists()


def peak_memory() -> int:
    """The peak of this process's memory, in bytes."""
    found = re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def memory_growth(call: Callable[[], object]) -> int:
    """Bytes by which call() raises the peak of this process above its memory before."""
    RESET.write_text("5")  # the peak starts again from what is held now: imports peak higher
    before = peak_memory()
    call()
    return peak_memory() - before
