"""A gradient of zeros for what an answer does not depend on: several machines that train together wait for every parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def with_zero_gradients(x: Tensor, tensors: Iterable[Tensor | None]) -> Tensor:
    """x, to whose graph these tensors belong as well, each with a gradient of zeros from here, whatever numbers it holds."""
    if torch.is_grad_enabled():
        for other in tensors:
            if other is not None and other.requires_grad:
                x = x + other.reshape(-1)[:0].sum().to(x.dtype)  # the sum of no number: 0, even of NaN
    return x
