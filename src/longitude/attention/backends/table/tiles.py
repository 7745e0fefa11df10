"""Tiles of scores, [n, rows, keys] for n rows of the batch times heads, in base 2 and with the queries in reverse.

Base 2, because torch's exp2 is four times as fast as its exp here, forty where the result is nearly zero. Tiles stay in the
cache of the processor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longitude.attention.backends.table.band import Inputs, Tile
from longitude.attention.backends.table.bias import LOG2E, Bias

TILE_ELEMENTS = 2**18  # scores held at a time


# ---- strided views, which need no memory ------------------------------------------------------------------------------------
def hankel(table: Tensor, tile: Tile) -> Tensor:
    """[H, rows, keys] view of a contiguous table [H, diagonals]."""
    start = table.storage_offset() + tile.i + tile.b
    return table.as_strided((len(table), *tile.shape), (table.stride(0), 1, 1), start)


def skewed(by_diagonal: Tensor, keys: int) -> Tensor:
    """View [..., rows, keys] of contiguous [..., rows, rows + keys - 1] with diagonals as columns: row r begins at column r."""
    strides = (*by_diagonal.stride()[:-2], by_diagonal.shape[-1] + 1, 1)
    return by_diagonal.as_strided((*by_diagonal.shape[:-1], keys), strides, by_diagonal.storage_offset())


def batch_steps(batch: int, heads: int, rows: int, keys: int) -> list[slice]:
    """Slices of the batch, each computed at once."""
    step = max(1, TILE_ELEMENTS // (heads * rows * keys))
    return [slice(n, min(n + step, batch)) for n in range(0, batch, step)]


def reversed_rows(x: Tensor, i: int, j: int) -> Tensor:
    """The queries i .. j-1, counted from the end of x [n, Lq, ...], in reverse."""
    end = x.shape[1]
    return x[:, end - j : end - i].flip(1)


def folded(x: Tensor, groups: int) -> Tensor:
    """[n * groups, rows, D] -> [n, groups * rows, D]: heads that share their keys become rows among them."""
    return x if groups == 1 else x.reshape(-1, groups * x.shape[1], x.shape[2])


class Tiles:
    """The scores of some rows of the batch, tile by tile, in buffers that are made once.

    q [n, Lq, D]; k, v [n / groups, Lk, D]. The bias is in base 2.
    """

    def __init__(self, x: Inputs, bias: Bias, some: slice):
        self.bias, self.scale, self.some, self.wide = bias, x.scale, some, x.wide
        self.q, self.k, self.v = (self.flat(t) for t in (x.q, x.k, x.v))
        self.groups = x.q.shape[1] // x.k.shape[1]
        self.one_row = len(self.q) == len(bias.starts)  # of the batch: then row h of q is head h
        self.levels, self.steep = None, False
        if bias.q_level is not None and bias.k_level is not None:
            self.levels = q, _ = bias.q_level[some].flatten(0, 1), bias.k_level[some].flatten(0, 1)
            over = min(256, q.shape[1] - 1)
            self.steep = bool(((q[:, over:] - q[:, : q.shape[1] - over]).abs() > 8.0).any())
        self.buffers: dict[tuple[str, int, int], Tensor] = {}

    def flat(self, x: Tensor) -> Tensor:
        """These rows of x [B, H, L, ...] as [n, L, ...]."""
        return x[self.some].to(self.wide).flatten(0, 1)

    def first_head(self, tile: Tile) -> int:
        """The first head, or group of them, for which keys of the tile count."""
        return self.bias.first_head(tile) // self.groups * self.groups if self.one_row else 0

    def buffer(self, name: str, rows: int, cols: int) -> Tensor:
        """[n, rows, cols], uninitialised: the beginning of the largest so far."""
        size = len(self.q) * rows * cols
        held = self.buffers.get((name, 0, 0))
        if held is None or held.numel() < size:
            held = self.buffers[name, 0, 0] = self.q.new_empty(size)
        return held[:size].view(-1, rows, cols)

    def by_diagonal(self, name: str, rows: int, cols: int) -> Tensor:
        """[n, rows, rows + cols - 1], a column per diagonal, made of zeros; entries that `skewed` never writes stay zero."""
        if (name, rows, cols) not in self.buffers:
            self.buffers[name, rows, cols] = self.q.new_zeros(len(self.q), rows, rows + cols - 1)
        return self.buffers[name, rows, cols]

    def level(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Levels of queries [n, rows, 1] and keys [n, 1, keys]: their sum is q_level - k_level in base 2, in the input dtype.

        Levels are relative to a query in the middle, so that those of nearby tokens are small numbers.
        """
        assert self.levels is not None
        q_level, k_level = self.levels
        rows = reversed_rows(q_level[..., None], tile.i, tile.j)
        middle = rows[:, rows.shape[1] // 2, None]
        return (rows - middle) * LOG2E, (middle - k_level[:, None, tile.b : tile.e]) * LOG2E

    def scores(self, q: Tensor, tile: Tile, shift: Tensor | None = None, head: int = 0) -> Tensor:
        """The scores scale q.k + bias + shift, from `head` on, [n - head, rows, keys], in a buffer.

        q [n, rows, D] and shift [n, rows, 1]: the tile's queries in reverse.
        """
        bias, groups, (rows, keys) = self.bias, self.groups, tile.shape
        q, k, alpha = folded(q[head:], groups), self.k[head // groups :, tile.b : tile.e].mT, self.scale * LOG2E
        out = self.buffer("scores", rows, keys)[: len(self.q) - head]
        products = out.view(-1, groups * rows, keys)
        shift, column, rest = None if shift is None else shift[head:], None, None
        if self.levels is not None:
            exact = self.level(tile)
            row, column = (x.to(out.dtype) for x in exact)
            if self.steep and row.dtype != exact[0].dtype:  # the rounding errors of large levels
                rest = [(x - y).to(out.dtype) for x, y in zip(exact, (row, column), strict=True)]
            shift = row if shift is None else row + shift
        if bias.is_unbiased(tile):
            if shift is None:
                return torch.baddbmm(products, q, k, beta=0, alpha=alpha, out=products).view(out.shape)
            out.copy_(shift) if column is None else torch.add(shift, column, out=out)
        else:
            if bias.key_vectors is None:
                added = hankel(bias.table[head:], tile)
                at = out if len(added) == 1 else out.view(-1, len(added), rows, keys)
                shift = shift if shift is None or len(added) == 1 else shift.view(-1, len(added), rows, 1)
            else:
                by_diagonal, vectors = self.by_diagonal("bias", rows, keys), q.view(-1, rows, q.shape[2])
                at, added = out, skewed(bias.add_key_vectors(vectors, tile, alpha, by_diagonal), keys)
            at.copy_(added) if shift is None else torch.add(added, shift, out=at)
            if column is not None:
                out.add_(column)
        if rest is not None:
            out.add_(rest[0]).add_(rest[1])
        products.baddbmm_(q, k, alpha=alpha)
        if bias.strict:
            forbidden = hankel(bias.table[head:], tile) == -math.inf
            out.view(-1, len(forbidden), rows, keys).masked_fill_(forbidden, -math.inf)
        return out
