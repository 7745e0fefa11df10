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
    over one (Hillis and Steele 1986), for devices on which starting a round takes longer than its arithmetic.
    """
    return _doubling(a, b, h) if doubling or needs_formula(a, b, h) else _Loop.apply(a, b, h)


def _doubling(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    b = torch.cat([b[:1] + a[:1] * h, b[1:]])
    step = 1
    while step < len(b):
        b = torch.cat([b[:step], b[step:] + a[step:] * b[:-step]])
        a = torch.cat([a[:step], a[step:] * a[:-step]])
        step *= 2
    return b


class _Loop(torch.autograd.Function):
    """Scan with a multiplication and addition per token, forward and backward, in place, without an autograd graph of each."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        out = torch.empty_like(b)
        before = h
        for a_t, b_t, out_t in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
            before = torch.addcmul(b_t, a_t, before, out=out_t)
        ctx.save_for_backward(a, h, out)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """g_t = grad_t + a_{t+1} g_{t+1};  da_t = g_t h_{t-1},  db_t = g_t."""
        (grad,) = grads
        a, h, out = ctx.saved_tensors
        g = torch.empty_like(out)
        g[-1] = grad[-1]
        after = g[-1]
        decays = (a.conj().resolve_conj() if a.is_complex() else a).unbind()
        for t in range(len(g) - 2, -1, -1):
            after = torch.addcmul(grad[t], decays[t + 1], after, out=g[t])
        da = g * torch.cat([h.expand_as(out[0])[None], out[:-1]]).conj()
        return da.sum_to_size(a.shape), g, (decays[0] * g[0]).sum_to_size(h.shape)
