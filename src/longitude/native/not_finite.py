"""The rule: NaN or infinity in one document, or at padding, reaches no output and no gradient of another document's tokens.

It is true in every mixer, mode and attention backend, in C and in torch. A mask or a border hides a number by a weight of 0, and
0 * NaN is NaN, forward and backward. Tokens with such a number therefore count as zeros, and results that depend on them are
set to NaN. `nan_in_its_document` does it around recurrences, `attention.not_finite.nan_where_attended` around backends; every
mixer sets padding to zeros. Calls without documents, padding or a mask of pairs skip all of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.native.derivatives import constant_in_graphs, in_forward_mode, recorded, transforms_active
from longitude.native.tensors import in_memory

Outs = TypeVar("Outs", bound=tuple[Tensor | None, ...])
Back = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, list[Tensor]]]


def all_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are known to be finite, by one pass over each; False, too, if C may not read them."""
    return in_memory(*tensors) and all(bool(x.detach().sum().isfinite()) for x in tensors)


def not_finite(tensors: Sequence[Tensor], axis: int) -> Bool[Tensor, "B L"]:
    """Tokens [B, L] with a number that is not finite in any of these tensors; axis 0 is the batch, `axis` the tokens."""
    every = [x.isfinite().transpose(1, axis).flatten(2).all(-1) if x.dim() > 2 else x.isfinite() for x in tensors]
    return ~torch.stack(every).all(0)


def lost_after(bad: Bool[Tensor, "B L"], documents: Int[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """Tokens [B, L] that are bad, or come after a bad token of their document; documents must be contiguous."""
    order = torch.arange(bad.shape[1], device=bad.device)
    latest = torch.where(bad, order, -1).cummax(1).values
    return (latest >= 0) & (documents.gather(1, latest.clamp(min=0)) == documents)


def of_tokens(flags: Bool[Tensor, "B L"], x: Tensor, axis: int) -> Bool[Tensor, ...]:
    """Reshape flags [B, L] to broadcast to x; axis 0 of x is the batch, `axis` the tokens."""
    shape = [1] * x.dim()
    shape[0], shape[axis] = flags.shape
    return flags.view(shape)


def filled(x: Tensor, flags: Bool[Tensor, "B L"], axis: int, value: float) -> Tensor:
    """The tensor with this value for these tokens. By `where`: a compiler is wrong about the strides of masked_fill."""
    return torch.where(of_tokens(flags, x, axis), value, x)


def nan_in_its_document(
    axis: int,
    tokens: Sequence[Tensor],
    states: Sequence[Tensor],
    reset: Bool[Tensor, "B L"] | None,
    valid: Bool[Tensor, "B L"] | None,
) -> tuple[list[Tensor], list[Tensor], Back]:
    """Finite tokens and states for a recurrence, and a function that sets NaN in results that depend on NaN or infinity.

    axis: axis of the tokens in all tensors and outputs; the batch is axis 0. A token that is not finite counts as zeros. Its
    output, later outputs of its document, and the state after them become NaN. Padding counts as zeros, and its outputs are
    zeros.
    """
    tokens, states = [*tokens], [*states]
    if valid is not None:
        tokens = [x.where(of_tokens(valid, x, axis), 0) for x in tokens]
    like, lost = tokens[0], None
    if reset is not None and not all_finite(*tokens, *states):
        bad = not_finite(tokens, axis)
        before = torch.zeros_like(bad[:, 0])
        for x in states:
            before = before | ~x.isfinite().flatten(1).all(1)
        lost = lost_after(torch.cat([before[:, None], bad], 1), F.pad(reset.cumsum(1), (1, 0)))[:, 1:]
        tokens = [filled(x, bad, axis, 0) for x in tokens]
        states = [torch.where(before.view(-1, *[1] * (x.dim() - 1)), 0, x) for x in states]

    def back(out: Tensor, after: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if reset is not None:  # else there is one document, in which NaN spreads by itself
            [out] = gradients_apart((out,), like, axis)
        if lost is not None:
            last = lost[:, -1]
            after = [torch.where(last.view(-1, *[1] * (x.dim() - 1)), math.nan, x) for x in after]  # some are complex
            out = filled(out, lost, axis, math.nan)
        return out if valid is None else out.where(of_tokens(valid, out, axis), 0), [*after]

    return tokens, states, back


def gradients_apart(outs: Outs, like: Tensor, axis: int) -> Outs:
    """Return the tensors unchanged; in backward, a token's gradient that is not finite is removed and set to NaN in `like`.

    It then reaches only that token, and no other token through a product with 0. axis: axis of the tokens in all tensors. It
    does nothing in forward mode, for which custom gradients have no rule, or in a graph for torch.func.
    """
    tensors = [x for x in outs if x is not None]
    if not recorded(*tensors) or in_forward_mode() or (torch.compiler.is_compiling() and not _traceable()):
        return outs
    kept = iter(_GradientsApart.apply(axis, like, *tensors))
    return tuple(None if x is None else next(kept) for x in outs)  # type: ignore[return-value]


@constant_in_graphs
def _traceable() -> bool:
    """Whether a tracing compiler supports the custom gradient function: not under torch.func."""
    # torch's own tracing gives this warning; if warnings are errors, it would stop the compiler.
    warnings.filterwarnings("ignore", ".*Function'> should not be instantiated", DeprecationWarning)
    return not transforms_active()


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
        gradients = [g for g in grads if g is not None]
        if not gradients or all_finite(*gradients):
            return None, None, *grads
        bad = not_finite(gradients, ctx.axis)
        into_like = gradients[0].new_zeros(ctx.shape)
        into_like = filled(into_like, bad, ctx.axis, math.nan)
        return None, into_like, *(None if g is None else filled(g, bad, ctx.axis, 0.0) for g in grads)
