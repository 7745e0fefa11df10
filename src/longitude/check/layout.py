"""The tensors of a checkpoint that make queries and keys, and the conversion of each to another rotary layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longitude.positions.rotation import convert_layout

Change = Callable[[Tensor], Tensor]

SEPARATE = ("q_proj", "k_proj")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
FUSED_BY_HEAD, FUSED_BY_KIND = "query_key_value", "qkv_proj"


def layout_changes(names: Iterable[str], config: Any, head_dim: int, rotary_dim: int, to: str) -> dict[str, Change]:
    """Conversions by tensor name; empty if the weights of queries and keys are unknown.

    names: names of all tensors. rotary_dim: number of leading dimensions of each head that rotate.
    """
    change = partial(convert_layout, head_dim=head_dim, to=to, rotary_dim=rotary_dim)
    parts = {name: name.split(".") for name in names}
    if any("kv_a_proj" in name for name in parts):  # latent attention
        return {}

    def all_of(kinds: tuple[str, ...], change: Change) -> dict[str, Change]:
        return {name: change for name, path in parts.items() if path[-2:-1] and path[-2] in kinds}

    if changes := all_of(SEPARATE, change):
        return changes | {name: change for name, path in parts.items() if set(path) & {*NORMS}}
    if config.model_type.startswith("gpt_neox"):
        return all_of((FUSED_BY_HEAD,), partial(_by_head, head_dim=head_dim, change=change))
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    rows = head_dim * (config.num_attention_heads + key_heads)
    return all_of((FUSED_BY_KIND,), partial(_by_kind, rows=rows, change=change))


def _by_head(weight: Tensor, head_dim: int, change: Change) -> Tensor:
    """[heads * 3 * head_dim, ...]: queries, keys and values of one head, then of the next."""
    heads = weight.unflatten(0, (-1, 3, head_dim))
    rotated = change(heads[:, :2].flatten(0, 2)).unflatten(0, (-1, 2, head_dim))
    return torch.cat([rotated, heads[:, 2:]], 1).flatten(0, 2)


def _by_kind(weight: Tensor, rows: int, change: Change) -> Tensor:
    """[all queries, all keys, all values]; rows: number of rows of queries and keys."""
    return torch.cat([change(weight[:rows]), weight[rows:]])
