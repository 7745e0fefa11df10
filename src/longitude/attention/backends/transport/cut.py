"""Pairs of queries and keys of a call that are computed together, in blocks of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.attention.backends.operators import Inputs
from longitude.attention.backends.table.band import Limits, Terms


class Cut(NamedTuple):
    """Cut of a call into blocks: keys before the first block, tokens, tokens of a first block, longest distance (None: any).

    Keys from `visible` to `padded` - 1 are left out; from `padded` on the last block has zeros.
    """

    first: int
    tokens: int
    chunk: int
    high: int | None
    visible: int
    padded: int

    @property
    def sizes(self) -> list[int]:
        """Sizes of adjacent blocks in tokens, the smallest first."""
        if self.high == 0:
            return []
        return [self.chunk << n for n in range((-(-self.tokens // self.chunk) - 1).bit_length())]

    @property
    def has_past(self) -> bool:
        """Whether a query attends to keys before the first block."""
        keys = self.past_keys
        return keys.start < keys.stop

    @property
    def past_keys(self) -> slice:
        """Keys before the first block that queries attend to."""
        far = self.first if self.high is None else min(self.first, self.high)
        return slice(self.first - far, self.first + min(0, self.visible))

    def carries(self, size: int) -> bool:
        """Whether carrying over blocks of this size is needed."""
        needed = 2 * size < self.tokens or self.has_past
        return needed and (self.high is None or size < self.high)

    def parts(self, size: int) -> Iterator[Part]:
        """Pairs of adjacent blocks of this size: all whole pairs at once, then a shorter one."""
        both = 2 * size
        whole = min(self.tokens // both, max(0, self.visible + size) // both)
        near = size if self.high is None else min(size, self.high)
        if whole:

            def halves(x: Tensor) -> Tensor:
                return x[:, : whole * both].unflatten(1, (whole, both))

            yield Part(
                lambda x: halves(x)[:, :, size : size + near], lambda x: halves(x)[:, :, size - near : size], near
            )
        edge = whole * both + size
        rows, keys = slice(edge, min(edge + near, self.tokens)), slice(edge - near, min(edge, self.visible))
        if rows.start < rows.stop and keys.start < keys.stop:
            yield Part(lambda x: x[:, None, rows], lambda x: x[:, None, keys], near)

    def past(self) -> Part:
        """The keys before the first block."""
        keys, rows = self.past_keys, slice(0, self.tokens if self.high is None else min(self.tokens, self.high))
        return Part(lambda x: x[:, None, rows], lambda x: x[:, None, keys], self.first - keys.start)

    # ---- the same, by chunks of queries -------------------------------------------------------------------------------
    def reach(self, n: int) -> tuple[range, int]:
        """For the n-th chunk of queries: the chunks before it that it attends to, nearest first, and its first key."""
        oldest = 0 if self.high is None else max(0, self.first + n * self.chunk - self.high)
        earliest = max(0, oldest - self.first) // self.chunk
        return range(n - 1, earliest - 1, -1), oldest if oldest < self.first else self.first + earliest * self.chunk

    def mask(self, n: int, scores: Tensor, begin: int) -> None:
        """Set scores to -inf, in place, where the n-th chunk of queries may not attend to these keys, from `begin` on."""
        start, stop = self.first + n * self.chunk, begin + scores.shape[2]
        if self.high is not None and start + self.chunk - 1 - begin > self.high:
            i, j = (torch.arange(a, b, device=scores.device) for a, b in ((start, start + self.chunk), (begin, stop)))
            scores.masked_fill_(i[:, None] - j > self.high, -math.inf)
        left_out = (max(0, self.first + edge - begin) for edge in (self.visible, self.padded))
        scores[:, :, slice(*left_out)] = -math.inf


class Part(NamedTuple):
    """Selectors of queries and of keys, [N, L, ...] -> [N, n, rows, ...]; apart: first query's index minus first key's."""

    rows: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    apart: int

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, row_level: Tensor | None, key_level: Tensor | None, high: int | None
    ) -> Inputs:
        """Inputs of `band.forward`; blocks are its heads."""
        q, k, v = self.rows(q), self.keys(k), self.keys(v)
        terms = Terms()
        if row_level is not None and key_level is not None:
            terms = Terms(q_level=self.rows(row_level).double(), k_level=self.keys(key_level).double())
        if high is not None:
            high += k.shape[2] - q.shape[2] - self.apart  # it counts from the last query and the last key
        return Inputs(q, k, v, terms, Limits(high=high), scale=1.0)
