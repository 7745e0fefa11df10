"""Backward: tile by tile; a tile of weights is built once and serves every gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

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


class Gradients(NamedTuple):
    """Of the tensors of the same names; None where nobody wants it."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    q_level: Tensor | None
    k_level: Tensor | None
    key_vectors: Tensor | None
    value_vectors: Tensor | None

    def of_rows(self, some: slice) -> Gradients:
        """For these rows of the batch; tables and vectors serve all."""
        q_level, k_level = (None if x is None else x[some] for x in (self.q_level, self.k_level))
        return self._replace(q=self.q[some], k=self.k[some], v=self.v[some], q_level=q_level, k_level=k_level)


def backward(
    grad: Tensor,
    minus_delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    bias: Bias,
    scale: float,
    learned: bool,
) -> Gradients:
    """All in plain order, [B, H, L, ...]; minus_delta [B, H, Lq] is -(grad . out) and what comes through lse."""
    batch, heads, queries, _ = q.shape
    wide = bias.table.dtype

    def like(x: Tensor | None, wanted: bool = True) -> Tensor | None:
        return torch.zeros_like(x) if x is not None and wanted else None

    grads = Gradients(
        heads_last(q), heads_last(k), heads_last(v),
        like(bias.table, learned), like(bias.q_level), like(bias.k_level), like(bias.key_vectors), like(bias.value_vectors),
    )  # fmt: skip
    if len(range(*bias.band.live_rows())) == 0:
        return Gradients(*(None if x is None else x.zero_() for x in grads))  # type: ignore[arg-type]
    # A query that sees nothing has weights exp2(-inf - 0) = 0.
    minus_lse = -lse.masked_fill(lse == -math.inf, 0.0) * LOG2E
    bound = Bound.of(bias, q, k, v, scale)
    bias = bound.pruned(bias, v, grad, minus_delta[..., None]).in_base_2(LOG2E)
    shape = tile_shape(bias, learned)
    for some in batch_steps(batch, heads, min(shape[0], queries), min(shape[1], k.shape[2])):
        by_tiles(
            flat(grad, some, wide),
            flat(q, some, wide),
            flat(k, some, wide),
            flat(v, some, wide),
            flat(minus_delta[..., None], some, wide),
            flat(minus_lse[..., None], some, wide),
            bias,
            Levels.of(bias, some),
            scale,
            bound,
            shape,
            grads.of_rows(some),
        )
    return grads


def tile_shape(bias: Bias, learned: bool) -> tuple[int, int]:
    """Rows and keys of a tile, measured: small where the band is narrow, and wide where a tile of vectors has a column for
    each of rows + keys diagonals.
    """
    if min(max(bias.band.queries, bias.band.keys), bias.band.width) <= 256:
        return 64, 64
    return (128, 256) if bias.near == 0 and (learned or bias.key_vectors is not None) else (128, 128)


