"""Parameters that a short sequence does not reach get a gradient of zeros: those who train on several machines wait for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def with_zero_gradients(x: Tensor, *parameters: nn.Parameter | None) -> Tensor:
    """x, to whose graph these parameters belong, each with a gradient of zeros from here, whatever stands in them."""
    learned = [p for p in parameters if p is not None and p.requires_grad]
    if not learned or not torch.is_grad_enabled():
        return x
    everywhere = torch.ones((), dtype=torch.bool, device=x.device)
    for p in learned:
        x = x + p.masked_fill(everywhere, 0.0).sum().to(x.dtype)
    return x
