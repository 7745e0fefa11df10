"""Forward: block by block of queries, tile by tile of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from longitude.attention.toeplitz.band import heads_last, skewed
from longitude.attention.toeplitz.bias import Bias
from longitude.attention.toeplitz.bound import Bound
from longitude.attention.toeplitz.tiles import LOG2E, Levels, Scratch, batch_steps, flat, reversed_rows, scores

ROWS, KEYS = 128, 256


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Bias, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, D] and the logsumexp of each row [B, H, Lq], -inf for a query that sees nothing."""
    batch, heads, queries, _ = q.shape
    wide = bias.table.dtype
    out, lse = heads_last(q), q.new_full(q.shape[:3], -math.inf, dtype=wide)
    if bias.band.live_rows() != (0, queries):
        out.zero_()
    bound = Bound.of(bias, q, k, v, scale)
    bias = bound.pruned(bias, v).in_base_2(LOG2E)
    for some in batch_steps(batch, heads, min(ROWS, queries), min(KEYS, k.shape[2])):
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
    """q [n, Lq, D], k, v [n / groups, Lk, D]. Writes out [rows of the batch, heads, Lq, D] and lse [..., Lq]."""
    (count, queries, dim), groups = q.shape, q.shape[0] // k.shape[0]
    start, stop = bias.band.live_rows()
    rows = 64 if bias.band.width <= min(512, queries // 2) else ROWS  # a window wastes less in short blocks
    scratch = Scratch(count, q)
    heads = out.shape[:2]
    for i in range(start, stop, rows):
        j = min(i + rows, stop)
        q_i = reversed_rows(q, i, j)
        made = q.new_empty(k.shape[0], groups * (j - i), dim)  # sums of weighted values
        total = top = None  # sums of weights, and the highest score so far, [n, rows, 1]
        for b, e in key_tiles(bias, i, j):
            weights = scores(q_i, k, bias, levels, None, scale, i, j, b, e, scratch)
            if not bound.safe:
                highest = weights.amax(-1, keepdim=True).clamp_min(-1e30)  # a row may see nothing here
                before, top = top, highest if top is None else torch.maximum(top, highest)
                weights.sub_(top)
                if before is not None and total is not None:
                    fade = (before - top).exp2_()
                    total.mul_(fade)
                    made.view(count, j - i, dim).mul_(fade)
            if bound.faint:
                torch.threshold_(weights, bound.faintest, -math.inf)
            weights.exp2_()
            sums, of_groups = weights.sum(-1, keepdim=True), weights.view(-1, groups * (j - i), e - b)
            if total is None:
                total = sums
                torch.bmm(of_groups, v[:, b:e], out=made)
            else:
                total.add_(sums)
                made.baddbmm_(of_groups, v[:, b:e])
            if bias.value_vectors is not None and not bias.is_quiet(i, j, b, e):
                upright = scratch.upright("weights", j - i, e - b)
                skewed(upright, e - b).copy_(weights)
                own, columns = bias.of_diagonals(bias.value_vectors, i + b, upright.shape[2], count)
                made.view(count, j - i, dim).baddbmm_(upright[..., columns], own)
        assert total is not None  # the query at i sees a key
        there = slice(queries - j, queries - i)
        sums = total.view(*heads, j - i, 1).flip(2)
        torch.div(made.view(*heads, j - i, dim).flip(2), sums, out=out[:, :, there])
        ends = total.log2() if top is None else total.log2() + top
        ends = ends.masked_fill(total == 0, math.nan) / LOG2E  # the row sees keys, all of them at a score of -inf
        lse[:, :, there] = ends.view(*heads, j - i).flip(2)


def key_tiles(bias: Bias, i: int, j: int) -> Iterator[tuple[int, int]]:
    """The keys that count for queries i .. j-1, quiet ones in tiles of their own."""
    start, stop = bias.keys_that_count(i, j)
    far, near = (min(max(x, start), stop) for x in bias.quiet_keys(i, j))
    for first, last in pairwise((start, far, near, stop) if near - far >= KEYS else (start, stop)):
        for b in range(first, last, KEYS):
            yield b, min(b + KEYS, last)
