"""NaN and infinities stay in their document: what may not reach other tokens is taken out, and put back where it belongs.

A mask or a border hides a number by a weight of 0, and 0 * NaN is NaN, forward and backward. So tokens that hold such a number
count as zeros, and what depends on them is NaN by decision instead of by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.c_compile import in_memory
from longitude.derivatives import constant_in_graphs, in_forward_mode, transforms_active

Outs = TypeVar("Outs", bound=tuple[Tensor | None, ...])


def all_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are known to be finite, by one pass over each; False too where they cannot be looked at for free."""
    return in_memory(*tensors) and all(bool(x.detach().sum().isfinite()) for x in tensors)


def not_finite(tensors: Sequence[Tensor], axis: int) -> Bool[Tensor, "B L"]:
    """Which tokens hold a number that is not finite in any of these, whose first axis is the batch and `axis` the tokens."""
    every = [x.isfinite().transpose(1, axis).flatten(2).all(-1) if x.dim() > 2 else x.isfinite() for x in tensors]
    return ~torch.stack(every).all(0)


def lost_after(bad: Bool[Tensor, "B L"], documents: Int[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """Which tokens are bad, or behind a bad one of their document, whose tokens are side by side."""
    order = torch.arange(bad.shape[1], device=bad.device)
    latest = torch.where(bad, order, -1).cummax(1).values
    return (latest >= 0) & (documents.gather(1, latest.clamp(min=0)) == documents)


def of_tokens(flags: Bool[Tensor, "B L"], x: Tensor, axis: int) -> Bool[Tensor, ...]:
    """The flags as they broadcast to x, whose first axis is the batch and `axis` the tokens."""
    shape = [1] * x.dim()
    shape[0], shape[axis] = flags.shape
    return flags.view(shape)


def gradients_apart(outs: Outs, like: Tensor, axis: int) -> Outs:
    """The same tensors. In backward a token whose gradient is not finite has none in them, and NaN as that of `like`.

    So it reaches the token itself, and no other by a product with 0. axis: of the tokens, in all of these. Not in forward mode,
    for which a function that brings gradients has no rule, nor in a graph for torch.func.
    """
    given = [x for x in outs if x is not None]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if not wanted or in_forward_mode() or (torch.compiler.is_compiling() and transforms_traced()):
        return outs
    kept = iter(_GradientsApart.apply(axis, like, *given))
    return tuple(None if x is None else next(kept) for x in outs)  # type: ignore[return-value]


@constant_in_graphs
def transforms_traced() -> bool:
    """`transforms_active`, for a compiler that traces."""
    return transforms_active()


class _GradientsApart(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(axis: int, like: Tensor, *outs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in outs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.axis, ctx.shape = inputs[0], inputs[1].shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [g for g in grads if g is not None]
        if not given or all_finite(*given):
            return None, None, *grads
        bad = not_finite(given, ctx.axis)
        own = given[0].new_zeros(ctx.shape)
        own = own.masked_fill(of_tokens(bad, own, ctx.axis), math.nan)
        return None, own, *(None if g is None else g.masked_fill(of_tokens(bad, g, ctx.axis), 0.0) for g in grads)
