"""Biases of scores and outputs along diagonals, and the keys that are left out because their weights are negligible."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longitude.attention.backends.table.band import Band, Inputs, Tile

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Bias:
    """Bias of the score of query a and key b, and of the outputs, at the diagonal n = i + b, i = Lq - 1 - a.

        score[a, b]  = table[h, n] + q_level[a] - k_level[b] + scale q_a . key_vectors[h, n - near]
        output_a    += sum over b of weight[a, b] value_vectors[h, n - near]

    table [H, diagonals], with -inf outside the band; one head if it has only the band. Levels [B, H, Lq] and [B, H, Lk].
    vectors [H or 1, N, D], for the diagonals from `near` on, up to the end of the band or less. Before `near` the table and the
    vectors are zero. fall [H]: keys with a level that much above the query's level are left out. starts: the first diagonal of
    each head that counts; empty if all count. strict: mask after the sum, because -inf plus NaN or infinity is not -inf.
    """

    band: Band
    near: int
    table: Tensor
    q_level: Tensor | None
    k_level: Tensor | None
    key_vectors: Tensor | None
    value_vectors: Tensor | None
    fall: Tensor | None = None
    starts: tuple[int, ...] = ()
    strict: bool = False

    @classmethod
    def of(cls, x: Inputs) -> Bias:
        """The bias of a call."""
        band, near, table = x.band, x.near, x.table
        if table is None:
            near = band.diagonals if x.key_vectors is x.value_vectors is None else near
            table = x.q.new_zeros(1, band.diagonals, dtype=x.wide)
        return cls(band, near, band.mask(table), *x[4:8])

    @property
    def is_table(self) -> bool:
        """Whether the bias is only a table, with an entry at every diagonal."""
        return self.k_level is None and self.near == 0 and self.key_vectors is None and self.value_vectors is None

    def in_base_2(self) -> Bias:
        """The table times log2(e); levels and vectors are converted where they are read."""
        return replace(self, table=self.table * LOG2E)

    def own(self) -> Tensor | None:
        """Table entry at the diagonal where a query meets the key of its token, [H or 1]; None if it is outside the band."""
        band = self.band
        return self.table[:, band.last] if band.queries - 1 <= band.last < band.keys and band.width > 0 else None

    def first_head(self, tile: Tile) -> int:
        """The first head for which keys of the tile count."""
        return next((h for h, start in enumerate(self.starts) if start <= tile.j + tile.e - 2), 0)

    def levels_only_fall(self) -> bool:
        """Whether no query has a higher level than a key it attends to, and a token's query and key have equal levels."""
        if self.k_level is None or self.q_level is None:
            return True
        end = self.band.last + 1
        if self.own() is None:
            return False
        falls = bool((self.k_level.diff(dim=2) <= 0).all())
        return falls and torch.equal(self.q_level, self.k_level[:, :, end - self.band.queries : end])

    def unbiased_keys(self, i: int, j: int) -> tuple[int, int]:
        """The keys b .. e-1 that meet the queries i .. j-1 at no diagonal with a table entry, an edge or a vector."""
        b, e = self.band.open_keys(i, j)
        return b, max(b, min(e, self.near - (j - 1)))

    def is_unbiased(self, tile: Tile) -> bool:
        """Whether all keys of the tile are unbiased."""
        first, last = self.unbiased_keys(tile.i, tile.j)
        return first <= tile.b and tile.e <= last

    def keys_that_count(self, i: int, j: int) -> tuple[int, int]:
        """Range (b, e) of the keys of queries i .. j-1, without first keys that have negligible weights for all of them."""
        b, e = self.band.live_keys(i, j)
        if self.fall is None or self.k_level is None:
            return b, e
        own = self.k_level[:, :, max(0, self.band.last - j + 1) : self.band.last - i + 1].amax(2)
        counts = ~(self.k_level[:, :, b:e] > (own + self.fall)[..., None])  # true for NaN, too
        return b + int(counts.flatten(0, 1).any(0).int().argmax()), e

    def add_key_vectors(self, q: Tensor, tile: Tile, factor: float, out: Tensor) -> Tensor:
        """Write table + factor q . key_vectors of a tile's queries to out [n, rows, width], a column per diagonal.

        q [n, rows, D], n a multiple of the table's heads.
        """
        assert self.key_vectors is not None
        (count, _, width), start = out.shape, tile.i + tile.b
        table = self.table[:, start : start + width].repeat(count // len(self.table), 1)[:, None]
        vectors, columns = self.of_diagonals(self.key_vectors, start, width, count)
        out[..., : columns.start] = table[..., : columns.start]
        torch.baddbmm(table[..., columns], q, vectors.mT, alpha=factor, out=out[..., columns])
        out[..., columns.stop :] = table[..., columns.stop :]
        return out

    def of_diagonals(self, vectors: Tensor, start: int, width: int, count: int) -> tuple[Tensor, slice]:
        """Vectors [count, n, D] in the diagonals start .. start+width-1, and the slice of these diagonals that have one."""
        first = max(0, min(width, self.near - start))
        stop = max(first, min(width, self.near + vectors.shape[1] - start))
        some = vectors[:, start + first - self.near : start + stop - self.near]
        some = some.repeat(count // len(some), 1, 1) if 1 < len(some) < count else some.expand(count, -1, -1)
        return some, slice(first, stop)

    def add_gradient(self, vectors: Tensor, start: int, gradient: Tensor) -> None:
        """Add the gradient [count, n, D] of the diagonals from `start` on to the gradient of the vectors [H or 1, n, D]."""
        vectors[:, start - self.near : start - self.near + gradient.shape[1]] += gradient.unflatten(
            0, (-1, len(vectors))
        ).sum(0)


# ---- bounds of scores, and the keys that they allow to leave out -----------------------------------------------------------
SAFE = 40.0  # sums of e^40, times values of at most 1e15, and the inverses stay within float32
NEGLIGIBLE = {torch.float32: 60 * math.log(2), torch.float64: 120 * math.log(2)}
"""e^-this is a weight that changes no digit of a sum of weights."""


@dataclass(frozen=True)
class Bound:
    """|scale q.k| <= most [H], by Cauchy and Schwarz: scale times the longest q times the longest k.

    safe: e^score cannot overflow, so rows need not be lowered by their highest score. may_underflow: weights may be
    denormal numbers, which are many times slower. Weights of scores below `lowest`, in base 2, are negligible and become 0.
    coarse_rounding: the rounding of scores may exceed 1.
    """

    most: Tensor
    finite: bool
    safe: bool
    may_underflow: bool
    lowest: float
    coarse_rounding: bool

    @classmethod
    def of(cls, bias: Bias, x: Inputs) -> Bound:
        """The bound of a call."""
        longest_q, longest_k = (torch.linalg.vector_norm(t, dim=-1, dtype=x.wide).amax((0, 2)) for t in (x.q, x.k))
        longest_k = longest_k.repeat_interleave(x.q.shape[1] // x.k.shape[1])
        if bias.key_vectors is not None and bias.key_vectors.shape[1] > 0:
            longest_k = longest_k + torch.linalg.vector_norm(bias.key_vectors, dim=-1).amax()
        most = abs(x.scale) * longest_q * longest_k
        tables = bias.table[:, bias.band.first : bias.band.last + 1]
        highest, lowest = tables.amax(1) + most, tables.amin(1) - most
        own = bias.own()
        safe = (
            bool(torch.linalg.vector_norm(x.v, dim=-1, dtype=x.wide).amax() < 1e15)
            and own is not None
            and bool(((highest <= SAFE) & (own - most >= -SAFE)).all())
            and bias.levels_only_fall()
        )
        if bias.k_level is not None and bias.q_level is not None:
            lowest = lowest - float(bias.k_level.amax() - bias.q_level.amin())
        may_underflow = not bool((lowest - (0.0 if safe else highest) > -60.0).all())
        finite, coarse = bool(torch.isfinite(most).all()), not bool((most < 2.0**18).all())
        return cls(most, finite, safe, may_underflow, math.log2(torch.finfo(x.wide).tiny) + 26, coarse)

    def denormal(self, bias: Bias) -> bool:
        """Whether weights of the forward pass may be denormal, after pruning; bias in base 2."""
        if not self.safe or bias.k_level is not None:
            return True
        lowest = bias.table.masked_fill(bias.table == -math.inf, 0.0).amin(1) - self.most / math.log(2)
        return not bool((lowest > math.log2(torch.finfo(bias.table.dtype).tiny)).all())

    def pruned(self, bias: Bias, *rows: Tensor) -> Bias:
        """Leave out keys of negligible weight, at most e^(bias - bias at the diagonal of the query's token + 2 most).

        rows: vectors that weights are multiplied with, [..., D]; if some are far longer than usual, fewer keys are negligible.
        All keys stay if a table is added to levels or vectors, if a query may not attend to its token's key, or if a number is
        not finite.
        """
        if not self.finite:
            return replace(bias, strict=True)
        own = bias.own()
        only_levels = bias.k_level is not None and bias.near == bias.band.diagonals
        if own is None or not (only_levels or bias.is_table):
            return bias
        enough, table = NEGLIGIBLE[bias.table.dtype], bias.table
        if not only_levels and not bool((table[:, bias.band.first : bias.band.last] < own[:, None] - enough).any()):
            return bias  # tables that are not steep
        enough += sum(unevenness(x) for x in rows)
        if not math.isfinite(enough):
            return bias
        if only_levels:
            return replace(bias, fall=2 * self.most + enough)
        negligible = table < (own - 2 * self.most - enough)[:, None]
        starts = (~negligible).int().argmax(1).tolist()
        return replace(bias, table=table.masked_fill(negligible, -math.inf), starts=tuple(starts))


def unevenness(rows: Tensor) -> float:
    """Logarithm of the longest row [..., D] over the geometric mean of rows that are not zero; not finite if they are not."""
    long = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.promote_types(rows.dtype, torch.float32))
    some = long[long != 0]
    return float(some.amax().log() - some.log().mean()) if some.numel() else 0.0
