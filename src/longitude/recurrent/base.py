"""Common parts of recurrent mixers: their mode, and the initial values of their parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.attention.state_mixer import StateInputs, StateMixer
from longitude.native.derivatives import exporting
from longitude.positions.linear import is_plain
from longitude.recurrent.ops.checks import require_mode, state_dtype


class RecurrentMixer(StateMixer):
    """A mixer with a state of constant size and three modes: parallel, chunked, recurrent. Subclasses implement `mix`."""

    growth = "O(1)"
    any_length = False
    """Whether its parallel mode can be exported for any length; other modes cannot, as their steps depend on the length."""

    def __init__(self, *, mode: str = "chunked", chunk_size: int = 64) -> None:
        super().__init__()
        require_mode(type(self).__name__, mode, chunk_size)
        self.mode, self.chunk_size = mode, chunk_size

    def options(self, inputs: StateInputs) -> dict[str, Any]:
        """Arguments of recurrences besides tokens and state."""
        mode = "parallel" if self.any_length and exporting() else self.mode
        return {"mode": mode, "chunk_size": self.chunk_size, "reset": inputs.reset, "valid": inputs.valid}


class WideRMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input, which may be wider than its weight's; groups of channels are normalized separately."""

    def __init__(self, size: int, eps: float, groups: int = 1):
        super().__init__(size, eps=eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.groups == 1:
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        groups = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * weight


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), or x itself above 20, as in torch.

    In a compiled graph it uses other operators, because torch.compile assumes a wrong memory layout for the gradient of
    softplus (torch 2.13).
    """
    if torch.compiler.is_compiling():
        return torch.where(x > 20, x, x.clamp(max=20).exp().log1p())
    return F.softplus(x)


def group_norm(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    """norm(x) of tokens [N, channels].

    A compiled graph has the formula, because torch's kernel does not support forward-mode derivatives there (torch 2.13).
    """
    if not torch.compiler.is_compiling() or not is_plain(norm):
        return norm(x)
    groups = x.to(state_dtype(x)).unflatten(-1, (norm.num_groups, -1))
    groups = groups - groups.mean(-1, keepdim=True)
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)
    return (groups.flatten(-2) * norm.weight + norm.bias).to(x.dtype)


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Set initial values, unless transformers has marked the parameter as loaded from a checkpoint."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(values)


def fill_step_bias(parameter: Tensor) -> None:
    """Initial values of Mamba's steps: softplus of them is log-uniform in [0.001, 0.1]."""
    step = (
        torch.empty_like(parameter, dtype=torch.float32).uniform_(math.log(1e-3), math.log(0.1)).exp().clamp(min=1e-4)
    )
    fill(parameter, step + torch.log(-torch.expm1(-step)))
