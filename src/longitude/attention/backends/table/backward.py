"""Backward: tile by tile; a tile of weights is built once and serves every gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.attention.backends.table.band import Inputs, Tile, heads_last
from longitude.attention.backends.table.bias import LOG2E, Bias, Bound
from longitude.attention.backends.table.tiles import Tiles, batch_steps, folded, reversed_rows, skewed


class Gradients(NamedTuple):
    """Gradients of the tensors of the same names in `Inputs`; None if no gradient is needed."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    q_level: Tensor | None
    k_level: Tensor | None
    key_vectors: Tensor | None
    value_vectors: Tensor | None

    def of_rows(self, some: slice) -> Gradients:
        """Select rows of the batch; gradients of tables and vectors are shared by all rows."""
        q_level, k_level = (None if x is None else x[some] for x in (self.q_level, self.k_level))
        return self._replace(q=self.q[some], k=self.k[some], v=self.v[some], q_level=q_level, k_level=k_level)


def backward(x: Inputs, grad: Tensor, minus_delta: Tensor, lse: Tensor, learned: bool) -> Gradients:
    """All in plain order, [B, H, L, ...]; minus_delta [B, H, Lq] is -(grad . out) plus the gradient of lse."""
    bias = Bias.of(x)

    def like(x: Tensor | None, wanted: bool = True) -> Tensor | None:
        return torch.zeros_like(x) if x is not None and wanted else None

    grads = Gradients(*map(heads_last, x[:3]), like(bias.table, learned), *map(like, x[4:8]))  # pyright: ignore[reportCallIssue]
    if len(range(*bias.band.live_rows())) == 0:
        return Gradients(*(None if x is None else x.zero_() for x in grads))  # type: ignore[arg-type]
    # A query without keys has weights exp2(-inf - 0) = 0.
    minus_lse = -lse.masked_fill(lse == -math.inf, 0.0) * LOG2E
    bound = Bound.of(bias, x)
    bias = bound.pruned(bias, x.v, grad, minus_delta[..., None]).in_base_2()
    shape = rows, cols = tile_shape(bias, learned)
    (batch, heads), queries, keys = x.q.shape[:2], x.q.shape[2], x.k.shape[2]
    for some in batch_steps(batch, heads, min(rows, queries), min(cols, keys)):
        tiles = Tiles(x, bias, some)
        of_rows, delta, shift = (tiles.flat(t) for t in (grad, minus_delta[..., None], minus_lse[..., None]))
        by_tiles(tiles, bound, of_rows, delta, shift, shape, grads.of_rows(some))
    return grads


def tile_shape(bias: Bias, learned: bool) -> tuple[int, int]:
    """Rows and keys of a tile, measured: small where the band is narrow.

    Wide where a tile of vectors has a column for each of rows + keys diagonals.
    """
    if min(max(bias.band.queries, bias.band.keys), bias.band.width) <= 256:
        return 64, 64
    return (128, 256) if bias.near == 0 and (learned or bias.key_vectors is not None) else (128, 128)


