"""What is added to the scores besides q.k, as tensors, and its value on a tile of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.toeplitz.band import Band

NOTHING = {torch.float32: 2.0**-60, torch.float64: 2.0**-120}
"""A weight that changes no digit of a sum of weights."""


@dataclass(frozen=True)
class Bias:
    """score[a, b] = table[h, n] + q_level[a] - k_level[b] + scale q_a . key_vectors[h, n - near],
    and output_a += sum of weight[a, b] * value_vectors[h, n - near], at the diagonal n = i + b, i = Lq - 1 - a.

    table [H, diagonals], with -inf where the band ends; one head where nothing but the band is in it. Levels [B, H, Lq] and
    [B, H, Lk]; vectors [H or 1, N, D], of the diagonals from `near` on, as far as the band goes or less. Before `near` the
    table and the vectors are zero."""

    band: Band
    near: int
    table: Tensor
    q_level: Tensor | None
    k_level: Tensor | None
    key_vectors: Tensor | None
    value_vectors: Tensor | None
    spread: Tensor | None = None

    @classmethod
    def of(
        cls,
        band: Band,
        near: int,
        like: Tensor,
        table: Tensor | None,
        levels: tuple[Tensor | None, Tensor | None],
        vectors: tuple[Tensor | None, Tensor | None],
    ) -> Bias:
        if table is None and vectors == (None, None):
            near = band.diagonals
        masked = like.new_zeros(1, band.diagonals) if table is None else table
        return cls(band, near, band.mask(masked), *levels, *vectors)

    @property
    def is_table(self) -> bool:
        """Nothing but a table, with something to say at every diagonal."""
        return self.k_level is None and self.near == 0 and self.key_vectors is None and self.value_vectors is None

    def open_keys(self, i: int, j: int) -> tuple[int, int]:
        """The keys b .. e-1 that all queries i .. j-1 see, and that are quiet or whose bias is a view of the table."""
        b, e = self.band.open_keys(i, j) if self.is_table else self.quiet_keys(i, j)
        return max(b, self.keys_that_count(i, j)[0]), e

    def quiet_keys(self, i: int, j: int) -> tuple[int, int]:
        """The keys b .. e-1 at which no diagonal of the queries i .. j-1 says anything: no table, edge or vector."""
        b, e = self.band.open_keys(i, j)
        return b, max(b, min(e, self.near - (j - 1)))

    def pruned(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Bias:
        """Without what cannot count, by a bound that no query and key can break: |scale q.k| <= m, so a weight is at most
        e^(bias - bias at the query's own diagonal + 2 m), and one below NOTHING changes no digit of a sum.

        Nothing is pruned where both tables and levels or vectors speak, where a row may not see its own diagonal, or where
        a number is not finite.
        """
        own = self.band.last
        everyone_sees_it = self.band.queries - 1 <= own < self.band.keys
        nothing_but_levels = self.k_level is not None and self.near == self.band.diagonals
        if not everyone_sees_it or not (nothing_but_levels or self.is_table):
            return self
        wide, enough = self.table.dtype, -math.log(NOTHING[self.table.dtype])
        if self.is_table and not bool((self.table[:, self.band.first : own] < self.table[:, own, None] - enough).any()):
            return self  # the quick way out for tables that are not steep
        longest = [torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax((0, 2)) for x in (q, k)]
        most = abs(scale) * longest[0] * longest[1].repeat_interleave(q.shape[1] // k.shape[1])  # [H]
        spread = 2 * most + enough + 0 * torch.linalg.vector_norm(v)  # not finite where v is not
        if nothing_but_levels:
            return replace(self, spread=spread)
        table = self.table.masked_fill(self.table < (self.table[:, own] - spread)[:, None], -math.inf)
        return replace(self, table=table)

    def keys_that_count(self, i: int, j: int) -> tuple[int, int]:
        """The keys b .. e-1 that queries i .. j-1 see, without the first ones that have fallen too far for all of them."""
        b, e = self.band.live_keys(i, j)
        if self.spread is None or self.k_level is None:
            return b, e
        own = self.k_level[:, :, max(0, self.band.last - j + 1) : self.band.last - i + 1].amax(2)
        counts = ~(self.k_level[:, :, b:e] > (own + self.spread)[..., None])  # also where something is not a number
        return b + int(counts.flatten(0, 1).any(0).int().argmax()), e

    @cached_property
    def _said(self) -> Tensor:
        """How many diagonals before each say more than -inf, [H, diagonals + 1]."""
        return F.pad((self.table > -math.inf).cumsum(1), (1, 0))

    def silenced(self, i: int, j: int, b: int, e: int) -> Tensor:
        """The queries i .. j-1 for which the table says -inf of all keys b .. e-1, by band or by pruning, [H or 1, j-i]."""
        return self._said[:, i + e : j + e] == self._said[:, i + b : j + b]

    def upright(self, q: Tensor, i: int, j: int, b: int, e: int, factor: float, out: Tensor) -> Tensor:
        """table + factor q . key_vectors of queries i .. j-1 at the diagonals of the keys b .. e-1, into out [n, rows, width].

        q [n, rows, D], n a multiple of the table's heads."""
        assert self.key_vectors is not None
        count, _, width = out.shape
        table = self.table[:, i + b : i + b + width].repeat(count // len(self.table), 1)[:, None]
        vectors, columns = self.of_diagonals(self.key_vectors, i + b, width, count)
        out[..., : columns.start] = table[..., : columns.start]
        torch.baddbmm(table[..., columns], q, vectors.mT, alpha=factor, out=out[..., columns])
        out[..., columns.stop :] = table[..., columns.stop :]
        return out

    def of_diagonals(self, vectors: Tensor, start: int, width: int, count: int) -> tuple[Tensor, slice]:
        """The vectors [count, n, D] of those of the diagonals start .. start+width-1 that have one, and where these are."""
        first = max(0, min(width, self.near - start))
        stop = max(first, min(width, self.near + vectors.shape[1] - start))
        some = vectors[:, start + first - self.near : start + stop - self.near]
        some = some.repeat(count // len(some), 1, 1) if 1 < len(some) < count else some.expand(count, -1, -1)
        return some, slice(first, stop)

    def add(self, vectors: Tensor, start: int, gradient: Tensor) -> None:
        """Adds gradient [count, n, D] of the diagonals from `start` on to that of the vectors [H or 1, n, D]."""
        there = slice(start - self.near, start - self.near + gradient.shape[1])
        vectors[:, there] += (
            gradient.view(-1, len(vectors), *gradient.shape[1:]).sum(0) if len(vectors) > 1 else gradient.sum(0)
        )
