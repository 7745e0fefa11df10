"""Heads: their number and width, and the split of a projection into heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from jaxtyping import Float
from torch import Tensor, nn

from longitude.attention.operation import attend, require_backend
from longitude.attention.request import require_options
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
    xsa: bool


class AttendOptions(HeadOptions, ScoreOptions, total=False):
    """The same, and those of layers that call `attend`."""


class HeadedOptions(TypedDict, total=False):
    """Keywords of Headed that layers over it have."""

    head_dim: int | None
    dropout: float
    scale: float | None
    backend: str


class Headed(nn.Module):
    """Projections of queries, keys, values and outputs, and what `attend` needs beside them.

    Args:
        dim: Width of x and of the output.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values; None: num_heads.
        kv_dim: Width of what keys and values are made of; None: dim.
        head_dim: Width of a head; None: dim / num_heads.
        bias: Whether the projections have biases.
        dropout: Dropout probability of the weights, in training.
        scale: Factor of the scores; None: head_dim^-1/2.
        backend: As in `attend`.

    Raises:
        ValueError: For sizes that do not fit, and options that `attend` does not support.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        kv_dim: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        num_kv_heads, head_dim = head_sizes(type(self).__name__, dim, num_heads, num_kv_heads, head_dim)
        kv_dim = dim if kv_dim is None else kv_dim
        check_sizes(type(self).__name__, kv_dim=kv_dim)
        require_backend(backend)
        require_options(scale, dropout)
        self.dim, self.num_heads, self.num_kv_heads, self.head_dim = dim, num_heads, num_kv_heads, head_dim
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(kv_dim, num_kv_heads * head_dim, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * head_dim, dim, bias=bias)

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def dropping(self) -> float:
        """Dropout probability of the weights in this mode."""
        return self.dropout if self.training else 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return attend(q, k, v, scale=self.scale, dropout=self.dropping, backend=self.backend, **options)

    def queries(self, x: Tensor) -> Float[Tensor, "B H L head_dim"]:
        return split_heads(self.q_proj(x), self.num_heads)

    def keys_and_values(self, x: Tensor) -> tuple[Float[Tensor, "B Hkv L head_dim"], Float[Tensor, "B Hkv L head_dim"]]:
        return split_heads(self.k_proj(x), self.num_kv_heads), split_heads(self.v_proj(x), self.num_kv_heads)


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
