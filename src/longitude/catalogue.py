"""What there is: every encoding, mixer, scaling scheme and sampler with its facts, and what runs on this machine.

Facts are read off the objects themselves at toy size (`longitude.testing.example`), so a new encoding is described as soon
as it is registered; its source is what the first paragraph of its docstring says.
"""

import inspect
import os
import platform
import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from longitude import __version__
from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal
from longitude.attention.mixer import MIXERS, Mixer
from longitude.attention.operation import refusal, requests
from longitude.positions.base import ENCODINGS, Encoding, OffsetBias, OffsetVectors, PairBias, list_encodings
from longitude.positions.composed import Composed, compose
from longitude.positions.samplers import SAMPLERS
from longitude.positions.scaling import SCHEMES
from longitude.registry import options_of
from longitude.testing import SHAPES, example

Facts = dict[str, Any]


def catalogue() -> dict[str, Any]:
    """Everything, as plain data: {"encodings": [...], "mixers": [...], "scaling": [...], "samplers": [...], "machine": {...}}."""
    return {
        "encodings": [described(name) for name in list_encodings()],
        "mixers": [_of_mixer(name, kind) for name, kind in sorted(MIXERS.items())],
        "scaling": [_of_class(name, scheme) for name, scheme in SCHEMES.items()],
        "samplers": [_of_class(name, sampler) for name, sampler in SAMPLERS.items()],
        "machine": machine(),
    }


# ---- encodings -------------------------------------------------------------------------------------------------------
def described(name: str) -> Facts:
    """The facts of a registered encoding.

    class: of the object, several where composed. acts: see `acts`. max_length: the option that bounds positions, or None.
    stable_keys: a cache may keep transformed keys. backends: who takes it on this machine, the cheapest first, when
    training (gradients wanted) and when reading.
    """
    build, factory = example(name), ENCODINGS[name]
    built = build()
    return {
        "name": name,
        "class": " + ".join(type(member).__name__ for member in compose(built)),
        "acts": acts(built),
        "relative": built.relative,
        "learned": built.learned,
        "causal_only": built.causal_only,
        "max_length": "max_length" if built.max_length is not None else None,
        "axes": built.axes,
        "shared": built.shared,
        "stable_keys": built.stable_keys,
        "source": built.source,
        "options": list(options_of(factory)),
        "is": first_paragraph(factory),
        "backends": {"training": takers(build(), True), "reading": takers(build(), False)},
    }


def acts(encoding: Encoding, dim: int = SHAPES["dim"]) -> list[str]:
    """Where it enters: "input", "rotation" (of queries and keys), "bias", "vectors" (per offset), "content"; or nowhere.

    dim: width of the tokens that it reads, if it does.
    """
    where = []
    for member in _members(encoding):
        kind = type(member)
        where += ["input"] * member.at_input
        where += ["rotation"] * (kind.keys is not Encoding.keys)
        for term in member.terms(_columns(member, dim)):
            match term:
                case OffsetBias() | PairBias():
                    where.append("bias")
                case OffsetVectors():
                    where.append("vectors")
                case _:  # made of what tokens hold
                    where.append("content")
    return list(dict.fromkeys(where))


def takers(encoding: Encoding, training: bool, length: int = 64) -> list[str]:
    """Backends that take float32 attention with this encoding over `length` tokens, the cheapest first."""
    encoding = encoding.float().train(training)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads, kv_heads, head_dim = (SHAPES[n] for n in ("num_heads", "num_kv_heads", "head_dim"))
    q = torch.zeros(1, heads, length, head_dim, requires_grad=training, device=device)
    k = torch.zeros(1, kv_heads, length, head_dim, requires_grad=training, device=device)
    with torch.set_grad_enabled(training):
        columns = _columns(encoding.to(device), SHAPES["dim"], length)
        parts = requests(q, k, k, encoding, columns, Causal(), None, None, None, 0.0, False)
        asked = [part.request for part in parts]
        able = [backend for backend in BACKENDS.values() if refusal(backend, asked) is None]
    return [backend.name for backend in sorted(able, key=lambda backend: backend.price(asked[-1]))]


def _members(encoding: Encoding) -> Iterator[Encoding]:
    return iter(encoding) if isinstance(encoding, Composed) else iter([encoding])


def _columns(encoding: Encoding, dim: int, length: int = 3) -> dict[str, torch.Tensor]:
    like = next(encoding.parameters(), torch.zeros((), dtype=torch.float64))
    return encoding.context(torch.zeros(1, length, dim, dtype=like.dtype, device=like.device))[0]


# ---- what docstrings say ---------------------------------------------------------------------------------------------
def first_paragraph(thing: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def source_of(thing: Callable[..., Any]) -> str | None:
    """Its papers: the attribute `source`; else what has a year in the last such parenthesis of the first paragraph, or None."""
    if source := getattr(thing, "source", None):
        return source
    year = re.compile(r"\b(19|20)\d\d\b")
    dated = [said for said in re.findall(r"\(([^()]*)\)", first_paragraph(thing)) if year.search(said)]
    return "; ".join(part for part in dated[-1].split("; ") if year.search(part)) if dated else None


def _of_mixer(name: str, kind: type[Mixer]) -> Facts:
    """takes: what encodings may do in it. cache: its growth with the tokens that passed. bidirectional: as declared."""
    takes = ["input", *["rotation"] * kind.rotates, *["terms"] * kind.scores]
    facts = _of_class(name, kind) | {"takes": takes, "cache": kind.growth, "bidirectional": kind.bidirectional}
    facts["options"].pop("encoding", None)  # the model's
    return facts


def _of_class(name: str, kind: type) -> Facts:
    """Options that must be given stand first, without a default."""
    parameters = list(inspect.signature(kind).parameters.values())
    return {
        "name": name,
        "class": kind.__name__,
        "options": {p.name: None if p.default is p.empty else p.default for p in parameters},
        "required": [p.name for p in parameters if p.default is p.empty],
        "source": source_of(kind),
        "is": first_paragraph(kind),
    }


# ---- the machine -----------------------------------------------------------------------------------------------------
def machine() -> Facts:
    """What runs here."""
    try:
        transformers = version("transformers")
    except PackageNotFoundError:
        transformers = None
    return {
        "longitude": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "mps": torch.backends.mps.is_available(),
    }
