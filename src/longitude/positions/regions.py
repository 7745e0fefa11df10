"""Where an encoding puts queries and keys of a pair, when not at their own positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """Pairs of a query and a key that an encoding moves alike: the query at position i to queries(i), the key at j to keys(j).

        first <= floor(i / block) - floor(j / block) <= last

    The regions of an encoding are disjoint, and every pair that a causal mask allows is in one. Attention over each of them is
    attention over parts of the keys, which are merged by their logsumexp.

    Args:
        queries: maps positions [...] to those that queries are rotated to, integers or float64 [...].
        keys: the same for keys.
        first: smallest difference; None: unbounded.
        last: largest difference; None: unbounded.
        block: positions that count as one; 1: the difference is the offset.
    """

    queries: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    first: int | None = None
    last: int | None = None
    block: int = 1

    def holds(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether pairs of positions, broadcast against each other, are in it."""
        ago = i - j if self.block == 1 else _floor(i, self.block) - _floor(j, self.block)
        inside = torch.ones_like(ago, dtype=torch.bool) if self.first is None else ago >= self.first
        return inside if self.last is None else inside & (ago <= self.last)


def _floor(positions: Tensor, block: int) -> Tensor:
    return positions.div(block, rounding_mode="floor")
