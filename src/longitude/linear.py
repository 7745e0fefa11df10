"""Layers are called: adapters, hooks, offloading and quantisation stand between a weight and what its layer gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WideLinear(nn.Linear):
    """A linear layer in the wider of the dtypes of its input and its weight: x W + b."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)


PLAIN = (nn.Linear, WideLinear, nn.Conv1d, nn.Sequential, nn.ReLU)


def is_plain(*layers: nn.Module) -> bool:
    """Whether each layer computes only its linear map, so that its weight may be read instead of calling it.

    False for other classes, layers with hooks, or a replaced forward, as with accelerate's loading of weights on demand.
    """
    of_all = nn.modules.module
    hooks = any(
        (
            of_all._global_forward_hooks,
            of_all._global_forward_pre_hooks,
            of_all._global_backward_hooks,
            of_all._global_backward_pre_hooks,
        )
    )
    return not hooks and all(
        type(layer) in PLAIN
        and "forward" not in layer.__dict__
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        for layer in layers
    )
