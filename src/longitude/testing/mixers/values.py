"""Laws of the numbers themselves: what is not finite reaches the answer, what dtypes may round, what weight decay may pull."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from longitude.testing.fixtures import LawBroken, close, numbers
from longitude.testing.mixers.fixtures import DIM, MixerExample
from longitude.training import parameter_groups

TOKENS = 11


def law_nonfinite(build: MixerExample) -> str | None:
    """NaN or an infinity in a token: that token's output and the loss are not finite, and other rows are as without it. NaN in
    the first number of any parameter: the loss is not finite. In float32 and float64, in every form.
    """
    forms = build.forms((4,))
    ways = [(name, options, torch.float32) for name, options in forms.items()]
    ways.append((*next(iter(build.forms((16,)).items())), torch.float64))
    with torch.no_grad():
        for name, options, dtype in ways:
            mixer = build(**options).to(dtype)
            where = f", {name}, {dtype}".replace(", ,", ",")
            ask = {"encoding": build.encodings(mixer).to(dtype), "positions": 0}
            x = numbers(2, TOKENS, DIM).to(dtype)
            clean = mixer(x, **ask)
            for value in (math.nan, math.inf, -math.inf):
                bad = x.clone()
                bad[0, TOKENS // 2, 3] = value
                out = mixer(bad, **ask)
                if bool(out[0, TOKENS // 2].isfinite().all()):
                    raise LawBroken(f"{value} in a token{where}: its output is finite")
                close(f"{value} in a token{where}: another row", out[1], clean[1], 1e-5)
            for parameter, p in mixer.named_parameters():
                kept = p.clone()
                p.view(-1)[0] = math.nan
                if math.isfinite(float(mixer(x, **ask).sum())):
                    raise LawBroken(f"NaN in {parameter}{where}: the loss is finite")
                p.copy_(kept)
    return None


HALVES = (torch.bfloat16, torch.float16)
ROUNDED = {torch.bfloat16: 0.01, torch.float16: 0.002}
"""How far the rounding of weights alone may move an output, relative to its largest number."""


def moves(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module]]:
    """Copies that were moved to a dtype in every way that torch has."""
    yield ".to(dtype)", deepcopy(module).to(dtype)
    yield ".to(dtype=dtype)", nn.Sequential(deepcopy(module)).to(dtype=dtype)[0]  # through a module around it
    short = deepcopy(module)
    yield (".bfloat16()", short.bfloat16()) if dtype == torch.bfloat16 else (".half()", short.half())


def law_dtypes(build: MixerExample) -> str | None:
    """As built, with a state of 64 where it has a state_size: moved to bfloat16 or float16 and computed in float64, so that the
    rounding of parameters is all that differs, it gives nearly what it gave. Every way of moving keeps the same numbers; moving
    again changes none; a state_dict takes them to a copy that was moved; and outputs are of the model's dtype.
    """
    options = {"state_size": 64} if build.has("state_size") else {}
    mixer = build(filled=False, **options).float()
    length = 200
    x = numbers(1, length, DIM)

    def exactly(module: nn.Module) -> Tensor:
        module = deepcopy(module).double()
        return module(x, encoding=build.encodings(mixer), positions=0)

    with torch.no_grad():
        want = exactly(mixer)
        for dtype in HALVES:
            first: nn.Module | None = None
            for how, moved in moves(mixer, dtype):
                found = moved.state_dict()
                if first is None:
                    first = moved
                    close(f"{how} {dtype}, computed in float64", exactly(moved), want, ROUNDED[dtype])
                    out = moved(x.to(dtype), encoding=build.encodings(mixer), positions=0)
                    if out.dtype != dtype:
                        raise LawBroken(f"{how}: expected outputs of {dtype}, got {out.dtype}")
                same_state(f"{how} {dtype}", found, first.state_dict())
                same_state(f"{how}, to float32 and back", moved.float().to(dtype).state_dict(), found)
                other = build(1, filled=False, **options).to(dtype)
                other.load_state_dict(found)
                same_state(f"{how}, loaded", other.state_dict(), found)
    return None


def same_state(what: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in want:
        if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name]):
            raise LawBroken(f"{what}: {name} is not what it was, {want[name].dtype}, now {got[name].dtype}")


def law_decay(build: MixerExample) -> str | None:
    """lg.parameter_groups puts each parameter into one of two groups; vectors, and all that `undecayed` names, do not decay,
    in a copy either; what `undecayed` names is there.
    """
    for mixer in (build(), deepcopy(build())):
        grouped(mixer, set(mixer.undecayed))
    return None


def grouped(module: nn.Module, spared: set[str]) -> None:
    """LawBroken unless lg.parameter_groups parts its parameters: none of `spared` decays, every other weight of a Linear layer or
    a convolution does, of any size, and no other vector.
    """
    named = dict(module.named_parameters())
    if spared - named.keys():
        raise LawBroken(f"undecayed: {sorted(spared - named.keys())} are no parameters of it")
    if not named:
        return
    decayed, rest = ([id(p) for p in group["params"]] for group in parameter_groups(module, 0.1))
    if sorted([*decayed, *rest]) != sorted(id(p) for p in named.values()):
        raise LawBroken("expected each parameter in one group, once")
    matrices = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear | nn.Conv1d)}
    for name, p in named.items():
        matrix = id(p) in matrices
        if id(p) in decayed and (name in spared or p.squeeze().dim() < 2 and not matrix):
            raise LawBroken(f"{name} {list(p.shape)} decays")
        if id(p) not in decayed and matrix and name not in spared and not getattr(p, "_no_weight_decay", False):
            raise LawBroken(f"{name} {list(p.shape)}, a layer's weight, does not decay")
