"""Attention over a part of the keys, for `merge_attention`, and its gradients from the merged result."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends.table import band
from longitude.attention.backends.table.backward import backward
from longitude.attention.backends.table.band import Inputs
from longitude.attention.backends.table.bias import LOG2E
from longitude.attention.backends.table.forward import forward


def part_forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """The output [B, H, Lq, D] and the logsumexp of the scores [B, H, Lq] over these keys alone, outside autograd."""
    done = band.forward(x)
    return forward(x) if done is None else done[:2]


def part_backward(x: Inputs, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    """Gradients of the tensors of x, None for those that need no gradient.

    out [B, H, Lq, D] and lse [B, H, Lq] are the result over all keys, of which x has a part; grad: gradient of out.
    """
    top = (lse * LOG2E).masked_fill(lse == -math.inf, math.inf)  # as band.c keeps a query without keys
    found = band.backward(x, grad, None, out, torch.stack([top, torch.zeros_like(top)]), learned=False)
    return backward(x, grad, -(grad * out).sum(-1), lse, learned=False) if found is None else found
