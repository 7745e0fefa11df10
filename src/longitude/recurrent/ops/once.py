"""Gradients that have no gradients themselves, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from longitude import c_compile
from longitude.derivatives import in_forward_mode


def needs_formula(*tensors: Tensor) -> bool:
    """Whether torch must see every operator: in graphs, transforms, and where derivatives are carried forward."""
    return c_compile.needs_operator(*tensors) or in_forward_mode()


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass so that its gradients can be used in computations, but raise if they are differentiated.

    torch's once_differentiable attaches its error to new tensors, so another path to the same leaf hides it. The second
    derivative of beta * k, for example, would silently be that of the product only, which is wrong.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        leads_to = [x for x in (*ctx.saved_tensors, *grads) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(_Once.apply(x, *leads_to) if isinstance(x, Tensor) and leads_to else x for x in found)

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
