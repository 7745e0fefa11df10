"""The forward pass in torch, by blocks of queries and tiles of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from longitude.attention.backends.table.band import Inputs, Tile, heads_last
from longitude.attention.backends.table.bias import LOG2E, Bias, Bound
from longitude.attention.backends.table.tiles import Tiles, batch_steps, folded, reversed_rows, skewed


def forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """The output [B, H, Lq, Dv] and the logsumexp [B, H, Lq], -inf for a query without keys."""
    batch, heads, queries, _ = x.q.shape
    bias = Bias.of(x)
    out, lse = heads_last(x.q, x.v.shape[3]), x.q.new_full(x.q.shape[:3], -math.inf, dtype=x.wide)
    start, stop = bias.band.live_rows()
    if (start, stop) != (0, queries):
        out.zero_()
    if start == stop:
        return out, lse
    bound = Bound.of(bias, x)
    bias = bound.pruned(bias, x.v).in_base_2()
    bound = replace(bound, may_underflow=bound.may_underflow and bound.denormal(bias))
    rows, cols = tile_shape(bias)
    for some in batch_steps(batch, heads, min(128, queries), min(256, x.k.shape[2])):
        tiles = Tiles(x, bias, some)
        for i in range(start, stop, rows):
            j = min(i + rows, stop)
            values, total, own = (
                t.view(-1, heads, j - i, t.shape[-1]).flip(2) for t in block(tiles, bound, i, j, cols)
            )
            torch.div(values, total, out=out[some, :, queries - j : queries - i])
            lse[some, :, queries - j : queries - i] = own[..., 0]
    return out, lse


def block(tiles: Tiles, bound: Bound, i: int, j: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of weighted values [n, rows, D], of weights [n, rows, 1], and logsumexp [n, rows, 1], for queries i .. j-1."""
    bias, groups, rows = tiles.bias, tiles.groups, j - i
    q = reversed_rows(tiles.q, i, j)
    values = q.new_zeros(len(tiles.k), groups * rows, tiles.v.shape[2])
    by_head = values.view(len(q), rows, -1)
    total = q.new_zeros(len(q), rows, 1)
    top = total if bound.safe else torch.full_like(total, torch.finfo(total.dtype).min)  # the highest score so far
    for b, e in key_tiles(bias, i, j, cols):
        tile = Tile(i, j, b, e)
        h = tiles.first_head(tile)
        weights = tiles.scores(q, tile, head=h)
        if not bound.safe:
            highest = torch.maximum(top[h:], weights.amax(-1, keepdim=True))
            weights.sub_(highest)
            factor = (top[h:] - highest).exp2_()
            total[h:] *= factor
            by_head[h:] *= factor
            top[h:] = highest
        if bound.may_underflow:
            torch.threshold_(weights, bound.lowest, -math.inf)
        weights.exp2_()
        total[h:] += weights.sum(-1, keepdim=True)
        values[h // groups :].baddbmm_(folded(weights, groups), tiles.v[h // groups :, b:e])
        if bias.value_vectors is not None and not bias.is_unbiased(tile):
            by_diagonal = tiles.by_diagonal("weights", rows, e - b)
            skewed(by_diagonal, e - b).copy_(weights)
            own, columns = bias.of_diagonals(bias.value_vectors, i + b, by_diagonal.shape[2], len(q))
            by_head.baddbmm_(by_diagonal[..., columns], own)
    # If the sum is 0, the row has keys, but all their scores are -inf: the result is NaN.
    lse = (total.log2() + (0.0 if bound.safe else top)).masked_fill(total == 0, math.nan) / LOG2E
    return by_head, total, lse


def tile_shape(bias: Bias) -> tuple[int, int]:
    """Rows and keys of a tile: the fastest sizes in measurements.

    Long rows need fewer keys in the cache; a window is one tile wide; a tile of vectors has a column for each of rows + keys
    diagonals.
    """
    if bias.band.width <= bias.band.queries // 2:
        return 128, 1024
    if bias.key_vectors is not None and bias.near == 0:
        return 64, 512
    return (256, 128) if bias.band.queries >= 2048 and bias.is_table else (128, 256)


def key_tiles(bias: Bias, i: int, j: int, cols: int) -> Iterator[tuple[int, int]]:
    """Yield tiles b, e of the keys that count for queries i .. j-1; unbiased keys get separate tiles."""
    start, stop = bias.keys_that_count(i, j)
    if bias.fall is not None:
        start -= start % cols  # few shapes
    far, near = (min(max(x, start), stop) for x in bias.unbiased_keys(i, j))
    for first, last in pairwise((start, far, near, stop) if near - far >= cols else (start, stop)):
        for b in range(first, last, cols):
            yield b, min(b + cols, last)
