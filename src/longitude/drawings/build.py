"""Sizes of the attention that is drawn, and labels as the encodings and mixers that they name, built for them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longitude.attention.mixer import MIXERS, Mixer, mixer, mixer_resolved
from longitude.errors import UsageError, check_sizes
from longitude.labels import parse_label
from longitude.positions.base import ENCODINGS, Encoding, encoding, resolved
from longitude.positions.composed import Composed
from longitude.registry import options_of


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model.

    Args:
        length: Positions that are drawn.
        heads: Heads of queries and keys.
        head_dim: Width of a head.
        width: Width of a token; None: that of all heads.
        kv_heads: Heads of keys; None: as many as of queries.
    """

    length: int = 1024
    heads: int = 8
    head_dim: int = 64
    width: int | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        check_sizes("show", length=self.length, heads=self.heads, head_dim=self.head_dim)
        if self.length < 2:
            raise UsageError("--length", "2 or more", self.length)

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim if self.width is None else self.width

    @property
    def known(self) -> dict[str, Any]:
        """Sizes that a model of this shape passes to an encoding."""
        return {
            "dim": self.dim,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim,
            "max_length": self.length,
        }

    def tokens(self) -> Tensor:
        """Random tokens [1, length, dim] of seed 0, with standard deviation 1, as after a norm."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1, self.length, self.dim, generator=generator, dtype=torch.float64)


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
        modules = [part.module for part in self.encodings]
        return Composed(modules) if len(modules) > 1 else modules[0] if modules else None


def built(label: str, shape: Shape) -> Built:
    """The parts of a label.

    Raises:
        ValueError: If the label, an encoding or a mixer raises it.
    """
    parsed = parse_label(label)
    narrowed = shape
    for spec in parsed.mixers:  # latent attention rotates a part of each head
        options = mixer_resolved(*_named(spec), **shape.known)
        sizes = options | MIXERS[spec["name"]].encoding_shapes(options)
        kv_heads = sizes.get("num_kv_heads") or narrowed.kv_heads
        head_dim = sizes.get("head_dim") or narrowed.head_dim
        narrowed = replace(narrowed, head_dim=head_dim, width=shape.dim, kv_heads=kv_heads)
    encodings = [_encoding(spec, narrowed) for spec in parsed.encodings]
    together = Built(label, encodings, [], narrowed).encoding
    return Built(label, encodings, [_mixer(spec, shape, together) for spec in parsed.mixers], narrowed)


def _named(spec: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return spec["name"], {key: value for key, value in spec.items() if key != "name"}


def _encoding(spec: dict[str, Any], shape: Shape) -> Part:
    """The encoding of a spec, with the options that a model of the shape passes to it."""
    name, options = _named(spec)
    factory = ENCODINGS[name]
    options = resolved(name, {**getattr(factory, "model_defaults", {}), **options}, **shape.known)
    return Part(name, options, factory, _seeded(lambda: encoding(name, **options)))


def _mixer(spec: dict[str, Any], shape: Shape, together: Encoding | None) -> Part:
    name, options = _named(spec)
    factory = MIXERS[name]
    options = mixer_resolved(name, options, **shape.known)

    def make() -> Mixer:
        if together is not None and "encoding" in options_of(factory):
            return factory(**options, encoding=together)
        made = mixer(name, **options)
        if together is not None:
            made.require(Composed([together]))
        return made

    return Part(name, options, factory, _seeded(make))


def _seeded(make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double().eval()
