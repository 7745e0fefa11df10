"""Laws of the numbers themselves: what is not finite reaches the answer, what dtypes may round, what weight decay may pull."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from longitude.testing.fixtures import SHAPES, Example, Stack, close, numbers
from longitude.testing.mixers.values import HALVES, ROUNDED, grouped, moves, same_state

TOKENS = 11


def law_dtypes(build: Example) -> str | None:
    """As built, moved to bfloat16 or float16 and computed in float64, so that the rounding of parameters is all that differs,
    it gives nearly what it gave; the same where it has none: angles, slopes and other fixed tables lose nothing. Every way
    of moving keeps the same numbers; moving again changes none; a state_dict takes them along.
    """
    encoding = build(filled=False).float()
    x = numbers(1, 63, SHAPES["dim"])

    def exactly(one: torch.nn.Module) -> Tensor:
        return Stack(deepcopy(one).double(), layers=1)(x)  # type: ignore[arg-type]

    with torch.no_grad():
        want = exactly(encoding)
        for dtype in HALVES:
            first = None
            for how, moved in moves(encoding, dtype):
                found = moved.state_dict()
                if first is None:
                    first = found
                    close(
                        f"{how} {dtype}, computed in float64", exactly(moved), want, ROUNDED[dtype] if found else 1e-12
                    )
                same_state(f"{how} {dtype}", found, first)
                same_state(f"{how}, to float32 and back", moved.float().to(dtype).state_dict(), found)
                other = build(1, filled=False).to(dtype)
                other.load_state_dict(found)
                same_state(f"{how}, loaded", other.state_dict(), found)
    return None


def law_decay(build: Example) -> str | None:
    """lg.parameter_groups puts each parameter into one of two groups; vectors do not decay, nor tables, which are all that is no
    weight of a Linear layer.
    """
    encoding = build()
    tables = {
        f"{path}.{name}".removeprefix(".")
        for path, module in encoding.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if not isinstance(module, torch.nn.Linear)
    }
    grouped(encoding, tables)
    return None
