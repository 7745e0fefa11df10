"""What a measurement needs of memory, before it begins, and what there is."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from longitude.hf.stock import KEY, class_of

GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes, about. cache: keys and values of the longest window; layer: what a layer makes of a piece; logits: of a few
    positions; base: Python and its libraries.
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
        parts = ", ".join(f"{name} {getattr(self, name) / 1e9:.2f}" for name in ("weights", "cache", "layer", "logits"))
        return f"about {self.total / 1e9:.1f} GB ({parts})"


def outline(config: PreTrainedConfig) -> Any:
    """The model of a configuration without its numbers; with our positions, where longitude.hf set them."""
    ours = getattr(config, KEY, None) is not None
    make = class_of(config.name_or_path, config) if ours else AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config)


def squared(config: Any) -> bool:
    """Whether attention holds scores of every pair. Our own models attend with a backend of ours, whatever else is written."""
    if config.model_type == "longitude":
        return config.attention_backend == "reference"
    return getattr(config, "_attn_implementation", None) == "eager"


def needed(model: Any, dtype: torch.dtype, width: int, rows: int, piece: int, logits: int) -> Memory:
    """For `rows` windows of `width` tokens read `piece` tokens at once, with `logits` numbers of the head's output."""
    config, piece = model.config.get_text_config(), min(piece, width)
    heads, hidden = config.num_attention_heads, config.hidden_size
    head = getattr(config, "head_dim", None) or hidden // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = piece * (10 * hidden + 3 * inner) + 2 * width * head * (
        groups + heads
    )  # keys and values grown, and repeated
    if squared(config):
        layer += 3 * heads * piece * width
    elif piece < width:
        layer += 2 * piece * width  # the mask of a piece
    size = dtype.itemsize
    return Memory(
        weights=sum(parameter.numel() for parameter in model.parameters()) * size,
        cache=2 * config.num_hidden_layers * groups * head * width * rows * size if piece < width else 0,
        layer=layer * rows * size,
        logits=3 * 4 * min(logits, piece * rows * config.vocab_size),
    )


def available(device: str) -> int:
    """Bytes that are free for the asking: of the device, the machine, or the group that this process is confined to."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # not Linux, or no limit ("max")
        free.append(int((GROUP / "memory.max").read_text()) - int((GROUP / "memory.current").read_text()))
    return min(free)
