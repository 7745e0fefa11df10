"""What torch makes of a call: recorded by autograd, carried forward, mapped by a transform of torch.func, or exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.utils.checkpoint import checkpoint

transforms_active = torch._C._are_functorch_transforms_active
"""Whether any transform of torch.func is under way, vmap too: torch's own function, which an ordinary call may ask."""


_is_exporting = getattr(torch.compiler, "is_exporting", None)  # since torch 2.7


def exporting() -> bool:
    """Whether torch.export makes a graph of this call.

    It runs where Longitude is not, so it has torch's own operators alone; and at every length, so no choice depends on a size:
    torch writes a choice down as a condition of the graph.
    """
    return _is_exporting is not None and _is_exporting()


def in_forward_mode() -> bool:
    """Whether derivatives are being carried forward, which torch's fused kernels and operators of our own do not do."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether torch.func takes gradients: grad, vjp, jacrev.

    It has no rules for gradients that an operator brings itself, nor for what is made again in backward.
    """
    if torch.compiler.is_compiling() or not transforms_active():
        return False
    return any(each.key() == TransformType.Grad for each in retrieve_all_functorch_interpreters())


def by_autograd() -> bool:
    """Neither of them: gradients are autograd's, if any are wanted."""
    return not in_forward_mode() and not in_transform()


def recomputed(part: Callable[..., Any], *inputs: Any) -> Any:
    """part(*inputs), made again in backward instead of kept, where autograd takes gradients; not in a graph to export."""
    if torch.is_grad_enabled() and not in_transform() and not exporting():
        return checkpoint(part, *inputs, use_reentrant=False)
    return part(*inputs)
