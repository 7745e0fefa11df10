"""Laws of modules: their state, shared tensors, and outputs for extreme inputs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.attention.mixer import Mixer
from longitude.registry import options_of
from longitude.testing.battery.decoding import CACHES, two_documents
from longitude.testing.engine import DoesNotApply, LawBroken
from longitude.testing.examples import (
    DIM,
    ENCODING_LAWS,
    MIXER_LAWS,
    OTHER_SHAPES,
    SHAPES,
    Example,
    MixerExample,
    seeded,
    shared_law,
)
from longitude.testing.fixtures import LayerStack, close, learned_of, numbers, refused
from longitude.training import parameter_groups


@ENCODING_LAWS.law(threshold=1e-9)
@torch.no_grad()
def shared_tables(build: Example) -> None:
    """Two configurations used alternately never share a table.

    Other heads and widths, each numeric option doubled, other parameters. A table that outlives its call under an incomplete
    key answers for the wrong one, or at the wrong length.
    """
    for n, (what, seed, options) in enumerate(_variants(build)):
        length = 101 + 4 * n  # one that no table was made for before
        shapes = OTHER_SHAPES if options is OTHER_SHAPES else {}
        stack = LayerStack(build.in_attention())
        stack.require_order()
        two = LayerStack(build.in_attention(), encoding=build(seed, **options), **shapes)
        x, y = (numbers(1, length + 2, {**SHAPES, **sizes}["dim"]) for sizes in ({}, shapes))
        two_long, one_short = two(y[:, : length + 1], 0), stack(x[:, :length], 0)
        two_short, one_long = two(y[:, :length], 0), stack(x, 0)
        # causal: a shorter sequence is the beginning of a longer one
        close(f"with {what}", one_short, one_long[:, :length])
        close(f"{what}, with the first", two_short, two_long[:, :length])


def _variants(build: Example) -> list[tuple[str, int, dict[str, Any]]]:
    """Other configurations of the same class: description of the difference, seed, options."""
    variants: list[tuple[str, int, dict[str, Any]]] = [("other parameters", 1, {})]
    tried: list[tuple[str, dict[str, Any]]] = []
    if build.resolved(**OTHER_SHAPES) != build.resolved():
        tried.append(("other heads and widths", OTHER_SHAPES))
    for name, p in options_of(build.factory).items():
        if name not in SHAPES and isinstance(p.default, int | float) and not isinstance(p.default, bool) and p.default:
            tried.append((f"{name} doubled", {name: 2 * p.default}))
    for what, options in tried:
        try:
            build(**options)
        except ValueError:  # with the other options, it is outside its domain
            continue
        variants.append((what, 0, options))
    return variants


# ---- state -----------------------------------------------------------------------------------------------------------
@ENCODING_LAWS.law(name="state_dict", threshold=1e-12)
def state_dict_of_encodings(build: Example) -> None:
    """The state is the learned parameters and nothing else; meta -> to_empty -> load_state_dict gives the same answers.

    `learned` declares whether there are any; each has a dimension; copies and pickles give the same, too.
    """
    encoding = build()
    names = set(learned_of(encoding))
    if set(encoding.state_dict()) != names:
        raise LawBroken(f"expected {sorted(names)} in state_dict, the parameters; got {sorted(encoding.state_dict())}")
    if dict(encoding.named_buffers()):
        raise LawBroken(f"expected no buffers (make tables in prepare), got {[n for n, _ in encoding.named_buffers()]}")
    if encoding.learned != bool(names):
        raise LawBroken(f"declared learned = {encoding.learned}, has the parameters {sorted(names)}")
    x = numbers(2, 7, DIM)
    _loads(build, encoding, lambda loaded: LayerStack(build.in_attention(), encoding=loaded)(x, 0))


@MIXER_LAWS.law(name="state_dict", threshold=1e-12)
def state_dict_of_mixers(build: MixerExample) -> None:
    """The state stores every parameter; meta -> to_empty -> reset_parameters -> load_state_dict gives the same answers.

    Copies and pickles, too. Every parameter has a dimension.
    """
    mixer = build()
    if missing := learned_of(mixer).keys() - mixer.state_dict().keys():
        raise LawBroken(f"expected every parameter in state_dict, {sorted(missing)} are not")
    around, x = {"encoding": build.encodings(mixer), "positions": 0}, numbers(2, 21, DIM)
    _loads(build, mixer, lambda loaded: loaded(x, **around))


@torch.no_grad()
def _loads(build: Example, module: torch.nn.Module, answer: Callable[[Any], Tensor]) -> None:
    if scalars := [name for name, p in learned_of(module).items() if p.dim() == 0]:  # FSDP2 cannot shard them
        raise LawBroken(f"expected every parameter to have a dimension, {scalars} are of shape [], not of [1]")
    with torch.device("meta"):
        empty = build(filled=False)
    strays = [name for name, t in (*empty.named_parameters(), *empty.named_buffers()) if t.device.type != "meta"]
    if strays:
        raise LawBroken(f"made on another device than the default one: {strays}")
    loaded = empty.to_empty(device="cpu")
    if isinstance(loaded, Mixer):
        with seeded():
            loaded.reset_parameters()
    loaded.load_state_dict(module.state_dict())
    pickle.dumps(module)
    want = answer(module)
    close("made on meta, emptied, loaded", answer(loaded), want)
    close("copied", answer(deepcopy(module)), want)


# ---- adapters --------------------------------------------------------------------------------------------------------
class _Adapted(torch.nn.Module):
    """A linear layer and a product of low rank beside it, with the attributes of the layer, as adapters have them."""

    def __init__(self, base: torch.nn.Linear, added: Callable[[Tensor], Tensor]):
        super().__init__()
        self.base, self.added = base, added
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.added(x)


def _multiplied(layer: Any, arguments: Any, out: Any) -> Tensor:
    return 1.5 * out


@shared_law(threshold=1e-9, needs=CACHES)
def adapters(build: MixerExample) -> None:
    """A low-rank product beside each linear layer, as in adapters (LoRA) = that product added to its matrix.

    And a forward hook that multiplies a layer's output = the layer's parameters multiplied. Compared are the output, in a full
    pass, with documents and in chunks with a cache, and the gradient of the input.
    """
    x, documents = numbers(2, 13, DIM), two_documents(13)
    seen = (documents >= 0)[..., None].double()

    def answers(net: LayerStack) -> dict[str, Tensor]:
        whole = net.answer(x, 0)
        with torch.no_grad():
            packed, chunks = net(x, 0, documents) * seen, net.in_chunks(x, (0, 6, 7, 8, 13))
        return {
            "output": whole["output"],
            "gradient": whole["gradient of x"],
            "with documents": packed,
            "in chunks": chunks,
        }

    for name, options in build.forms((16,)).items():
        net = LayerStack(build, **options)
        layers = [path for path, module in net.named_modules() if "weight" in module._parameters]
        if not layers:
            raise DoesNotApply("it has no layers")
        merged, adapted, scaled, hooked = (deepcopy(net) for _ in range(4))
        for n, path in enumerate(layers):
            (parent, _, leaf), layer = path.rpartition("."), adapted.get_submodule(path)
            if isinstance(layer, torch.nn.Linear):
                shape = layer.out_features, layer.in_features
                product = 0.1 * numbers(shape[0], 2, seed=7 + n) @ numbers(2, shape[1], seed=8 + n)
                merged.get_parameter(f"{path}.weight").data += product
                setattr(adapted.get_submodule(parent), leaf, _Adapted(layer, partial(F.linear, weight=product)))
            for p in scaled.get_submodule(path).parameters(recurse=False):
                p.data *= 1.5
            hooked.get_submodule(path).register_forward_hook(_multiplied)
        close(f"adapters {name}".strip(), answers(adapted), answers(merged))
        close(f"hooks {name}".strip(), answers(hooked), answers(scaled))


# ---- values ----------------------------------------------------------------------------------------------------------
@MIXER_LAWS.law(needs=CACHES)
def extreme_inputs(build: MixerExample) -> None:
    """Zeros, one token repeated, and inputs a thousand times as large: finite outputs, states and gradients.

    In float32, with and without a cache.
    """
    inputs = {
        "zeros": torch.zeros(2, 63, DIM),
        "one token": numbers(2, 1, DIM).float().expand(2, 300, DIM),
        "large": 1e3 * numbers(2, 63, DIM).float(),
        "huge, then small": torch.cat([1e4 * numbers(2, 9, DIM), 1e-3 * numbers(2, 54, DIM)], 1).float(),
    }
    for name, options in build.forms((16,)).items():
        # One layer: a product of inputs in each of two would be beyond float32.
        net = LayerStack(build, layers=1, **options).float()
        where = f", {name}" if name else ""
        for what, x in inputs.items():
            answer = net.answer(x, 0)
            with torch.no_grad():
                answer["output in chunks"] = net.in_chunks(x, (0, 9, 10, x.shape[1]))
            for part, tensor in answer.items():
                if not bool(tensor.isfinite().all()):
                    raise LawBroken(f"{what}{where}: {part} is not finite")


@MIXER_LAWS.law(threshold=1e-9, needs=CACHES)
@torch.no_grad()
def attention_weights(build: MixerExample) -> None:
    """has_weights: return_weights gives, with the same output, weights [B, H, L, Lk] with rows that sum to 1.

    Weights of later keys are 0, in full passes and with a cache. Mixers without weights raise a ValueError that names
    return_weights and the mixer.
    """
    mixer, x = build(), numbers(2, 9, DIM)
    call = partial(mixer, encoding=build.encodings(mixer))
    if not mixer.has_weights:
        with_weights = partial(call, x, positions=0, return_weights=True)
        refused("return_weights", with_weights, "return_weights", type(mixer).__name__)
        return
    whole, cache = call(x, positions=0), mixer.cache_layer()
    ways = (
        ("", 0, 9, {"positions": 0}),
        (", an empty cache", 0, 6, {"cache": cache}),
        (", 6 cached", 6, 9, {"cache": cache}),
    )
    for where, start, stop, options in ways:
        answer = call(x[:, start:stop], **options, return_weights=True)
        if not isinstance(answer, tuple):
            raise LawBroken(f"return_weights{where}: expected the output and the weights, got {type(answer).__name__}")
        out, weights = answer
        close(f"output{where}", out, whole[:, start:stop])
        close(f"sum of weights{where}", weights.sum(-1), torch.ones_like(weights[..., 0]))
        keys = torch.arange(weights.shape[3]) + stop - weights.shape[3]
        later = keys > torch.arange(start, stop)[:, None]
        close(f"weights of later keys{where}", weights * later, torch.zeros_like(weights))


# ---- dtypes, first numbers, weight decay -------------------------------------------------------------------------------
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

    As built, with a state of 64 where it has a state_size, and with all keys where it would choose some: rounded
    parameters choose others. The rounding of parameters is all that may differ. Every way of moving
    keeps the same numbers; moving again changes none; a state_dict takes them along; outputs are of the model's dtype.
    """
    x = numbers(1, 200, DIM)
    options = {name: n for name, n in {"state_size": 64, "k_top": x.shape[1]}.items() if build.has(name)}
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
