"""FIRE's network is a piecewise linear function of one number: a multiplication and a sum for each pair, not `width` of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longitude.c_compile import in_memory, passes, words

functions = partial(passes, Path(__file__).with_name("piecewise.c"))
SPARE_DISTANCES = 2**16
"""Distances that are tabulated however few the pairs."""


def pieces_of(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w2 relu(w1 t + b1) + b2 for numbers t, as slope[h, s] t + level[h, s] where s of the ascending `ends` are below t.

    w1 [width, 1], b1 [width], w2 [heads, width], b2 [heads] -> ends [width], slope and level [heads, width + 1], with gradients.
    """
    w1 = w1[:, 0]
    with torch.no_grad():
        ends = torch.where(w1 == 0, torch.inf, -b1 / w1)
        # At its end a unit is 0 and has no gradient: one that falls is inactive from there on, one that rises up to there.
        ends = torch.where(w1 < 0, ends.nextafter(ends.new_tensor(-torch.inf)), ends)
        ends, order = ends.sort()
        passed = torch.arange(len(ends) + 1, device=ends.device)[:, None] > order.argsort()  # [pieces, width]
        active = torch.where(w1 == 0, b1 > 0, torch.where(w1 > 0, passed, ~passed)).to(w1.dtype)
    return ends, (w2 * w1) @ active.mT, (w2 * b1) @ active.mT + b2[:, None]


class PiecewiseBias(torch.autograd.Function):
    """slope[h, s] t + level[h, s], t = psi[|i - j|] / under, s of the ends below t: [B, heads, rows, keys].

    i [B, rows] and j [B, keys]; under [B, rows]; psi of all distances.
    """

    @staticmethod
    def forward(
        ctx: Any, i: Tensor, j: Tensor, psi: Tensor, under: Tensor, ends: Tensor, slope: Tensor, level: Tensor
    ) -> Tensor:
        bias = psi.new_empty(len(under), len(slope), i.shape[1], j.shape[1])
        _run("forward", bias, i, j, psi, under, ends, slope, level)
        ctx.save_for_backward(i, j, psi, under, ends, slope, level)
        return bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            wanted = [x for x in inputs if x.requires_grad]
            found = iter(torch.autograd.grad(by_formula(*inputs), wanted, gradient, create_graph=True))
            return tuple(next(found) if x.requires_grad else None for x in inputs)
        psi, under, _, slope, level = inputs[2:]
        threads = torch.get_num_threads()
        of_psi, of_slope, of_level = (x.new_zeros(threads, *x.shape) for x in (psi, slope, level))
        of_under = torch.empty_like(under)
        _run("backward", gradient.contiguous(), *inputs, gradients=(of_psi, of_under, of_slope, of_level))
        return None, None, of_psi.sum(0), of_under, None, of_slope.sum(0), of_level.sum(0)


def by_formula(i: Tensor, j: Tensor, psi: Tensor, under: Tensor, ends: Tensor, slope: Tensor, level: Tensor) -> Tensor:
    """The same by torch's operators."""
    t = psi[(i[:, :, None] - j[:, None]).abs()] / under[..., None]
    piece = torch.searchsorted(ends, t.detach())
    return (slope[:, piece] * t + level[:, piece]).movedim(0, 1)


def _run(which: str, bias: Tensor, *inputs: Tensor, gradients: tuple[Tensor, ...] = ()) -> None:
    """One of both functions of piecewise.c."""
    found = functions(bias.dtype)
    assert found is not None
    i, j, *numbers = inputs = tuple(x.detach().contiguous() for x in inputs)
    steps = (x.shape[1] if len(x) > 1 else 0 for x in (i, j))
    sizes = (*bias.shape, numbers[3].shape[1], len(numbers[0]), *steps, torch.get_num_threads())
    pointers = [x.data_ptr() for x in (*inputs, bias)] + ([x.data_ptr() for x in gradients] or [0] * 4)
    getattr(found, which)(words((*pointers, *sizes)))


def tabulated(i: Tensor, j: Tensor, *numbers: Tensor) -> int | None:
    """How many distances there are up to the largest of positions i and j; None where piecewise.c cannot take them.

    Tracers and transforms get torch's operators.
    """
    if not in_memory(i, j, *numbers) or torch.autograd.forward_ad._current_level >= 0:
        return None
    if i.dtype != torch.int64 or j.dtype != torch.int64 or functions(numbers[0].dtype) is None:
        return None
    (low_i, high_i), (low_j, high_j) = ([int(x) for x in t.aminmax()] for t in (i, j))
    distances = max(high_i - low_j, high_j - low_i, 0) + 1
    return distances if distances <= SPARE_DISTANCES + 4 * (i.numel() + j.numel()) else None
