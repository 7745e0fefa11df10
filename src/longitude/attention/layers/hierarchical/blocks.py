"""Which blocks stand for a prefix of tokens: the binary digits of its length; and the summaries of such blocks.

A node (level, m) is the block of tokens m 2^level .. (m + 1) 2^level - 1. A prefix of a tokens is one block for each digit 1
of a, largest first: the digit of `level` is the node m = (a >> level) - 1, which is even, a left child.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

Merge = Callable[[int, Tensor, Tensor], Tensor]
"""(level, left, right) -> the summaries at `level`, from those of both halves [..., D], one level below."""


def prefix_blocks(a: int) -> list[tuple[int, int]]:
    """[start, stop) of each block that covers tokens 0 .. a-1: 13 -> [0, 8), [8, 12), [12, 13)."""
    levels = [level for level in reversed(range(a.bit_length())) if a >> level & 1]
    return [(((a >> level) - 1) << level, (a >> level) << level) for level in levels]


def score_count(length: int, window: int) -> int:
    """Scores of one head over `length` tokens: of the window, and of the blocks before it."""
    return sum(min(t + 1, window) + max(0, t - window + 1).bit_count() for t in range(length))


def mean(level: int, left: Tensor, right: Tensor) -> Tensor:
    """The average of both halves. Halving is exact, so this is the sum of all tokens divided by their number, to the bit."""
    return (left + right) * 0.5


class Level(NamedTuple):
    """The nodes first, first + 1, ... of one level, first even. ends: positions of each block's first and last token."""

    first: int
    keys: Float[Tensor, "B Hkv n D"]
    values: Float[Tensor, "B Hkv n Dv"]
    ends: Int[Tensor, "B n 2"]


def pyramid(
    keys: Float[Tensor, "B Hkv n D"],
    values: Float[Tensor, "B Hkv n Dv"],
    ends: Int[Tensor, "B n 2"],
    before: int,
    held: tuple[Tensor, Tensor, Tensor] | None,
    merges: tuple[Merge, Merge],
) -> list[Level]:
    """All levels over the tokens before .. before + n - 1, level 0 being themselves; `before` tokens precede them.

    held: what the digits of `before` stand for: keys [B, Hkv, levels, D], values, ends [B, levels, 2]; None where it is 0.
    """
    levels, stop = [], before + keys.shape[2]
    while stop >> len(levels):
        level = len(levels)
        if before >> level & 1:
            assert held is not None
            own = slice(level, level + 1)
            keys = torch.cat([held[0][:, :, own], keys], 2)
            values = torch.cat([held[1][:, :, own], values], 2)
            ends = torch.cat([held[2][:, own].expand(len(ends), -1, -1), ends], 1)
        levels.append(Level((before >> level) & ~1, keys, values, ends))
        keys = merges[0](level + 1, *halves(keys))
        values = merges[1](level + 1, *halves(values))
        left, right = halves(ends)
        ends = torch.stack([left[..., 0], right[..., 1]], -1)
    return levels


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right children along the second dimension from the end; one that waits for its sister is left out."""
    pairs = x.shape[-2] // 2
    left, right = x[..., : 2 * pairs, :].unflatten(-2, (pairs, 2)).unbind(-2)
    return left, right
