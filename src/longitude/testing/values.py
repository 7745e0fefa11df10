"""Laws of the numbers themselves: what is not finite reaches the answer, what dtypes may round, what weight decay may pull."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal
from longitude.attention.operation import attend
from longitude.positions.base import Encoding
from longitude.testing.equal import refusal_of
from longitude.testing.mixers.values import HALVES, ROUNDED, grouped, moves, same_state
from longitude.testing.toys import SHAPES, Example, LawBroken, Stack, close, heads_and_tokens, learned_of, numbers

TOKENS = 11


def law_nonfinite(build: Example) -> str | None:
    """NaN or an infinity in what a token brings: on every backend its output is not finite, and other rows are as without it.
    NaN all over any parameter: the loss is not finite."""
    here = TOKENS // 2
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            encoding = build().to(dtype)
            clean = {name: x.to(dtype) for name, x in zip("qkvx", heads_and_tokens(TOKENS, TOKENS), strict=True)}
            able = [name for name in BACKENDS if refusal_of(encoding, clean, Causal(), name) is None]
            want = {name: _attended(encoding, clean, name) for name in able}
            for value in (math.nan, math.inf, -math.inf):
                bad = {name: x.clone() for name, x in clean.items()}
                for x in bad.values():
                    x[0, ..., here, :1] = value
                if encoding.at_input and bool(_embedded(encoding, bad["x"])[0, here].isfinite().all()):
                    raise LawBroken(f"{value} in a token, {dtype}: what is made of it at the input is finite")
                for name in able:
                    out = _attended(encoding, bad, name)
                    if bool(out[0, :, here].isfinite().all(-1).any()):
                        raise LawBroken(f"{value} in a token, {dtype}, backend {name}: its output is finite")
                    close(f"{value} in a token, {dtype}, backend {name}: another row", out[1], want[name][1], 1e-6)
            for name, p in learned_of(encoding).items():
                for backend in able:
                    kept = p.clone()
                    p.fill_(math.nan)
                    if math.isfinite(float(Stack(encoding, backend, layers=1).to(dtype)(clean["x"]).sum())):
                        raise LawBroken(f"NaN in {name}, {dtype}, backend {backend}: the loss is finite")
                    p.copy_(kept)
    return None


def _attended(encoding: Encoding, given: dict[str, Tensor], backend: str) -> Tensor:
    context = encoding.context(given["x"])[0]
    return attend(*(given[name] for name in "qkv"), encoding=encoding, context=context, backend=backend)


def _embedded(encoding: Encoding, x: Tensor) -> Tensor:
    return encoding.embed(x, torch.arange(x.shape[1]))


def law_dtypes(build: Example) -> str | None:
    """As built, moved to bfloat16 or float16 and computed in float64, so that the rounding of parameters is all that differs,
    it gives nearly what it gave; exactly that where it has none: angles, slopes and other fixed tables lose nothing. Every way
    of moving keeps the same numbers; moving again changes none; a state_dict takes them along."""
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
                    close(f"{how} {dtype}, computed in float64", exactly(moved), want, ROUNDED[dtype] if found else 0.0)
                same_state(f"{how} {dtype}", found, first)
                same_state(f"{how}, to float32 and back", moved.float().to(dtype).state_dict(), found)
                other = build(1, filled=False).to(dtype)
                other.load_state_dict(found)
                same_state(f"{how}, loaded", other.state_dict(), found)
    return None


def law_decay(build: Example) -> str | None:
    """lg.parameter_groups puts each parameter into one of two groups; vectors do not decay, nor tables, which are all that is no
    weight of a Linear layer."""
    encoding = build()
    tables = {
        f"{path}.{name}".removeprefix(".")
        for path, module in encoding.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if not isinstance(module, torch.nn.Linear)
    }
    grouped(encoding, tables)
    return None