def by_tiles(
    tiles: Tiles,
    bound: Bound,
    grad: Tensor,
    minus_delta: Tensor,
    minus_lse: Tensor,
    shape: tuple[int, int],
    grads: Gradients,
) -> None:
    """Writes the gradients of q, k, v and levels of these rows of the batch, adds to those of table and vectors.

    grad [n, Lq, Dv], minus_delta and minus_lse [n, Lq, 1], the latter in base 2.
    """
    bias, groups, k, v = tiles.bias, tiles.groups, tiles.k, tiles.v
    (count, queries, dim), (shared, keys, _), (batch, heads) = tiles.q.shape, k.shape, grads.q.shape[:2]
    tall, wide = shape
    cuts = [(b, min(b + wide, keys)) for b in range(0, keys, wide)]
    dk_tiles = [k.new_zeros(shared, e - b, dim) for b, e in cuts]
    dv_tiles = [v.new_zeros(shared, e - b, v.shape[2]) for b, e in cuts]
    learns = grads.table is not None or grads.key_vectors is not None
    for i in range(0, queries, tall):
        j = min(i + tall, queries)
        rows, there = j - i, slice(queries - j, queries - i)
        q_i, grad_i, delta_i, lse_i = (reversed_rows(x, i, j) for x in (tiles.q, grad, minus_delta, minus_lse))
        q_groups, grad_groups = folded(q_i, groups), folded(grad_i, groups)
        dq_i = q_i.new_zeros(shared, groups * rows, dim)
        start, stop = bias.keys_that_count(i, j)
        for t in range(start // wide, -(-stop // wide)):
            b, e = cuts[t]
            tile = Tile(i, j, b, e)
            unbiased, h = bias.is_unbiased(tile), tiles.first_head(tile)
            g = h // groups
            weights = tiles.scores(q_i, tile, lse_i, h)
            if bound.may_underflow:
                torch.threshold_(weights, bound.lowest, -math.inf)
            if bound.coarse_rounding:
                weights.clamp_(max=0.0)
            weights.exp2_()
            # the gradient of the weights, then of the scores
            ds = tiles.buffer("gradient", rows, e - b)[h:]
            ds.copy_(delta_i[h:]).view(shared - g, groups * rows, -1).baddbmm_(grad_groups[g:], v[g:, b:e].mT)
            if bias.value_vectors is not None and grads.value_vectors is not None and not unbiased:
                by_diagonal = tiles.by_diagonal("weights", rows, e - b)
                skewed(by_diagonal, e - b).copy_(weights)
                own, columns = bias.of_diagonals(bias.value_vectors, i + b, by_diagonal.shape[2], count)
                products = tiles.by_diagonal("products", rows, e - b)
                products[..., : columns.start] = products[..., columns.stop :] = 0.0
                torch.bmm(grad_i, own.mT, out=products[..., columns])
                ds.add_(skewed(products, e - b))
                bias.add_gradient(grads.value_vectors, i + b + columns.start, by_diagonal[..., columns].mT @ grad_i)
            reads = learns and not unbiased
            by_diagonal = tiles.by_diagonal("scores", rows, e - b)[h:] if reads else ds
            ds = torch.mul(ds, weights, out=skewed(by_diagonal, e - b) if reads else ds)
            weights_groups, ds_groups = folded(weights, groups), folded(ds, groups)
            dv_tiles[t][g:].baddbmm_(weights_groups.mT, grad_groups[g:])
            dk_tiles[t][g:].baddbmm_(ds_groups.mT, q_groups[g:])
            dq_i[g:].baddbmm_(ds_groups, k[g:, b:e])
            if grads.q_level is not None and grads.k_level is not None:
                # Rows sum to the gradient of lse; summed as they are, their rounding cancels that of the columns.
                grads.q_level[:, :, there] += ds.sum(2).view(batch, heads, -1).flip(2)
                grads.k_level[:, :, b:e] -= ds.sum(1).view(batch, heads, -1)
            if reads and grads.table is not None:
                sums = by_diagonal.new_ones(1, 1, rows).expand(count - h, -1, -1) @ by_diagonal
                grads.table[h:, i + b : j + e - 1] += sums.view(batch, heads - h, -1).sum(0)
            if reads and bias.key_vectors is not None and grads.key_vectors is not None:
                own, columns = bias.of_diagonals(bias.key_vectors, i + b, by_diagonal.shape[2], count)
                dq_i.view(count, rows, dim).baddbmm_(by_diagonal[..., columns], own)
                of_vectors = (by_diagonal[..., columns].mT @ q_i).mul_(tiles.scale)
                bias.add_gradient(grads.key_vectors, i + b + columns.start, of_vectors)
        torch.mul(dq_i.view(batch, heads, rows, dim).flip(2), tiles.scale, out=grads.q[:, :, there])
    for (b, e), dk_t, dv_t in zip(cuts, dk_tiles, dv_tiles, strict=True):
        torch.mul(dk_t.view(batch, -1, e - b, dim), tiles.scale, out=grads.k[:, :, b:e])
        grads.v[:, :, b:e] = dv_t.view(batch, -1, *dv_t.shape[1:])
