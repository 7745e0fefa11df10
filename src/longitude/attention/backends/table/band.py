"""Where queries and keys meet: the geometry of offsets, and the strided views that need no memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Band(NamedTuple):
    """Query i, counted in reverse, and key b meet at diagonal n = i + b, allowed when first <= n <= last."""

    queries: int
    keys: int
    first: int
    last: int

    @classmethod
    def of(cls, queries: int, keys: int, low: int | None, high: int | None) -> Band:
        # Diagonal n has order difference keys - 1 - n.
        first = 0 if high is None else max(0, keys - 1 - high)
        last = queries + keys - 2 if low is None else min(queries + keys - 2, keys - 1 - low)
        return cls(queries, keys, first, last)

    @property
    def diagonals(self) -> int:
        return self.queries + self.keys - 1

    @property
    def width(self) -> int:
        return self.last - self.first + 1

    def mask(self, table: Tensor) -> Tensor:
        """The table, contiguous, with -inf outside the band."""
        if (self.first, self.last) == (0, self.diagonals - 1):
            return table.contiguous()
        masked = table.new_full(table.shape, -math.inf)
        if self.first <= self.last:
            masked[:, self.first : self.last + 1] = table[:, self.first : self.last + 1]
        return masked

    def live_rows(self) -> tuple[int, int]:
        """The queries that see at least one key: start <= i < stop."""
        start, stop = max(0, self.first - (self.keys - 1)), min(self.queries, self.last + 1)
        return (start, stop) if self.first <= self.last and start < stop else (0, 0)

    def live_keys(self, i: int, j: int) -> tuple[int, int]:
        """The keys that some query of i .. j-1 sees: b <= key < e (none when e <= b)."""
        return max(0, self.first - (j - 1)), min(self.keys, self.last - i + 1)

    def open_keys(self, i: int, j: int) -> tuple[int, int]:
        """The keys that every query of i .. j-1 sees: b <= key < e (none when e <= b)."""
        return max(0, self.first - i), min(self.keys, self.last - (j - 1) + 1)


def hankel(table: Tensor, i: int, j: int, b: int, e: int) -> Tensor:
    """[H, j-i, e-b] view of a contiguous table [H, diagonals]: queries i .. j-1 against keys b .. e-1."""
    return table.as_strided((table.shape[0], j - i, e - b), (table.stride(0), 1, 1), table.storage_offset() + i + b)


def skewed(upright: Tensor, keys: int) -> Tensor:
    """[..., rows, keys] view of [..., rows, rows + keys - 1], contiguous, whose columns are diagonals: row r begins at r."""
    width = upright.shape[-1]
    return upright.as_strided(
        (*upright.shape[:-1], keys), (*upright.stride()[:-2], width + 1, 1), upright.storage_offset()
    )


def heads_last(x: Tensor) -> Tensor:
    """Uninitialised, of x's shape [B, H, L, D] but laid out [B, L, H, D], so that merging the heads later is free."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
