"""Detection of a loaded model's encoding, rotary, learned table or ALiBi, and of its number of positions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedConfig

from longitude.hf.stock import heads_of
from longitude.positions.bias import alibi_slopes

TABLE = re.compile(r"(^|\.)(wpe|pos(ition)?s?_?emb\w*|embed_positions)$")
"""Names of learned tables of positions in models."""
TOWER = re.compile(r"(^|\.)(visual|vision\w*|audio\w*)\.")
"""Modules of images and sound, whose positions are not those of tokens."""

Kind = Literal["rotary", "learned", "alibi"]


def is_rotary(module: nn.Module) -> bool:
    """Whether a module makes rotary tables: by its name, or, if it has no weights, by its frequencies or a base class."""
    names = [kind.__name__.lower() for kind in type(module).__mro__]
    without_weights = next(module.parameters(), None) is None and (
        has_frequencies(module) or "rotary" in " ".join(names)
    )
    return without_weights or "rotary" in names[0]


def has_frequencies(module: nn.Module) -> bool:
    return any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False))


def text_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every module of the text model."""
    return ((name, module) for name, module in model.named_modules() if not TOWER.search(f"{name}."))


def rotary_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, module) of every module that has frequencies and the config that they come from."""
    for _, parent in text_modules(model):
        for name, module in parent.named_children():
            if has_frequencies(module) and getattr(getattr(module, "config", None), "rope_parameters", None):
                yield parent, name, module


def rotary_of(model: nn.Module) -> nn.Module | None:
    """The first of `rotary_modules`; None unless the model rotates queries and keys by parameters of its config."""
    return next((module for _, _, module in rotary_modules(model)), None)


def table_of(model: nn.Module) -> tuple[str, nn.Embedding] | None:
    """(name, module) of its learned table of positions, if it has one."""
    for name, module in text_modules(model):
        if isinstance(module, nn.Embedding) and "Sinusoidal" not in type(module).__name__ and TABLE.search(name):
            return name, module
    return None


def last_position(model: Any) -> int | None:
    """Number of positions in a model's table of absolute positions, in tokens; None if it has no such table."""
    for name, module in text_modules(model):
        if isinstance(module, nn.Embedding) and TABLE.search(name):
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa's begin after that of padding
            longest = getattr(model.config, "max_position_embeddings", None) or module.num_embeddings
            return min(module.num_embeddings, longest) - first
        end = getattr(module, "max_length", None)
        if "longitude.positions" in type(module).__module__ and isinstance(end, int):
            return end
    return None


def has_alibi(config: PreTrainedConfig) -> bool:
    """Whether attention is biased by ALiBi, for which each family has its own option."""
    inside = getattr(config, "attn_config", None)
    return config.model_type == "bloom" or bool(getattr(config, "alibi", None) or getattr(inside, "alibi", None))


def alibi_of(config: PreTrainedConfig) -> list[float]:
    """The slopes that a config declares; MPT's files may have another number for 8 in the published 2^(-8h/H)."""
    inside = getattr(config, "attn_config", None)
    return alibi_slopes(heads_of(config)["num_heads"], bias_max=getattr(inside, "alibi_bias_max", 8))


def kind_of(name: str, config: PreTrainedConfig, model: nn.Module) -> Kind:
    """Kind of positions of a Transformers model. ValueError for other models, with the kind of positions if it is known."""
    if has_alibi(config):
        return "alibi"
    if rotary_of(model) is not None:
        return "rotary"
    if table_of(model) is not None:
        return "learned"
    # keys of GPT-J and RoFormer
    if {*vars(config)} & {"rotary_dim", "rotary_value"} or any(is_rotary(part) for _, part in text_modules(model)):
        why = "it rotates its queries and keys, but by a formula that its configuration does not describe"
    else:
        why = "it has neither rotary parameters nor a learned table of positions, nor ALiBi"
    raise ValueError(f"{name}: nothing in a {config.model_type} model can be extended; {why}")
