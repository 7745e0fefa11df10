"""What is added to the scores besides q.k, as tensors, and its value on a tile of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longitude.attention.backends.table.band import Band


@dataclass(frozen=True)
class Bias:
    """score[a, b] = table[h, n] + q_level[a] - k_level[b] + scale q_a . key_vectors[h, n - near],
    and output_a += sum of weight[a, b] * value_vectors[h, n - near], at the diagonal n = i + b, i = Lq - 1 - a.

    table [H, diagonals], with -inf where the band ends; one head where nothing but the band is in it. Levels [B, H, Lq] and
    [B, H, Lk]; vectors [H or 1, N, D], of the diagonals from `near` on, as far as the band goes or less. Before `near` the
    table and the vectors are zero. fall [H]: keys whose level is that much above the query's own count for nothing. starts:
    for each head, the first diagonal that counts; empty where all do. strict: what is not finite must not reach a query that
    may not see it: -inf and NaN do not add up to -inf.
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

    def in_base_2(self, factor: float) -> Bias:
        return replace(self, table=self.table * factor)

    def own(self) -> Tensor | None:
        """The table at the diagonal that every query sees, that of its own key, [H or 1]; None where there is no such."""
        band = self.band
        return self.table[:, band.last] if band.queries - 1 <= band.last < band.keys and band.width > 0 else None

    def first_head(self, j: int, e: int) -> int:
        """The heads before it see nothing that counts at keys before e of queries before j."""
        return next((h for h, start in enumerate(self.starts) if start <= j + e - 2), 0)

    def levels_only_fall(self) -> bool:
        """No query stands at a higher level than a key that it sees, and at that of its own key, which it sees."""
        if self.k_level is None or self.q_level is None:
            return True
        end = self.band.last + 1
        if self.own() is None:
            return False
        falls = bool((self.k_level.diff(dim=2) <= 0).all())
        return falls and torch.equal(self.q_level, self.k_level[:, :, end - self.band.queries : end])

    def quiet_keys(self, i: int, j: int) -> tuple[int, int]:
        """The keys b .. e-1 at which no diagonal of the queries i .. j-1 says anything: no table, edge or vector."""
        b, e = self.band.open_keys(i, j)
        return b, max(b, min(e, self.near - (j - 1)))

    def is_quiet(self, i: int, j: int, b: int, e: int) -> bool:
        first, last = self.quiet_keys(i, j)
        return first <= b and e <= last

    def keys_that_count(self, i: int, j: int) -> tuple[int, int]:
        """The keys b .. e-1 that queries i .. j-1 see, without the first ones that have fallen too far for all of them."""
        b, e = self.band.live_keys(i, j)
        if self.fall is None or self.k_level is None:
            return b, e
        own = self.k_level[:, :, max(0, self.band.last - j + 1) : self.band.last - i + 1].amax(2)
        counts = ~(self.k_level[:, :, b:e] > (own + self.fall)[..., None])  # also where something is not a number
        return b + int(counts.flatten(0, 1).any(0).int().argmax()), e

    def upright(self, q: Tensor, i: int, j: int, b: int, e: int, factor: float, out: Tensor) -> Tensor:
        """Table + factor q . key_vectors of queries i .. j-1 at the diagonals of the keys b .. e-1, into out [n, rows, width].

        q [n, rows, D], n a multiple of the table's heads.
        """
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
        vectors[:, there] += gradient.unflatten(0, (-1, len(vectors))).sum(0)
