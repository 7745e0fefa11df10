"""A label as the encoding and the mixers that it names, built for a shape."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from longitude.attention.mixer import MIXERS, Mixer, mixer, mixer_resolved
from longitude.labels import parse_label
from longitude.positions.base import ENCODINGS, Encoding, encoding, resolved
from longitude.positions.composed import Composed
from longitude.registry import options_of
from longitude.show.shape import Shape


@dataclass(frozen=True)
class Part:
    """An encoding or a mixer of a label.

    Attributes:
        name: Its registered name.
        options: All of them, those of the shape and defaults included.
        factory: Its class, or the function that builds it.
        module: The module, in float64, initialized with seed 0.
    """

    name: str
    options: dict[str, Any]
    factory: Any
    module: Any


@dataclass(frozen=True)
class Built:
    """A label, built for a shape; heads of its encodings may be narrower than those asked for, as with latent attention."""

    label: str
    encodings: list[Part]
    mixers: list[Part]
    shape: Shape

    @property
    def encoding(self) -> Encoding | None:
        """All its encodings as one."""
        modules = [each.module for each in self.encodings]
        return Composed(modules) if len(modules) > 1 else modules[0] if modules else None


def built(label: str, shape: Shape) -> Built:
    """The parts of a label.

    Raises:
        ValueError: If the label, an encoding or a mixer raises it.
    """
    parsed = parse_label(label)
    own = shape
    for spec in parsed.mixers:  # latent attention rotates a part of each head
        options = mixer_resolved(*_named(spec), **shape.known)
        sizes = options | MIXERS[spec["name"]].encoding_shapes(options)
        kv_heads = sizes.get("num_kv_heads") or own.kv_heads
        own = replace(own, head_dim=sizes.get("head_dim") or own.head_dim, width=shape.dim, kv_heads=kv_heads)
    encodings = [_encoding(spec, own) for spec in parsed.encodings]
    together = Built(label, encodings, [], own).encoding
    return Built(label, encodings, [_mixer(spec, shape, together) for spec in parsed.mixers], own)


def _named(spec: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return spec["name"], {key: value for key, value in spec.items() if key != "name"}


def _encoding(spec: dict[str, Any], shape: Shape) -> Part:
    """The encoding of a spec, with the options that a model of the shape passes to it."""
    name, given = _named(spec)
    factory = ENCODINGS[name]
    options = resolved(name, {**getattr(factory, "model_defaults", {}), **given}, **shape.known)
    return Part(name, options, factory, _seeded(lambda: encoding(name, **options)))


def _mixer(spec: dict[str, Any], shape: Shape, together: Encoding | None) -> Part:
    name, given = _named(spec)
    factory = MIXERS[name]
    options = mixer_resolved(name, given, **shape.known)
    own = {"encoding": together} if together is not None and "encoding" in options_of(factory) else {}

    def make() -> Mixer:
        made = mixer(name, **options)
        if together is not None and not own:
            made.require(Composed([together]))
        return factory(**options, **own) if own else made

    return Part(name, options, factory, _seeded(make))


def _seeded(make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double().eval()