def by_tiles(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    minus_delta: Tensor,
    minus_lse: Tensor,
    bias: Bias,
    levels: Levels | None,
    scale: float,
    bound: Bound,
    shape: tuple[int, int],
    grads: Gradients,
) -> None:
    """grad, q [n, Lq, D], k, v [n / groups, Lk, D], minus_delta and minus_lse [n, Lq, 1], the latter in base 2. Writes the
    gradients of q, k, v and levels of these rows of the batch, adds to those of table and vectors.
    """
    (count, queries, dim), (shared, keys, _) = q.shape, k.shape
    groups, (batch, heads) = count // shared, grads.q.shape[:2]
    tall, tile = shape
    key_tiles = [(b, min(b + tile, keys)) for b in range(0, keys, tile)]
    dk_tiles = [k.new_zeros(shared, e - b, dim) for b, e in key_tiles]
    dv_tiles = [torch.zeros_like(x) for x in dk_tiles]
    scratch = Scratch(count, q)
    one_row = count == len(bias.starts)  # of the batch: then the first heads are the first of q
    learns = grads.table is not None or grads.key_vectors is not None
    for i in range(0, queries, tall):
        j = min(i + tall, queries)
        rows = j - i
        q_i, grad_i, delta_i, lse_i = (reversed_rows(x, i, j) for x in (q, grad, minus_delta, minus_lse))
        q_groups, grad_groups = folded(q_i, groups), folded(grad_i, groups)
        dq_i = q.new_zeros(shared, groups * rows, dim)
        start, stop = bias.keys_that_count(i, j)
        for t in range(start // tile, -(-stop // tile)):
            b, e = key_tiles[t]
            quiet = bias.is_quiet(i, j, b, e)
            h = bias.first_head(j, e) // groups * groups if one_row else 0
            g = h // groups
            weights = scores(q_i[h:], k[g:], bias, levels, lse_i[h:], scale, i, j, b, e, scratch, h)
            if bound.faint:
                torch.threshold_(weights, bound.faintest, -math.inf)
            if bound.vast:
                weights.clamp_(max=0.0)
            weights.exp2_()
            # the gradient of the weights, then of the scores
            ds = scratch.tile("gradient", rows, e - b)[h:]
            ds.copy_(delta_i[h:]).view(shared - g, groups * rows, -1).baddbmm_(grad_groups[g:], v[g:, b:e].mT)
            if bias.value_vectors is not None and grads.value_vectors is not None and not quiet:
                upright = scratch.upright("weights", rows, e - b)
                skewed(upright, e - b).copy_(weights)
                own, columns = bias.of_diagonals(bias.value_vectors, i + b, upright.shape[2], count)
                met = scratch.upright("met", rows, e - b)
                met[..., : columns.start] = met[..., columns.stop :] = 0.0
                torch.bmm(grad_i, own.mT, out=met[..., columns])
                ds.add_(skewed(met, e - b))
                bias.add(grads.value_vectors, i + b + columns.start, upright[..., columns].mT @ grad_i)
            reads = learns and not quiet
            ds = torch.mul(ds, weights, out=skewed(scratch.upright("scores", rows, e - b), e - b)[h:] if reads else ds)
            weights_groups, ds_groups = folded(weights, groups), folded(ds, groups)
            dv_tiles[t][g:].baddbmm_(weights_groups.mT, grad_groups[g:])
            dk_tiles[t][g:].baddbmm_(ds_groups.mT, q_groups[g:])
            dq_i[g:].baddbmm_(ds_groups, k[g:, b:e])
            if grads.q_level is not None and grads.k_level is not None:
                # Rows sum to the gradient of lse; summed as they are, their rounding meets that of the columns.
                grads.q_level[:, :, queries - j : queries - i] += ds.sum(2).view(batch, heads, -1).flip(2)
                grads.k_level[:, :, b:e] -= ds.sum(1).view(batch, heads, -1)
            if reads:
                upright = scratch.upright("scores", rows, e - b)[h:]
                if grads.table is not None:
                    sums = upright.new_ones(1, 1, rows).expand(count - h, -1, -1) @ upright
                    grads.table[h:, i + b : j + e - 1] += sums.view(batch, heads - h, -1).sum(0)
                if bias.key_vectors is not None and grads.key_vectors is not None:
                    own, columns = bias.of_diagonals(bias.key_vectors, i + b, upright.shape[2], count)
                    dq_i.view(count, rows, dim).baddbmm_(upright[..., columns], own)
                    bias.add(grads.key_vectors, i + b + columns.start, (upright[..., columns].mT @ q_i).mul_(scale))
        of_heads = dq_i.view(batch, heads, rows, dim).flip(2)
        torch.mul(of_heads, scale, out=grads.q[:, :, queries - j : queries - i])
    for (b, e), dk_t, dv_t in zip(key_tiles, dk_tiles, dv_tiles, strict=True):
        torch.mul(dk_t.view(batch, -1, e - b, dim), scale, out=grads.k[:, :, b:e])
        grads.v[:, :, b:e] = dv_t.view(batch, -1, e - b, dim)
