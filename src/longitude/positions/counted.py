"""CoPE's counts: few keys move them, because the keys before a full count all have the last position."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longitude.c_compile import in_memory, passes, words

functions = partial(passes, Path(__file__).with_name("counted.c"))


def by_formula(scores: Tensor, allowed: Tensor, logits: Tensor) -> Tensor:
    """Logits [..., columns] read at the sum of the gates of scores [..., keys] from a key on, between two columns linearly."""
    gates = torch.sigmoid(scores).masked_fill(~allowed, 0.0)
    counted = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=logits.shape[-1] - 1)
    index = counted.detach().nan_to_num(0.0)  # NaN is no index; lerp passes it on
    low = index.floor()
    below, above = (logits.gather(-1, column.long()) for column in (low, index.ceil()))
    return torch.lerp(below, above, counted - low)


class CountedBias(torch.autograd.Function):
    """The same in one pass; scores and allowed [B, H, rows, keys], logits [B, H, rows, columns]."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, allowed: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(scores, allowed, logits)
        bias = torch.empty_like(scores, memory_format=torch.contiguous_format)
        _run("forward", scores, allowed, logits, bias)
        return bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        scores, allowed, logits = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            wanted = [x for x in (scores, logits) if x.requires_grad]
            found = iter(torch.autograd.grad(by_formula(scores, allowed, logits), wanted, gradient, create_graph=True))
            of_scores, of_logits = (next(found) if x.requires_grad else None for x in (scores, logits))
            return of_scores, None, of_logits
        of_scores, of_logits = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (scores, logits))
        _run("backward", scores, allowed, logits, gradient.contiguous(), of_scores, of_logits)
        return of_scores, None, of_logits


def counted_bias(scores: Tensor, allowed: Tensor, logits: Tensor) -> Tensor:
    """By C where it can be compiled and there is memory to read; tracers and transforms get torch's operators."""
    plain = in_memory(scores, allowed, logits) and torch.autograd.forward_ad._current_level < 0
    if not plain or scores.dtype != logits.dtype or functions(scores.dtype) is None:
        return by_formula(scores, allowed, logits)
    return CountedBias.apply(scores, allowed.expand(scores.shape), logits)


def _run(which: str, scores: Tensor, allowed: Tensor, logits: Tensor, *written: Tensor) -> None:
    found = functions(scores.dtype)
    assert found is not None
    read = [x.detach().contiguous() for x in (scores, logits, allowed)]
    keys = scores.shape[-1]
    pointers = [x.data_ptr() for x in (*read, *written)] + [0] * (3 - len(written))
    sizes = scores.numel() // keys, keys, logits.shape[-1], torch.get_num_threads()
    getattr(found, which)(words((*pointers, *sizes)))
