"""Attention under reflections on the CPU: each pair of neighbouring blocks of tokens is a call of attention without bias.

A query i of the right block and a key j of the left one meet at the tokens' edge between them:

    q_i . H_i ... H_(j+1) k_j = (q_i carried back to the edge) . (k_j carried on to the edge).

The two blocks are therefore attention without a mask, which the kernel of `table` computes. Blocks grow by doubling. After
each size, queries of the right block are carried over the left block, and keys of the left block over the right one. Both are
then at the edges of a block twice as long. A token needs log2(L / chunk) products with a matrix [D, D], instead of one for each
earlier chunk. The scores of pairs within a first block are computed by `backend`.

Shapes: q, ends, v, out, lse, level begin with [N, L], N sequences and heads; L is a multiple of the first block, C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends.operators import Gradients, Inputs
from longitude.attention.backends.table import band
from longitude.attention.backends.transport.backend import Cut, Part

LOG2E = math.log2(math.e)


def neighbours(x: Tensor, size: int, whole: int) -> list[tuple[Tensor, Tensor]]:
    """Left and right blocks [N, n, size, ...] of x [N, L, ...]: `whole` pairs, and a last with a shorter right block."""
    edge = 2 * size * whole
    both = x[:, :edge].unflatten(1, (whole, 2, size))
    blocks = [(both[:, :, 0], both[:, :, 1])]
    if x.shape[1] > edge + size:
        blocks.append((x[:, None, edge : edge + size], x[:, None, edge + size :]))
    return blocks


def reflections(over: Tensor, whole: int) -> list[tuple[Tensor, Tensor]]:
    """Products of reflections of the left and the right blocks, each [N, n, D, D]."""
    return [(left[:, :, 0], right[:, :, 0]) for left, right in neighbours(over, 1, whole)]


def carry(size: int, q: Tensor, ends: Tensor, over: Tensor) -> None:
    """Carry queries over the block before and keys over the block after, in place."""
    whole = q.shape[1] // (2 * size)
    blocks = (neighbours(x, size, whole) for x in (q, ends))
    for (before, behind), (_, rows), (keys, _) in zip(reflections(over, whole), *blocks, strict=True):
        rows -= rows @ before
        keys -= keys @ behind.mT


def uncarry(size: int, q: Tensor, ends: Tensor, over: Tensor, of_q: Tensor, of_ends: Tensor, of_over: Tensor) -> None:
    """Gradients of the inputs of `carry`, in place; gradients of reflections are accumulated."""
    whole = q.shape[1] // (2 * size)
    matrices = (reflections(x, whole) for x in (over, of_over))
    blocks = (neighbours(x, size, whole) for x in (q, ends, of_q, of_ends))
    for (before, behind), (of_before, of_behind), (_, rows), (keys, _), (_, of_rows), (of_keys, _) in zip(
        *matrices, *blocks, strict=True
    ):
        of_before -= rows.mT @ of_rows
        of_rows -= of_rows @ before.mT
        of_behind -= of_keys.mT @ keys
        of_keys -= of_keys @ behind


def doubled(over: Tensor) -> Tensor:
    """Combine matrices X [N, n, D, D] of neighbouring blocks: a query carried over both is multiplied by I - X."""
    even = over.shape[1] // 2 * 2
    before, behind = over[:, :even:2], over[:, 1::2]
    both = before + behind - behind @ before
    return torch.cat([both, over[:, even:]], 1)


def of_doubled(over: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the input of `doubled`."""
    even = over.shape[1] // 2 * 2
    before, behind, of_over = over[:, :even:2], over[:, 1::2], torch.empty_like(over)
    of_both = grad[:, : even // 2]
    torch.sub(of_both, behind.mT @ of_both, out=of_over[:, :even:2])
    torch.sub(of_both, of_both @ before.mT, out=of_over[:, 1::2])
    of_over[:, even:] = grad[:, even // 2 :]
    return of_over


def part_backward(x: Inputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Gradients of the tensors of x.

    out [B, H, Lq, D] and lse [B, H, Lq] are the result over all keys, of which x has a part; grad: gradient of out.
    """
    top = (lse * LOG2E).masked_fill(lse == -math.inf, math.inf)  # as band.c keeps a query without keys
    return band.backward(x, grad, None, out, torch.stack([top, torch.zeros_like(top)]), learned=False)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge a second attention output and logsumexp into the first, in place, as `merge_attention` does."""
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(more, (more_lse - both).exp_()[..., None])
    lse.copy_(both)


def first_scores(cut: Cut, within: Tensor, level: Tensor | None) -> Tensor:
    """Scores within the first blocks [N, n, C, C], with levels added and masks applied."""
    scores, chunk = within.clone(), cut.chunk
    if level is not None:
        of_rows = level[:, cut.first :].unflatten(1, (-1, chunk))
        scores += (of_rows[..., None] - of_rows[:, :, None]).to(scores.dtype)
    if cut.high is not None and cut.high < chunk:
        order = torch.arange(chunk, device=within.device)
        scores.masked_fill_(order[:, None] - order > cut.high, -math.inf)
    if cut.visible < cut.padded:
        order = torch.arange(cut.tokens, device=within.device).view(-1, 1, chunk)
        scores.masked_fill_((order >= cut.visible) & (order < cut.padded), -math.inf)
    return scores


class ByHalves(torch.autograd.Function):
    """Output [N, L, Dv] of queries at the start of their first block and keys at its end; `by_formula` computes the same.

    Backward carries queries and keys to each size again, the largest first: nothing is kept for each size.
    """

    @staticmethod
    def forward(ctx: Any, cut: Cut, formula: Callable[..., Tensor], *inputs: Any) -> Tensor:
        q, within, ends, over, past, v, level = inputs
        values = v[:, cut.first :]
        scores = first_scores(cut, within, level)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()
        out, lse = (weights @ values.unflatten(1, (-1, cut.chunk))).flatten(1, 2), lse.flatten(1)
        del scores, weights
        rows_level = None if level is None else level[:, cut.first :]
        if cut.sizes:
            q, ends = q.clone(), ends.clone()
        for size in cut.sizes:
            for part in cut.parts(size):
                more, more_lse, _ = band.forward(part.inputs(q, ends, values, rows_level, rows_level, cut.high))
                merge(part.rows(out), part.rows(lse), more, more_lse)
            if cut.carries(size):
                carry(size, q, ends, over)
                over = doubled(over)
        if cut.has_past:
            part = cut.past()
            more, more_lse, _ = band.forward(part.inputs(q, past, v, rows_level, level, cut.high))
            merge(part.rows(out), part.rows(lse), more, more_lse)
        out.masked_fill_((lse == -math.inf)[..., None], math.nan)  # each query has a key, and all its scores are -inf
        ctx.cut, ctx.formula = cut, formula
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # noqa: C901  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, out, lse = ctx.saved_tensors
        cut: Cut = ctx.cut
        if torch.is_grad_enabled():  # for second derivatives
            wanted = [x for x in inputs if x is not None and x.requires_grad]
            again = ctx.formula(cut, *inputs)  # where nothing is carried, keys' ends and reflections are not used
            grads = iter(torch.autograd.grad(again, wanted, grad, create_graph=True, allow_unused=True))
            return None, None, *(next(grads) if x is not None and x.requires_grad else None for x in inputs)
        q, within, ends, over, past, v, level = inputs
        of_v, of_level = torch.zeros_like(v), None if level is None else torch.zeros_like(level)
        of_past = torch.zeros_like(past)
        values, of_values = v[:, cut.first :], of_v[:, cut.first :]
        rows_level, of_rows_level = (None if x is None else x[:, cut.first :] for x in (level, of_level))

        # the first blocks
        blocks = lambda x: x.unflatten(1, (-1, cut.chunk))  # noqa: E731
        weights = first_scores(cut, within, level)
        weights = weights.sub_(blocks(lse)[..., None]).exp_()
        of_values.copy_((weights.mT @ blocks(grad)).flatten(1, 2))
        delta = (grad * out).sum(-1)
        of_own = (blocks(grad) @ blocks(values).mT).sub_(blocks(delta)[..., None]).mul_(weights)
        del weights
        if of_rows_level is not None:
            of_rows_level += (of_own.sum(3) - of_own.sum(2)).flatten(1)

        # every size, the largest first
        overs = [over]
        for size in cut.sizes:
            overs.append(doubled(overs[-1]) if cut.carries(size) else overs[-1])
        of_q, of_ends = torch.zeros_like(q), torch.zeros_like(ends)
        of_over = torch.zeros_like(overs[-1])

        def at(count: int) -> tuple[Tensor, Tensor]:
            """Queries and keys carried over the first `count` sizes."""
            rows, keys = q.clone(), ends.clone()
            for size, over in zip(cut.sizes[:count], overs, strict=False):
                if cut.carries(size):
                    carry(size, rows, keys, over)
            return rows, keys

        def add(part: Part, x: Inputs, of_k: Tensor, of_v: Tensor, of_key_level: Tensor | None) -> None:
            grads = part_backward(x, part.rows(grad), part.rows(out), part.rows(lse))
            part.rows(of_q).add_(grads.q)
            part.keys(of_k).add_(grads.k)
            part.keys(of_v).add_(grads.v)
            of_query_levels, of_key_levels = grads.terms.q_level, grads.terms.k_level
            if of_rows_level is not None and of_key_level is not None:
                assert of_query_levels is not None and of_key_levels is not None
                part.rows(of_rows_level).add_(of_query_levels)
                part.keys(of_key_level).add_(of_key_levels)

        if cut.has_past:
            part = cut.past()
            rows, _ = at(len(cut.sizes))
            add(part, part.inputs(rows, past, v, rows_level, level, cut.high), of_past, of_v, of_level)
        for n, size in reversed([*enumerate(cut.sizes)]):
            rows, keys = at(n)
            if cut.carries(size):
                of_over = of_doubled(overs[n], of_over)
                uncarry(size, rows, keys, overs[n], of_q, of_ends, of_over)
            for part in cut.parts(size):
                add(
                    part,
                    part.inputs(rows, keys, values, rows_level, rows_level, cut.high),
                    of_ends,
                    of_values,
                    of_rows_level,
                )
        return None, None, of_q, of_own, of_ends, of_over, of_past, of_v, of_level
