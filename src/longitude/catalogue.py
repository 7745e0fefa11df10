"""Catalogue of encodings, mixers, scaling schemes and samplers with their properties, and of backends on this machine.

Facts are read from the objects themselves at toy size (`longitude.testing.example`), so a new encoding is described as soon
as it is registered.
"""

import copy
import inspect
import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import torch

from longitude import plugins
from longitude.attention.mixer import MIXERS
from longitude.attention.operation import explain
from longitude.native import load
from longitude.positions.axes import AxesBias
from longitude.positions.base import ENCODINGS, Encoding, list_encodings
from longitude.positions.composed import compose
from longitude.positions.disentangled import KeyVectors
from longitude.positions.samplers import SAMPLERS
from longitude.positions.scaling import SCHEMES
from longitude.positions.terms import OffsetBias, OffsetVectors, PairBias, SinkLogits, Temperature
from longitude.registry import options_of
from longitude.runs.machine import machine, versions
from longitude.testing.examples import SHAPES, example

Facts = dict[str, Any]


def catalogue() -> dict[str, Any]:
    """Everything, as plain data: lists of "encodings", "mixers", "scaling", "samplers", "plugins", and the "machine".

    An encoding of a plugin that cannot be built at toy size is listed under the plugin's problems, not under encodings.
    """
    of_plugins = {name for plugin in plugins.loaded() for name in plugin.registered}
    encodings, problems = [], {}
    for name in list_encodings():
        try:
            encodings.append(described(name))
        except Exception as error:
            if name not in of_plugins:
                raise
            problems[name] = f"{type(error).__name__}: {error}"
    return {
        "encodings": encodings,
        "mixers": [of_mixer(name, kind) for name, kind in MIXERS.items()],
        "scaling": [_of_class(name, scheme) for name, scheme in SCHEMES.items()],
        "samplers": [_of_class(name, sampler) for name, sampler in SAMPLERS.items()],
        "plugins": [
            plugin.record
            | {"registers": plugin.registered, "problems": {n: problems[n] for n in plugin.registered if n in problems}}
            for plugin in plugins.loaded()
        ],
        "machine": versions() | machine() | {"mps": torch.backends.mps.is_available(), "loops": load.route()},
    }


# ---- encodings -------------------------------------------------------------------------------------------------------
def described(name: str) -> Facts:
    """The facts of a registered encoding.

    max_length: the option that bounds positions, or None. backends: backends that support it on this machine, the cheapest
    first, for training (with gradients) and for inference.
    """
    built, factory = example(name)(), ENCODINGS[name]
    return {
        "name": name,
        **properties(built, factory),
        "max_length": "max_length" if built.max_length is not None else None,
        "options": list(options_of(factory)),
        "is": first_paragraph(factory),
        "backends": {"training": [*takers(built, True)], "inference": [*takers(built, False)]},
    }


def properties(encoding: Encoding, factory: Any, dim: int = SHAPES["dim"]) -> Facts:
    """The facts of an encoding that a factory built, at any size.

    class: class of the object, several if composed. acts: see `acts`. max_length: the number of positions, or None.
    stable_keys: whether a cache may keep transformed keys.
    """
    return {
        "class": " + ".join(type(member).__name__ for member in compose(encoding)),
        "acts": acts(encoding, dim),
        "relative": encoding.relative,
        "learned": encoding.learned,
        "causal_only": encoding.causal_only,
        "max_length": encoding.max_length,
        "axes": encoding.axes,
        "shared": encoding.shared,
        "stable_keys": encoding.stable_keys,
        "source": source_of(encoding) or source_of(factory),
    }


def acts(encoding: Encoding, dim: int = SHAPES["dim"]) -> list[str]:
    """Ways an encoding acts: "input", "rotation", "bias", "vectors" (per offset), "temperature", "sink", "content"; or none.

    dim: width of the tokens that it reads, if it does.
    """
    where = []
    for member in compose(encoding):
        kind = type(member)
        where += ["input"] * member.at_input
        where += ["rotation"] * (kind.keys is not Encoding.keys)
        for term in member.terms(_columns(member, dim)):
            match term:
                case OffsetBias() | PairBias() | AxesBias():
                    where.append("bias")
                case OffsetVectors() | KeyVectors():
                    where.append("vectors")
                case Temperature():
                    where.append("temperature")
                case SinkLogits():
                    where.append("sink")
                case _:  # computed from the content of tokens
                    where.append("content")
    return list(dict.fromkeys(where))


def takers(encoding: Encoding, training: bool, length: int = 64, sizes: Mapping[str, int] = SHAPES) -> dict[str, float]:
    """Price of each backend that supports float32 attention of these sizes with this encoding, the cheapest first."""
    heads, kv_heads, head_dim = (sizes[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoding = copy.deepcopy(encoding).float().train(training).to(device)
    q = torch.zeros(1, heads, length, head_dim, requires_grad=training, device=device)
    k = torch.zeros(1, kv_heads, length, head_dim, requires_grad=training, device=device)
    with torch.set_grad_enabled(training), redirect_stdout(io.StringIO()):
        verdicts = explain(q, k, k, encoding=encoding, context=_columns(encoding, sizes["dim"], length))
    return {v.backend: round(v.price, 2) for v in sorted(verdicts, key=lambda v: v.price) if v.refusal is None}


def _columns(encoding: Encoding, dim: int, length: int = 3) -> dict[str, torch.Tensor]:
    like = next(encoding.parameters(), torch.zeros((), dtype=torch.float64))
    return compose(encoding).context(torch.zeros(1, length, dim, dtype=like.dtype, device=like.device))[0]


# ---- docstrings ------------------------------------------------------------------------------------------------------
def first_paragraph(thing: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def section(thing: Any, title: str) -> list[str]:
    """The lines of a section of a docstring ("Args", "Source"), without their common indent; empty if there is none."""
    _, heading, rest = f"\n{inspect.getdoc(thing) or ''}\n".partition(f"\n{title}:\n")
    lines = []
    for line in rest.splitlines() if heading else []:
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return inspect.cleandoc("\n" + "\n".join(lines)).splitlines() if lines else []


def source_of(thing: Any) -> str | None:
    """Papers of an object: its attribute `source`, else the section of its docstring; whichever has links is preferred."""
    source = getattr(thing, "source", None)
    if isinstance(source, str) and "http" in source:
        return source
    return " ".join(section(thing, "Source")) or source or None


# ---- mixers, schemes, samplers ---------------------------------------------------------------------------------------
def of_mixer(name: str, kind: Any) -> Facts:
    """Facts of a mixer. takes: supported kinds of encodings. cache: growth with the number of tokens."""
    takes = ["input", *["rotation"] * kind.rotates, *["terms"] * kind.scores]
    facts = _of_class(name, kind) | {"takes": takes, "cache": kind.growth, "bidirectional": kind.bidirectional}
    facts["options"].pop("encoding", None)  # the model's
    return facts


def _of_class(name: str, kind: type) -> Facts:
    """Facts of a class. required: options without a default."""
    parameters = options_of(kind)
    return {
        "name": name,
        "class": kind.__name__,
        "options": {option: None if p.default is p.empty else p.default for option, p in parameters.items()},
        "required": [option for option, p in parameters.items() if p.default is p.empty],
        "source": source_of(kind),
        "is": first_paragraph(kind),
    }
