"""The elementwise recurrence h_t = a_t h_{t-1} + b_t, and loops over chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from jaxtyping import Num
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longitude.native.derivatives import in_forward_mode
from longitude.native.tensors import needs_operator


# ---- gradients that raise if they are differentiated -------------------------------------------------------------------
def needs_formula(*tensors: Tensor) -> bool:
    """Whether torch must see every operator: in graphs, in transforms, and for forward-mode derivatives."""
    return needs_operator(*tensors) or in_forward_mode()


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass so that its gradients can be used in computations, but raise if they are differentiated.

    torch's once_differentiable attaches its error to new tensors, so another path to the same leaf hides it. The second
    derivative of beta * k, for example, would silently be that of the product only, which is wrong.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return gradients
        leads_to = [x for x in (*ctx.saved_tensors, *grads) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(_Once.apply(x, *leads_to) if isinstance(x, Tensor) and leads_to else x for x in gradients)

    return wrapped


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *leads_to: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "loops over tokens have no derivatives of second order: expected gradients once, got gradients of gradients; "
            'mode="recurrent" or "parallel" has them'
        )


# ---- scans -----------------------------------------------------------------------------------------------------------
def chunk_slices(length: int, size: int) -> list[tuple[slice, int]]:
    """The tokens of all whole chunks, and those of the shorter last one, each with the size of a chunk."""
    whole = length // size * size
    return [(slice(a, b), n) for a, b, n in ((0, whole, size), (whole, length, length - whole)) if a < b]


def scan_chunks(
    chunk: Callable[..., tuple[Tensor, Tensor]], size: int, h: Tensor, *tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run chunk(h, *tokens) -> (y, h) over `size` tokens (dimension 0) at a time; backward computes each chunk again."""
    length, out = max(len(x) for x in tokens if x is not None), []
    again = torch.is_grad_enabled() and size < length and not needs_formula(h)
    for start in range(0, length, size):
        here = (None if x is None else x[start : start + size] for x in tokens)
        if again:
            y, h = checkpoint(chunk, h, *here, use_reentrant=False, preserve_rng_state=False)
        else:
            y, h = chunk(h, *here)
        out.append(y)
    return torch.cat(out), h


def linear_scan(
    a: Num[Tensor, "L ..."], b: Num[Tensor, "L ..."], h: Num[Tensor, " ..."], doubling: bool = False
) -> Num[Tensor, "L ..."]:
    """h_t = a_t h_{t-1} + b_t for t = 0 .. L-1, h the state before. Shapes after L broadcast to b's.

    No decay is divided by another, so strong ones do not overflow. doubling: in log2(L) rounds over all tokens instead of L
    over one (Hillis and Steele 1986), as in graphs and on GPUs, where starting a round takes longer than its arithmetic.
    """
    if not (doubling or not b.is_cpu or needs_formula(a, b, h)):
        states = []
        for a_t, b_t in zip(a, b, strict=True):
            h = torch.addcmul(b_t, a_t, h)
            states.append(h)
        return torch.stack(states)
    b = torch.cat([b[:1] + a[:1] * h, b[1:]])
    step = 1
    while step < len(b):
        b = torch.cat([b[:step], b[step:] + a[step:] * b[:-step]])
        a = torch.cat([a[:step], a[step:] * a[:-step]])
        step *= 2
    return b
