"""Laws of numbers as modules have them: moved to 16 bits, as drawn at first, and pulled by weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from longitude.testing.engine import LawBroken
from longitude.testing.examples import DIM, ENCODING_LAWS, MIXER_LAWS, Example, MixerExample, seeded
from longitude.testing.fixtures import LayerStack, close, learned_of, numbers
from longitude.training import parameter_groups

ROUNDED = {torch.bfloat16: 0.01, torch.float16: 0.002}
"""Largest change of an output by rounding its weights, relative to its largest number; without weights, EXACT."""
EXACT = 1e-12


@ENCODING_LAWS.law(name="dtypes", threshold=max(ROUNDED.values()))
def dtypes_of_encodings(build: Example) -> None:
    """Moved to bfloat16 or float16 and computed in float64, it gives nearly what it gave.

    The rounding of parameters is all that may differ: without any, angles, slopes and other fixed tables lose nothing.
    Every way of moving keeps the same numbers; moving again changes none; a state_dict takes them along.
    """
    x = numbers(1, 63, DIM)

    def exactly(encoding: nn.Module) -> Tensor:
        return LayerStack(build.in_attention(), 1, deepcopy(encoding).double())(x, 0)  # type: ignore[arg-type]

    _moved(build(filled=False).float(), build(1, filled=False), exactly)


@MIXER_LAWS.law(name="dtypes", threshold=max(ROUNDED.values()))
def dtypes_of_mixers(build: MixerExample) -> None:
    """Moved to bfloat16 or float16 and computed in float64, it gives nearly what it gave.

    As built, with a state of 64 where it has a state_size, and with all blocks or keys where it would choose some: rounded
    parameters choose others. The rounding of parameters is all that may differ. Every way of moving
    keeps the same numbers; moving again changes none; a state_dict takes them along; outputs are of the model's dtype.
    """
    x = numbers(1, 200, DIM)
    options = {
        name: n
        for name, n in {"state_size": 64, "select_count": x.shape[1], "k_top": x.shape[1]}.items()
        if build.has(name)
    }
    mixer = build(filled=False, **options).float()

    def run(module: nn.Module, dtype: torch.dtype) -> Tensor:
        out = module(x.to(dtype), encoding=build.encodings(mixer), positions=0)
        if out.dtype != dtype:
            raise LawBroken(f"expected outputs of {dtype}, got {out.dtype}")
        return out

    _moved(mixer, build(1, filled=False, **options), lambda module: run(deepcopy(module).double(), torch.float64))
    with torch.no_grad():
        for dtype in ROUNDED:
            run(deepcopy(mixer).to(dtype), dtype)


@torch.no_grad()
def _moved(module: nn.Module, other: nn.Module, exactly: Callable[[nn.Module], Tensor]) -> None:
    """Require that all ways to change the dtype agree. other: equal structure, other numbers. exactly: output in float64."""
    want = exactly(module)
    for dtype, rounded in ROUNDED.items():
        first = None
        for how, moved in _moves(module, dtype):
            state = moved.state_dict()
            if first is None:
                first = state
                close(f"{how} {dtype}, computed in float64", exactly(moved), want, rounded if state else EXACT)
            _same_state(f"{how} {dtype}", state, first)
            _same_state(f"{how}, to float32 and back", moved.float().to(dtype).state_dict(), state)
            loaded = deepcopy(other).to(dtype)
            loaded.load_state_dict(state)
            _same_state(f"{how}, loaded", loaded.state_dict(), state)


def _moves(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module]]:
    """Copies that were moved to a dtype in every way that torch has."""
    yield ".to(dtype)", deepcopy(module).to(dtype)
    yield ".to(dtype=dtype)", nn.Sequential(deepcopy(module)).to(dtype=dtype)[0]  # through a module around it
    short = deepcopy(module)
    yield (".bfloat16()", short.bfloat16()) if dtype == torch.bfloat16 else (".half()", short.half())


def _same_state(what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for name in want:
        if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name]):
            raise LawBroken(f"{what}: {name} is not what it was, {want[name].dtype}, now {got[name].dtype}")


@MIXER_LAWS.law()
def initialization(build: MixerExample) -> None:
    """As built, and after `reset_parameters`: outputs of moderate size, and a finite gradient for every parameter."""
    for reset in (False, True):
        mixer = build(filled=False).float()
        if reset:
            with seeded(3):
                mixer.reset_parameters()
        learned = learned_of(mixer)
        out = mixer(numbers(2, 63, DIM).float(), encoding=build.encodings(mixer).float(), positions=0)
        what, size = "after reset_parameters" if reset else "as built", float(out.detach().std())
        if not 1e-4 < size < 1e2:
            raise LawBroken(f"{what}: expected outputs of moderate size, got a deviation of {size:.1e}")
        grads = torch.autograd.grad((out * numbers(*out.shape, seed=9)).sum(), [*learned.values()], allow_unused=True)
        dead = [n for n, g in zip(learned, grads, strict=True) if g is None or not bool(g.isfinite().all())]
        if dead:
            raise LawBroken(f"{what}: no gradient, or none that is finite, for {', '.join(dead)}")


@ENCODING_LAWS.law(name="weight_decay")
def weight_decay_of_encodings(build: Example) -> None:
    """lg.parameter_groups puts each parameter into one of two groups; vectors and tables do not decay.

    Tables are all that is no weight of a Linear layer.
    """
    encoding = build()
    tables = {
        f"{path}.{name}".removeprefix(".")
        for path, module in encoding.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if not isinstance(module, nn.Linear)
    }
    _grouped(encoding, tables)


@MIXER_LAWS.law(name="weight_decay")
def weight_decay_of_mixers(build: MixerExample) -> None:
    """lg.parameter_groups puts each parameter into one of two groups; vectors and what `undecayed` names do not decay.

    In a copy neither. What `undecayed` names is there.
    """
    mixer = build()
    for copy in (mixer, deepcopy(mixer)):
        _grouped(copy, set(mixer.undecayed))


def _grouped(module: nn.Module, undecayed: set[str]) -> None:
    """None of `undecayed` decays; every other weight of a Linear layer or a convolution does, of any size; no other vector."""
    named = learned_of(module)
    if undecayed - named.keys():
        raise LawBroken(f"undecayed: {sorted(undecayed - named.keys())} are no parameters of it")
    if not named:
        return
    decayed, rest = ([id(p) for p in group["params"]] for group in parameter_groups(module, 0.1))
    if sorted([*decayed, *rest]) != sorted(map(id, named.values())):
        raise LawBroken("expected each parameter in one group, once")
    matrices = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear | nn.Conv1d)}
    for name, p in named.items():
        matrix = id(p) in matrices
        if id(p) in decayed and (name in undecayed or p.squeeze().dim() < 2 and not matrix):
            raise LawBroken(f"{name} {list(p.shape)} decays")
        if id(p) not in decayed and matrix and name not in undecayed and not getattr(p, "_no_weight_decay", False):
            raise LawBroken(f"{name} {list(p.shape)}, a layer's weight, does not decay")
