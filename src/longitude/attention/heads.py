"""Heads: their number and width, and the split of a projection into heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor

from longitude.errors import UsageError, check_sizes


class LayerOptions(TypedDict, total=False):
    """Keywords of every layer with keys and values. Defaults are AttentionLayer's; MultiHeadAttention describes all of these."""

    dropout: float
    scale: float | None
    output_gate: bool
    short_conv: str | Sequence[str]
    conv_kernel: int | None


class ScoreOptions(LayerOptions, total=False):
    """The same, and those of layers that call `attend`."""

    backend: str
    softcap: float | None


class HeadOptions(LayerOptions, total=False):
    """Keywords of MultiHeadAttention that every layer over it has."""

    head_dim: int | None
    bias: bool
    qk_norm: bool
    qk_norm_eps: float


class AttendOptions(HeadOptions, ScoreOptions, total=False):
    """The same, and those of layers that call `attend`."""


def head_sizes(
    who: str, dim: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
) -> tuple[int, int]:
    """num_kv_heads and head_dim, by default num_heads and dim / num_heads; ValueError if they do not fit."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_sizes(who, dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        raise UsageError(who, "num_kv_heads to divide num_heads", f"{num_kv_heads} and {num_heads}")
    if head_dim is None and dim % num_heads:
        raise UsageError(who, "num_heads to divide dim", f"{num_heads} and {dim}", "or pass head_dim=")
    head_dim = dim // num_heads if head_dim is None else head_dim
    check_sizes(who, head_dim=head_dim)
    return num_kv_heads, head_dim


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, L, heads * head_dim] -> [B, heads, L, head_dim]."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[B, heads, L, head_dim] -> [B, L, heads * head_dim]."""
    return x.transpose(1, 2).flatten(2)
