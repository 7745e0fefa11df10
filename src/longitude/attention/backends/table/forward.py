"""Forward: block by block of queries, tile by tile of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from longitude.attention.backends.table.band import heads_last, skewed
from longitude.attention.backends.table.bias import Bias
from longitude.attention.backends.table.bound import Bound
from longitude.attention.backends.table.tiles import (
    LOG2E,
    Levels,
    Scratch,
    batch_steps,
    flat,
    folded,
    reversed_rows,
    scores,
)


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Bias, scale: float) -> tuple[Tensor, Tensor]:
    """Out [B, H, Lq, D] and the logsumexp of each row [B, H, Lq], -inf for a query that sees nothing."""
    batch, heads, queries, _ = q.shape
    wide = bias.table.dtype
    out, lse = heads_last(q), q.new_full(q.shape[:3], -math.inf, dtype=wide)
    start, stop = bias.band.live_rows()
    if (start, stop) != (0, queries):
        out.zero_()
    if start == stop:
        return out, lse
    bound = Bound.of(bias, q, k, v, scale)
    bias = bound.pruned(bias, v).in_base_2(LOG2E)
    for some in batch_steps(batch, heads, min(128, queries), min(256, k.shape[2])):
        q_n, k_n, v_n = (flat(x, some, wide) for x in (q, k, v))
        by_blocks(q_n, k_n, v_n, bias, Levels.of(bias, some), scale, bound, out[some], lse[some])
    return out, lse


def by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    levels: Levels | None,
    scale: float,
    bound: Bound,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Q [n, Lq, D], k, v [n / groups, Lk, D]. Writes out [rows of the batch, heads, Lq, D] and lse [..., Lq]."""
    (count, queries, dim), groups = q.shape, q.shape[0] // k.shape[0]
    start, stop = bias.band.live_rows()
    rows, cols = tile_shape(bias)
    one_row = count == len(bias.starts)  # of the batch: then the first heads are the first of q
    scratch = Scratch(count, q)
    faint = bound.faint and bound.denormal(bias)
    heads = out.shape[:2]
    for i in range(start, stop, rows):
        j = min(i + rows, stop)
        q_i = reversed_rows(q, i, j)
        made = q.new_zeros(k.shape[0], groups * (j - i), dim)  # sums of weighted values
        total = q.new_zeros(count, j - i, 1)  # sums of weights
        top = total if bound.safe else torch.full_like(total, torch.finfo(total.dtype).min)  # the highest score so far
        for b, e in key_tiles(bias, i, j, cols):
            h = bias.first_head(j, e) // groups * groups if one_row else 0
            weights = scores(q_i[h:], k[h // groups :], bias, levels, None, scale, i, j, b, e, scratch, h)
            if not bound.safe:
                highest = torch.maximum(top[h:], weights.amax(-1, keepdim=True))
                weights.sub_(highest)
                fade = (top[h:] - highest).exp2_()
                total[h:] *= fade
                made.view(count, j - i, dim)[h:] *= fade
                top[h:] = highest
            if faint:
                torch.threshold_(weights, bound.faintest, -math.inf)
            weights.exp2_()
            total[h:] += weights.sum(-1, keepdim=True)
            made[h // groups :].baddbmm_(folded(weights, groups), v[h // groups :, b:e])
            if bias.value_vectors is not None and not bias.is_quiet(i, j, b, e):
                upright = scratch.upright("weights", j - i, e - b)
                skewed(upright, e - b).copy_(weights)
                own, columns = bias.of_diagonals(bias.value_vectors, i + b, upright.shape[2], count)
                made.view(count, j - i, dim).baddbmm_(upright[..., columns], own)
        there = slice(queries - j, queries - i)
        sums = total.view(*heads, j - i, 1).flip(2)
        torch.div(made.view(*heads, j - i, dim).flip(2), sums, out=out[:, :, there])
        # Where the sum is 0, the row sees keys, all of them at a score of -inf.
        ends = (total.log2() + (0.0 if bound.safe else top)).masked_fill(total == 0, math.nan) / LOG2E
        lse[:, :, there] = ends.view(*heads, j - i).flip(2)


def tile_shape(bias: Bias) -> tuple[int, int]:
    """Rows and keys of a tile, measured: long rows need fewer keys in the cache; a window is one tile wide; and a tile of
    vectors has a column for each of rows + keys diagonals.
    """
    if bias.band.width <= bias.band.queries // 2:
        return 128, 1024
    if bias.key_vectors is not None and bias.near == 0:
        return 64, 512
    return (256, 128) if bias.band.queries >= 2048 and bias.is_table else (128, 256)


def key_tiles(bias: Bias, i: int, j: int, cols: int) -> Iterator[tuple[int, int]]:
    """The keys that count for queries i .. j-1, quiet ones in tiles of their own."""
    start, stop = bias.keys_that_count(i, j)
    if bias.fall is not None:
        start -= start % cols  # few shapes
    far, near = (min(max(x, start), stop) for x in bias.quiet_keys(i, j))
    for first, last in pairwise((start, far, near, stop) if near - far >= cols else (start, stop)):
        for b in range(first, last, cols):
            yield b, min(b + cols, last)
