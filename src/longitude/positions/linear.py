"""Layers that must be called instead of reading their weights, and weights that stay float32 in a model of 16 bits.

Layers are called because adapters, hooks, offloading and quantization change what a layer computes from its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor


class FullPrecision(nn.Module):
    """A module with parameters that 16 bits would spoil.

    Attributes:
        full_precision: Names of its direct parameters that stay float32 or wider when the module is moved, cast or loaded.
    """

    full_precision: tuple[str, ...] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self.full_precision and param is not None and param.dtype != _wide(param.dtype):
            narrow, param = param, nn.Parameter(param.detach().to(_wide(param.dtype)), param.requires_grad)
            vars(param).update(vars(narrow))  # attributes that loaders and trainers set
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keep `full_precision` parameters in float32 or wider under .to(), .bfloat16() and .half(), which all call this."""
        parameters = [self._parameters.get(name) for name in self.full_precision]
        wide = [x for p in parameters if p is not None for x in (p, p.grad) if x is not None]
        if not wide:
            return super()._apply(fn, recurse)  # dynamo reads no closure then: by name, an encoding is built in a graph

        def moved(x: Tensor) -> Tensor:
            out = fn(x)
            if any(x is tensor for tensor in wide) and out.dtype != _wide(out.dtype):
                return x.to(out.device, _wide(out.dtype))
            return out

        return super()._apply(moved, recurse)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


class WideLinear(nn.Linear):
    """A linear layer in the wider of the dtypes of its input and its weight: x W + b."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)


PLAIN = (nn.Linear, WideLinear, nn.Conv1d, nn.GroupNorm, nn.Sequential, nn.ReLU)
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
PLAIN_WEIGHTS = (Tensor, nn.Parameter, FakeTensor, NoneType)
"""Classes of weights, without those that only wrap others; FakeTensor is what torch.export passes."""


def is_plain(*layers: nn.Module) -> bool:
    """Whether each layer computes only its linear map, so that its weight may be read instead of calling it.

    False for other classes, layers with hooks, a replaced forward, as with accelerate's loading of weights on demand, and
    weights of other classes, such as quantized ones, whose few operations are those that the layer itself calls.
    """
    hooked = any(getattr(nn.modules.module, f"_global_{hooks}") for hooks in HOOKS)
    return not hooked and all(
        type(layer) in PLAIN
        and "forward" not in layer.__dict__
        and not any(getattr(layer, f"_{hooks}") for hooks in HOOKS)
        and all(type(p) in PLAIN_WEIGHTS for p in layer._parameters.values())
        for layer in layers
    )
