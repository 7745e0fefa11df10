"""Forward: the fused kernel, a block of queries at a time, over the keys that the block sees.

The kernel is at its best from 768 queries on, but queries of one call all look at the same keys. So a long block takes the
keys that all its queries see, short ones the rest at the edges of the band, and the two meet by their logsumexp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from longitude.attention.toeplitz.band import hankel, heads_last, skewed
from longitude.attention.toeplitz.bias import Bias
from longitude.attention.toeplitz.kernel import fused, highest

Answer = tuple[Tensor, Tensor]
"""out [B, H, rows, D] and logsumexp [B, H, rows] of the scores."""

LONG, SHORT = 1024, 256  # queries
DIV, WDIV = 8, 1


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Bias, scale: float) -> Answer:
    """q [B, H, Lq, D] and out in plain order; lse is -inf for a query that sees nothing."""
    queries, band = q.shape[2], bias.band
    bias = bias.pruned(q, k, v, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = heads_last(q), q.new_full(q.shape[:3], -math.inf, dtype=wide)
    start, stop = band.live_rows()
    if (start, stop) != (0, queries):
        out.zero_()
    short = max(64, min(SHORT, queries // DIV, band.width // WDIV))
    for i in range(start, stop, LONG):
        j = min(i + LONG, stop)
        for n, m, o, z in long_block(q[:, :, queries - j : queries - i].flip(2), k, v, bias, scale, i, j, short):
            there = slice(queries - m, queries - n)
            out[:, :, there] = o.flip(2)
            lse[:, :, there] = z.flip(2)
    return out, lse


def long_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, scale: float, i: int, j: int, short: int
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """The queries i .. j-1, in reverse, q [B, H, j-i, D]; each sees a key. In short blocks n .. m-1."""
    b, e = bias.open_keys(i, j)
    e -= (e - b) % 128
    if e - b < j - i:  # too few to be worth a call of their own
        b = e = 0
    far = attend(q, k, v, bias, scale, i, j, b, e) if b < e else None
    for n in range(i, j, short):
        m = min(n + short, j)
        rows = slice(n - i, m - i)
        answers = [] if far is None else [(far[0][:, :, rows], far[1][:, :, rows])]
        for first, last in ranges(bias, n, m, b, e):
            answers.append(attend(q[:, :, rows], k, v, bias, scale, n, m, first, last))
        out, lse = answers[0] if len(answers) == 1 else merged(answers)
        if bool((lost := lse == -math.inf).any()):  # each query here sees a key: its scores are all -inf
            out, lse = out.masked_fill(lost[..., None], math.nan), lse.masked_fill(lost, math.nan)
        if bias.value_vectors is not None:
            out = out + collected(q[:, :, rows], k, bias, scale, n, m, lse).to(out.dtype)
        yield n, m, out, lse


def ranges(bias: Bias, i: int, j: int, b: int, e: int) -> Iterator[tuple[int, int]]:
    """The keys that count for queries i .. j-1, without b .. e-1. Quiet ones apart, where a bias would have to be made for
    them and they are enough for a call."""
    start, stop = bias.keys_that_count(i, j)
    made = bias.key_vectors is not None or bias.k_level is not None
    for first, last in ((start, b), (e, stop)) if b < e else ((start, stop),):
        far, near = (min(max(x, first), last) for x in bias.quiet_keys(i, j))
        cuts = (first, far, near, last) if made and near - far >= j - i else (first, last)
        yield from ((x, y) for x, y in pairwise(cuts) if x < y)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Bias, scale: float, i: int, j: int, b: int, e: int) -> Answer:
    """Queries i .. j-1 against keys b .. e-1. Queries that see none of them: zeros, and -inf."""
    here = added(q, bias, scale, i, j, b, e)
    out, lse = fused(q, k[:, :, b:e], v[:, :, b:e], here, scale)
    lse = lse.masked_fill(bias.silenced(i, j, b, e), -math.inf)
    if bool((zero := lse == 0).any()):  # the kernel says so, too, of scores that are all -inf, or NaN and very few
        top = highest(q, k[:, :, b:e], here, scale)
        out = out.masked_fill((zero & top.isnan())[..., None], math.nan)
        lse = torch.where(zero & ~top.isfinite(), top, lse)
    if bias.q_level is not None:
        lse = lse + rise(bias, i, j)
    return out, lse


def added(q: Tensor, bias: Bias, scale: float, i: int, j: int, b: int, e: int) -> Tensor | None:
    """Everything but q.k and the queries' own level, [B or 1, H or 1, j-i, e-b], a view where it can be; None: nothing."""
    first, last = bias.quiet_keys(i, j)
    quiet = first <= b and e <= last
    fall = None
    if bias.k_level is not None:
        fall = (middle(bias, i, j) - bias.k_level[:, :, b:e]).to(bias.table.dtype)[:, :, None]
    if quiet:
        return None if fall is None else fall.expand(-1, -1, j - i, -1)
    if bias.key_vectors is None:
        here = hankel(bias.table, i, j, b, e)[None]
    else:
        upright = bias.table.new_empty(q.shape[0] * q.shape[1], j - i, j - i + e - b - 1)
        bias.upright(q.flatten(0, 1).to(upright.dtype), i, j, b, e, scale, upright)
        here = skewed(upright, e - b).unflatten(0, q.shape[:2])
    return here if fall is None else here + fall


def middle(bias: Bias, i: int, j: int) -> Tensor:
    """A level of these queries, [B, H, 1]: measured from it, levels near them are small numbers, exact in float32."""
    assert bias.q_level is not None
    at = bias.q_level.shape[2] - 1 - (i + j) // 2
    return bias.q_level[:, :, max(at, 0), None]


def rise(bias: Bias, i: int, j: int) -> Tensor:
    """The level of queries i .. j-1 in reverse, over the middle one, [B, H, j-i]."""
    assert bias.q_level is not None
    end = bias.q_level.shape[2]
    return (bias.q_level[:, :, end - j : end - i].flip(2) - middle(bias, i, j)).to(bias.table.dtype)


def merged(answers: list[Answer]) -> Answer:
    """One softmax over the keys of all. Each query sees one of them."""
    lse = reduce(torch.logaddexp, (z for _, z in answers))
    shares = [(z - lse).exp_()[..., None] for _, z in answers]
    out = answers[0][0] * shares[0]
    for (o, _), share in zip(answers[1:], shares[1:], strict=True):
        out.addcmul_(o, share)
    return out, lse


def collected(q: Tensor, k: Tensor, bias: Bias, scale: float, i: int, j: int, lse: Tensor) -> Tensor:
    """The vectors of the near diagonals, summed by weight, [B, H, j-i, D]: their scores once more."""
    assert bias.value_vectors is not None
    b, e = bias.keys_that_count(i, j)
    b = max(b, min(e, bias.near - (j - 1)))
    keys = k[:, :, b:e].to(bias.table.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.matmul(q.to(keys.dtype), keys.mT).mul_(scale)
    if (here := added(q, bias, scale, i, j, b, e)) is not None:
        scores += here
    lse = lse if bias.q_level is None else lse - rise(bias, i, j)
    upright = scores.new_zeros(*scores.shape[:3], j - i + e - b - 1)
    torch.exp(scores.sub_(lse[..., None]), out=skewed(upright, e - b))
    own, columns = bias.of_diagonals(bias.value_vectors, i + b, upright.shape[3], q.shape[0] * q.shape[1])
    return (upright[..., columns].flatten(0, 1) @ own).unflatten(0, q.shape[:2])
