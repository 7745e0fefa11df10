"""Attention to the keys that a small indexer scores highest: DeepSeek's sparse attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longitude.attention.heads import split_heads
from longitude.attention.layers.base import Call, normed
from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.mixer import register_mixer
from longitude.attention.patterns import Pairs
from longitude.derivatives import with_zero_gradients
from longitude.errors import UsageError, check_sizes
from longitude.not_finite import filled
from longitude.positions.base import Columns, Encoding
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, by_axis, explicit, wide
from longitude.positions.layouts import Layout, check_layout
from longitude.positions.rotation import RotaryTable, apply_rotary
from longitude.positions.scaling import rope_frequencies

if TYPE_CHECKING:
    from longitude.attention.indexed_cache import IndexedCacheLayer

ROWS = 256
"""Queries in a block, for which the index scores of all heads are held in memory at a time."""


def highest(scores: Float[Tensor, "B L N"], allowed: Bool[Tensor, "#B L N"], k_top: int) -> Bool[Tensor, "B L N"]:
    """The k_top allowed keys of the highest scores, or all if there are fewer; among equal scores the lowest index is first."""
    ranked = scores.masked_fill(~allowed, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ranked[..., :k_top], True) & allowed


@register_mixer("indexed")
class IndexedAttention(MultiHeadAttention):
    """Lightning indexer (DSA): attention to the k_top visible keys of the highest index score.

        I_ij = sum_h w_ih relu(q_ih . k_j / sqrt(index_dim)),   w = W_w x / sqrt(index_heads),   q = W_q x,   k = norm(W_k x)

    Use it to study what attention to few keys loses, as in DeepSeek V3.2, GLM-5 or Mistral Large 4. Their q is W_q times
    another vector: the latent of the queries in the first two, a norm of x in the last, which also scales q by the position.

    The indexer has one key per token and its own rotation. The choice is exact, and the same for all heads. Among equal scores,
    and many are exactly 0, the earlier key is chosen. With k_top keys or fewer it is full attention. Without a rotation equal
    tokens have scores that differ by rounding alone, so a whole pass and a cache may choose different ones of them.

    The choice has no gradient, so a loss of the output trains everything but the indexer. The authors train it by the
    divergence of its scores from the weights of full attention; here its weights are loaded, or stay as they were drawn.
    It is exact but not fast: index scores of all keys are sorted, and a mask leaves the chosen ones. Its cache also keeps the
    indexer's keys.

    Args:
        dim, num_heads, num_kv_heads, head_dim, bias, dropout, scale, backend: As in MultiHeadAttention.
        encoding: As in MultiHeadAttention; the indexer does not use it.
        k_top: Keys of a query.
        index_heads: Heads of the indexer; None: num_heads.
        index_dim: Width of a head of the indexer; None: head_dim.
        index_rotation: Layout of its rotation: "half" as in DeepSeek V3.2, "interleaved" as in GLM-5; None: it has no rotation.
        index_base: Base of that rotation; None: 10000.
        index_rotary_dim: Only the first index_rotary_dim numbers rotate; None: all.

    Raises:
        ValueError: As MultiHeadAttention, and for index_base or index_rotary_dim with index_rotation=None.

    Source:
        DeepSeek-AI 2025, arXiv:2512.02556, https://arxiv.org/abs/2512.02556
    """

    source = "DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556"
    bidirectional = shares_sequence = False
    choosing = ("index_q", "index_k", "index_w", "index_norm")
    cache_kinds = ("indexed",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        k_top: int = 2048,
        index_heads: int | None = None,
        index_dim: int | None = None,
        index_rotation: Layout | None = "half",
        index_base: float | None = None,
        index_rotary_dim: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__(
            dim, num_heads, num_kv_heads, encoding,
            head_dim=head_dim, bias=bias, dropout=dropout, scale=scale, backend=backend,
        )  # fmt: skip
        index_heads = num_heads if index_heads is None else index_heads
        index_dim = self.head_dim if index_dim is None else index_dim
        check_sizes("IndexedAttention", k_top=k_top, index_heads=index_heads, index_dim=index_dim)
        self.k_top, self.index_heads, self.index_dim = k_top, index_heads, index_dim
        self.index_q, self.index_k, self.index_w = (
            nn.Linear(dim, width, bias=False) for width in (index_heads * index_dim, index_dim, index_heads)
        )
        self.index_norm = nn.LayerNorm(index_dim, eps=1e-6)
        if index_rotation is None and not index_base is index_rotary_dim is None:
            raise UsageError("IndexedAttention", "no index_base and no index_rotary_dim", "index_rotation=None")
        self.index_rotation, self.index_base = index_rotation, 10_000.0 if index_base is None else index_base
        self.index_rotary_dim = index_dim if index_rotary_dim is None else index_rotary_dim
        if index_rotation is not None:
            check_layout("IndexedAttention", index_rotation)
            self._theta(None)  # validates

    def products(self, keys: float) -> float:
        return super().products(min(keys, self.k_top)) + keys * self.index_heads * self.index_dim

    def cache_layer(self) -> IndexedCacheLayer:
        from longitude.attention.indexed_cache import IndexedCacheLayer

        return IndexedCacheLayer()

    def columns_of(self, x: Tensor, call: Call, encoding: Composed, carry: Any) -> tuple[Columns, Any]:
        columns, carry = super().columns_of(x, call, encoding, carry)
        key = normed(self.index_norm, self.index_k(x).to(x.dtype)).detach()
        return {**columns, "index_keys": self._rotated(key[:, None], call)}, carry

    def over_keys(
        self,
        x: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        call: Call,
        encoding: Composed,
        columns: Columns,
        k_positions: Positions,
        weigh: bool,
        /,
    ) -> tuple[Tensor, Tensor | None]:
        columns = dict(columns)
        keys, rows, lost = columns.pop("index_keys"), qkv[0].shape[2], None
        if keys.shape[2] > self.k_top:
            seen, lost = self.chosen(x, keys, call, rows)
            own = call.mask & Pairs(seen[:, None], keys.shape[2] - rows, 0)
            call = replace(call, mask=own, kept=False, found={}, chosen={})  # no other layer chooses these
        out, weights = super().over_keys(x, qkv, call, encoding, columns, k_positions, weigh)
        out = out if lost is None else filled(out, lost, 2, math.nan)
        indexer = [p for name in self.choosing for p in self.get_submodule(name).parameters()]
        return with_zero_gradients(out, indexer), weights

    @torch.no_grad()
    def chosen(
        self, x: Tensor, keys: Tensor, call: Call, rows: int
    ) -> tuple[Bool[Tensor, "B rows N"], Bool[Tensor, "B rows"]]:
        """The keys that each of the last `rows` tokens attends to, and which tokens have a score that is no number."""
        dtype, count = torch.promote_types(x.dtype, torch.float32), keys.shape[2]
        q = self._rotated(split_heads(self.index_q(x), self.index_heads), call)[:, :, -rows:].to(dtype)
        w = self.index_w(x)[:, -rows:].to(dtype) * self.index_heads**-0.5
        order, found, lost = torch.arange(count, device=x.device), [], []
        with torch.autocast(x.device.type, enabled=False):
            for first in range(0, rows, ROWS):
                block = slice(first, min(first + ROWS, rows))
                scores = (q[:, :, block] @ keys.to(dtype).mT * self.index_dim**-0.5).relu()
                scores = torch.einsum("bhrk,brh->brk", scores, w[:, block])
                allowed = call.mask.allowed(order[count - rows :][block], order)
                allowed = allowed[:, 0] if allowed.dim() == 4 else allowed[None]
                found.append(highest(scores, allowed, self.k_top))
                lost.append((scores.isnan() & allowed).any(-1))
        return torch.cat(found, 1), torch.cat(lost, 1)

    def _rotated(self, x: Float[Tensor, "B H L D"], call: Call) -> Tensor:
        if self.index_rotation is None:
            return x
        positions = by_axis(explicit(call.positions, call.length, x.device), 1, "IndexedAttention")
        angles = positions * self._theta(x.device).to(wide(x.device))
        angles = angles[:, None] if angles.dim() == 3 else angles
        table = RotaryTable(angles.cos(), angles.sin()).to(torch.promote_types(x.dtype, torch.float32))
        return apply_rotary(x, table, self.index_rotation)

    def _theta(self, device: torch.device | None) -> Tensor:
        sizes: Any = self.index_dim, self.index_base, None, self.index_rotary_dim, None, 1.0, device, "IndexedAttention"
        return rope_frequencies(*sizes).inverse
