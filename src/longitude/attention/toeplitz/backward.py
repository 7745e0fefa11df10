"""Backward: tile by tile, in tiles that fit the cache; a tile of weights is built once and serves every gradient.

Base 2 all through: torch's exp2 is four times as fast as its exp here, forty where the result is nearly zero.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.attention.toeplitz.band import hankel, heads_last, skewed
from longitude.attention.toeplitz.bias import Bias

LOG2E = math.log2(math.e)
TILE_ELEMENTS = 2**17  # weights held at a time: more do not fit the cache


class Gradients(NamedTuple):
    """Of the tensors of the same names; None where nobody wants it. That of q_level is the caller's: it is that of lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    k_level: Tensor | None
    key_vectors: Tensor | None
    value_vectors: Tensor | None


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Bias,
    scale: float,
    learned: bool,
) -> Gradients:
    """All in plain order, [B, H, L, ...]."""
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1:3]
    band, wide = bias.band, bias.table.dtype

    def like(x: Tensor | None, wanted: bool = True) -> Tensor | None:
        return torch.zeros_like(x) if x is not None and wanted else None

    grads = Gradients(
        heads_last(q), heads_last(k), heads_last(v),
        like(bias.table, learned), like(bias.k_level), like(bias.key_vectors), like(bias.value_vectors),
    )  # fmt: skip
    # A query that sees nothing has weights exp2(-inf - 0) = 0.
    lse = lse.masked_fill(lse == -math.inf, 0.0) * LOG2E
    delta = (grad.to(wide) * out.to(wide)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    bias = bias.pruned(q, k, v, scale)
    bias = replace(bias, table=bias.table * LOG2E)
    tile = 64 if min(max(queries, keys), band.width) <= 256 else 128
    step = max(1, TILE_ELEMENTS // (heads * min(tile, queries) * min(tile, keys)))
    for n in range(0, batch, step):
        some = slice(n, n + step)
        rows = Rows(
            grad=_wide(grad[some].flip(2), wide),
            q=_wide(q[some].flip(2), wide),
            k=_wide(repeated(k[some], heads // groups), wide),
            v=_wide(repeated(v[some], heads // groups), wide),
            minus_delta=-delta[some].flip(2).flatten(0, 1)[..., None],
            minus_lse=-lse[some].flip(2).flatten(0, 1)[..., None],
            q_level=None if bias.q_level is None else bias.q_level[some].flip(2).flatten(0, 1)[..., None],
            k_level=None if bias.k_level is None else bias.k_level[some].flatten(0, 1)[:, None],
        )
        of_rows = grads._replace(
            q=grads.q[some],
            k=grads.k[some],
            v=grads.v[some],
            k_level=None if grads.k_level is None else grads.k_level[some],
        )
        by_tiles(rows, bias, scale, tile, of_rows)
    return grads


def repeated(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, 1)


def _wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).flatten(0, 1)


class Rows(NamedTuple):
    """Some rows of the batch, times heads: [n, ...], in the wide dtype, the queries in reverse, base 2."""

    grad: Tensor  # [n, Lq, D]
    q: Tensor  # [n, Lq, D]
    k: Tensor  # [n, Lk, D]
    v: Tensor  # [n, Lk, D]
    minus_delta: Tensor  # [n, Lq, 1], grad . out less the gradient of lse
    minus_lse: Tensor  # [n, Lq, 1]
    q_level: Tensor | None  # [n, Lq, 1]
    k_level: Tensor | None  # [n, 1, Lk]


def by_tiles(rows: Rows, bias: Bias, scale: float, tile: int, grads: Gradients) -> None:
    """Writes the gradients of q, k, v and levels [rows of the batch, heads, L, D], adds to those of table and vectors."""
    grad, q, k, v, minus_delta, minus_lse, q_level, k_level = rows
    (count, queries, dim), keys = q.shape, k.shape[1]
    batch, heads = grads.q.shape[:2]
    key_tiles = [(b, min(b + tile, keys)) for b in range(0, keys, tile)]
    dk_tiles = [k.new_zeros(count, e - b, dim) for b, e in key_tiles]
    dv_tiles = [torch.zeros_like(x) for x in dk_tiles]
    scratch = Scratch(q)
    # A product with denormal numbers takes many times as long, and weights as small as these change no digit.
    smallest = torch.finfo(q.dtype).tiny * 2.0**26
    learns = grads.table is not None or grads.key_vectors is not None
    for i in range(0, queries, tile):
        j = min(i + tile, queries)
        q_i, grad_i, lse_i, delta_i = q[:, i:j], grad[:, i:j], minus_lse[:, i:j], minus_delta[:, i:j]
        dq_i = q.new_zeros(count, j - i, dim)
        start, stop = bias.keys_that_count(i, j)
        far, near = bias.quiet_keys(i, j)
        level = None
        if q_level is not None:
            level = q_level[:, (i + j) // 2, None]
            lse_i = lse_i + ((q_level[:, i:j] - level) * LOG2E).to(lse_i.dtype)
        for t in range(start // tile, -(-stop // tile)):
            b, e = key_tiles[t]
            is_far = far <= b and e <= near
            shape, uprights = (j - i, e - b), not is_far and learns
            p, dp = scratch.tile("p", *shape), scratch.tile("dp", *shape)
            falls = None
            if level is not None and k_level is not None:
                falls = ((level - k_level[:, :, b:e]) * LOG2E).to(p.dtype)
            # the weights
            if is_far:
                p.copy_(lse_i) if falls is None else torch.add(lse_i, falls, out=p)
            else:
                if bias.key_vectors is None:
                    at = p.view(batch, heads, *p.shape[1:])
                    torch.add(hankel(bias.table, i, j, b, e), lse_i.view(batch, heads, -1, 1), out=at)
                else:
                    upright = scratch.upright("bias", *shape)
                    bias.upright(q_i, i, j, b, e, scale * LOG2E, upright)
                    torch.add(skewed(upright, e - b), lse_i, out=p)
                if falls is not None:
                    p.add_(falls)
            p.baddbmm_(q_i, k[:, b:e].mT, alpha=scale * LOG2E).exp2_()
            torch.threshold_(p, smallest, 0.0)
            # the gradient of the weights, then of the scores
            dp.copy_(delta_i).baddbmm_(grad_i, v[:, b:e].mT)
            if bias.value_vectors is not None and grads.value_vectors is not None and not is_far:
                weights = scratch.upright("weights", *shape)
                skewed(weights, e - b).copy_(p)
                own, columns = bias.of_diagonals(bias.value_vectors, i + b, weights.shape[2], count)
                met = scratch.upright("met", *shape)
                met[..., : columns.start] = met[..., columns.stop :] = 0.0
                torch.bmm(grad_i, own.mT, out=met[..., columns])
                dp.add_(skewed(met, e - b))
                bias.add(grads.value_vectors, i + b + columns.start, weights[..., columns].mT @ grad_i)
            scores = skewed(scratch.upright("scores", *shape), e - b) if uprights else dp
            ds = torch.mul(p, dp, out=scores)
            dv_tiles[t].baddbmm_(p.mT, grad_i)
            dk_tiles[t].baddbmm_(ds.mT, q_i)
            dq_i.baddbmm_(ds, k[:, b:e])
            if grads.k_level is not None:
                grads.k_level[:, :, b:e] -= ds.sum(1).view(batch, heads, -1)
            if uprights:
                upright = scratch.upright("scores", *shape)
                if grads.table is not None:
                    sums = upright.new_ones(1, 1, j - i).expand(count, -1, -1) @ upright
                    grads.table[:, i + b : j + e - 1] += sums.view(batch, heads, -1).sum(0)
                if bias.key_vectors is not None and grads.key_vectors is not None:
                    own, columns = bias.of_diagonals(bias.key_vectors, i + b, upright.shape[2], count)
                    dq_i.baddbmm_(upright[..., columns], own)
                    bias.add(grads.key_vectors, i + b + columns.start, (upright[..., columns].mT @ q_i).mul_(scale))
        torch.mul(dq_i.view(batch, heads, j - i, dim).flip(2), scale, out=grads.q[:, :, queries - j : queries - i])
    for (b, e), dk_t, dv_t in zip(key_tiles, dk_tiles, dv_tiles, strict=True):
        grouped = batch, grads.k.shape[1], heads // grads.k.shape[1], e - b, dim
        grads.k[:, :, b:e] = dk_t.view(grouped).sum(2) * scale
        grads.v[:, :, b:e] = dv_t.view(grouped).sum(2)


class Scratch:
    """Buffers for one tile, made once per shape and name; like: [n, ...]."""

    def __init__(self, like: Tensor):
        self.like, self.held = like, {}

    def tile(self, name: str, rows: int, cols: int) -> Tensor:
        """[n, rows, cols], uninitialised."""
        if (name, rows, cols) not in self.held:
            self.held[name, rows, cols] = self.like.new_empty(self.like.shape[0], rows, cols)
        return self.held[name, rows, cols]

    def upright(self, name: str, rows: int, cols: int) -> Tensor:
        """[n, rows, rows + cols - 1], a column per diagonal; zeros at first, and those stay that `skewed` never writes."""
        if (name, rows, -cols) not in self.held:
            self.held[name, rows, -cols] = self.like.new_zeros(self.like.shape[0], rows, rows + cols - 1)
        return self.held[name, rows, -cols]
