"""Tiles of scores, [n, rows, keys] for n rows of the batch times heads, in base 2 and with the queries in reverse.

Base 2, because torch's exp2 is four times as fast as its exp here, forty where the result is nearly zero. Tiles stay in the
cache: nothing is slower than memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longitude.attention.backends.table.band import hankel, skewed
from longitude.attention.backends.table.bias import Bias

LOG2E = math.log2(math.e)
TILE_ELEMENTS = 2**18  # scores held at a time


def batch_steps(batch: int, heads: int, rows: int, keys: int) -> list[slice]:
    """Rows of the batch to take at a time."""
    step = max(1, TILE_ELEMENTS // (heads * rows * keys))
    return [slice(n, min(n + step, batch)) for n in range(0, batch, step)]


def flat(x: Tensor, some: slice, dtype: torch.dtype) -> Tensor:
    """Rows `some` of x [B, H, L, ...] as [n, L, ...]."""
    return x[some].to(dtype).flatten(0, 1)


def reversed_rows(x: Tensor, i: int, j: int) -> Tensor:
    """The queries i .. j-1, counted from the end of x [n, Lq, ...], in reverse."""
    end = x.shape[1]
    return x[:, end - j : end - i].flip(1)


def folded(x: Tensor, groups: int) -> Tensor:
    """[n * groups, rows, D] -> [n, groups * rows, D]: heads that share their keys become rows among them."""
    return x if groups == 1 else x.reshape(-1, groups * x.shape[1], x.shape[2])


class Scratch:
    """Buffers for one tile, made once."""

    def __init__(self, count: int, like: Tensor):
        self.count, self.like, self.held = count, like, {}

    def tile(self, name: str, rows: int, cols: int) -> Tensor:
        """[n, rows, cols], uninitialised: the beginning of the largest so far."""
        size = self.count * rows * cols
        if name not in self.held or self.held[name].numel() < size:
            self.held[name] = self.like.new_empty(size)
        return self.held[name][:size].view(self.count, rows, cols)

    def upright(self, name: str, rows: int, cols: int) -> Tensor:
        """[n, rows, rows + cols - 1], a column per diagonal; zeros at first, and those stay that `skewed` never writes."""
        if (name, rows, -cols) not in self.held:
            self.held[name, rows, -cols] = self.like.new_zeros(self.count, rows, rows + cols - 1)
        return self.held[name, rows, -cols]


@dataclass(frozen=True)
class Levels:
    """Numbers per token, [n, Lq] and [n, Lk], in the dtype they came in."""

    q: Tensor
    k: Tensor
    steep: bool

    @classmethod
    def of(cls, bias: Bias, some: slice) -> Levels | None:
        if bias.q_level is None or bias.k_level is None:
            return None
        q, k = bias.q_level[some].flatten(0, 1), bias.k_level[some].flatten(0, 1)
        over = min(256, q.shape[1] - 1)
        return cls(q, k, bool(((q[:, over:] - q[:, : q.shape[1] - over]).abs() > 8.0).any()))

    def of_tile(self, i: int, j: int, b: int, e: int) -> tuple[Tensor, Tensor]:
        """[n, rows, 1] and [n, 1, keys], whose sum is q - k: measured from a query in the middle, so that near ones are
        small numbers. In base 2, in the dtype they came in.
        """
        rows = reversed_rows(self.q[..., None], i, j)
        middle = rows[:, rows.shape[1] // 2, None]
        return (rows - middle) * LOG2E, (middle - self.k[:, None, b:e]) * LOG2E


def scores(
    q: Tensor,
    k: Tensor,
    bias: Bias,
    levels: Levels | None,
    shift: Tensor | None,
    scale: float,
    i: int,
    j: int,
    b: int,
    e: int,
    scratch: Scratch,
    head: int = 0,
) -> Tensor:
    """Scale q.k + bias + shift of queries i .. j-1 and keys b .. e-1, [n, rows, keys], in scratch.

    q [n, rows, D] in reverse; k [n / groups, Lk, D]; shift [n, rows, 1]; their first is that of `head`. The bias is in base 2,
    and so is what comes out.
    """
    count, rows, keys = q.shape[0], j - i, e - b
    groups = count // k.shape[0]
    out = scratch.tile("scores", rows, keys)[:count]
    row = column = rest = None
    if levels is not None:
        exact_row, exact_column = levels.of_tile(i, j, b, e)
        row, column = exact_row.to(out.dtype), exact_column.to(out.dtype)
        if levels.steep and row.dtype != exact_row.dtype:  # what rounding left of numbers that are not small
            rest = (exact_row - row).to(out.dtype), (exact_column - column).to(out.dtype)
    if row is not None:
        shift = row if shift is None else row + shift
    if bias.is_quiet(i, j, b, e):
        if column is not None and shift is not None:
            torch.add(shift, column, out=out)
        elif shift is not None:
            out.copy_(shift)
        else:
            return torch.baddbmm(
                out.view(-1, groups * rows, keys), folded(q, groups), k[:, b:e].mT, beta=0, alpha=scale * LOG2E,
                out=out.view(-1, groups * rows, keys),
            ).view(count, rows, keys)  # fmt: skip
    else:
        if bias.key_vectors is None:
            table = hankel(bias.table[head:], i, j, b, e)
            heads = table.shape[0]
            at = out if heads == 1 else out.view(-1, heads, rows, keys)
            if shift is None:
                at.copy_(table)
            else:
                torch.add(table, shift if heads == 1 else shift.view(-1, heads, rows, 1), out=at)
        else:
            upright = bias.upright(q, i, j, b, e, scale * LOG2E, scratch.upright("bias", rows, keys))
            at = skewed(upright, keys)
            out.copy_(at) if shift is None else torch.add(at, shift, out=out)
        if column is not None:
            out.add_(column)
    if rest is not None:
        out.add_(rest[0]).add_(rest[1])
    out.view(-1, groups * rows, keys).baddbmm_(folded(q, groups), k[:, b:e].mT, alpha=scale * LOG2E)
    if bias.strict:
        forbidden = hankel(bias.table[head:], i, j, b, e) == -math.inf
        out.view(-1, forbidden.shape[0], rows, keys).masked_fill_(forbidden, -math.inf)
    return out
