"""What the laws of mixers are tried on: a mixer at toy size, and the smallest model in which its state can go wrong."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from longitude.attention.masks import Causal, Mask
from longitude.attention.mixer import MIXERS, Mixer
from longitude.errors import unknown
from longitude.positions.base import Positions, explicit
from longitude.positions.composed import Composed, compose
from longitude.recurrent.ops.checks import MODES
from longitude.testing.fixtures import SHAPES, example as encoding_example, fill

SMALL: dict[str, Any] = {
    "size": 5,
    "window": 5,
    "chunk_size": 16,
    "state_size": 4,
    "d_state": 4,
    "num_features": 12,
    "features": 12,
    "kv_rank": 6,
    "q_rank": 10,
    "rope_dim": 4,
}
"""Options of these names, too, are filled in, whatever their default, so that 20 tokens meet every case."""

FORMS = {"mode": MODES, "route": ("expanded", "absorbed")}
"""Options of these names choose between ways to the same numbers."""

LENGTHS = (1, 7, 63, 130)
DIM = SHAPES["dim"]


@dataclass(frozen=True)
class MixerExample:
    """Makes one kind of mixer at toy size: fresh, in float64, learned parameters filled with random numbers.

    factory: a class, or a function, that returns a Mixer. Its options are `options`, else those in SHAPES that have no default
    or None, and those in SMALL; else its defaults. encoding: labels of what the model around it brings; None: rope where the
    mixer rotates, and alibi where it has scores.
    """

    factory: Callable[..., Mixer]
    options: Mapping[str, Any] = field(default_factory=dict)
    encoding: tuple[str, ...] | None = None

    def __call__(self, seed: int = 0, filled: bool = True, **options: Any) -> Mixer:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            mixer = self.factory(**self.resolved(**options))
        if not isinstance(mixer, Mixer):
            raise ValueError(f"expected a function that returns a Mixer, got {mixer!r}")
        mixer = mixer.double().eval()
        return fill(mixer, seed, std=DIM**-0.5) if filled else mixer

    def resolved(self, **more: Any) -> dict[str, Any]:
        """The options it is built with; `more` go before everything else."""
        parameters = inspect.signature(self.factory).parameters
        said = {**self.options, **more}
        for name in said:
            if name not in parameters:
                raise unknown("option", name, parameters, f"of {self.factory!r}")
        found = {}
        for name, parameter in parameters.items():
            if name in said:
                found[name] = said[name]
            elif name in SMALL:
                found[name] = SMALL[name]
            elif name in SHAPES and parameter.default in (None, inspect.Parameter.empty):
                found[name] = SHAPES[name]
        return found

    def has(self, option: str) -> bool:
        return option in inspect.signature(self.factory).parameters

    def forms(self, chunks: Sequence[int] = (1, 5, 16, 200)) -> dict[str, dict[str, Any]]:
        """Every way to the same numbers that it offers: words -> options."""
        ways: list[dict[str, Any]] = [{}]
        for option, values in FORMS.items():
            if self.has(option):
                ways = [{**way, option: value} for way in ways for value in values]
        if self.has("chunk_size"):
            chunked = [way for way in ways if way.get("mode", "chunked") == "chunked"]
            ways = [way for way in ways if way not in chunked]
            ways += [{**way, "chunk_size": size} for way in chunked for size in chunks]
        return {", ".join(f"{name} {value}" for name, value in way.items()): way for way in ways}

    def encodings(self, mixer: Mixer) -> Composed:
        """What the model around it brings, at the sizes that it shows to encodings; filled."""
        shapes: dict[str, Any] = {**type(mixer).encoding_shapes(self.resolved())}
        labels = self.encoding
        if labels is None:
            labels = (*(["rope"] if mixer.rotates else []), *(["alibi"] if mixer.scores else []))
        return compose([encoding_example(label)(**shapes) for label in labels])


def mixer_example(mixer: str | Callable[..., Mixer] | MixerExample, **options: Any) -> MixerExample:
    """A MixerExample of a registered name, a class, or a function that builds; with the options said."""
    if isinstance(mixer, MixerExample):
        return MixerExample(mixer.factory, {**mixer.options, **options}, mixer.encoding)
    if isinstance(mixer, Mixer):
        raise ValueError("expected a name, a class or a function that builds a fresh mixer, got a mixer")
    return MixerExample(MIXERS[mixer] if isinstance(mixer, str) else mixer, options)


class Network(nn.Module):
    """x -> x + mixer(x), twice or as said, with the encodings a model would bring.

    Upper layers see what lower ones made of the past: an error of a state that one layer hides shows in two.
    """

    def __init__(self, build: MixerExample, layers: int = 2, **options: Any):
        super().__init__()
        self.layers = nn.ModuleList(build(seed, **options) for seed in range(layers))
        self.encoding = build.encodings(self.mixer)

    @property
    def mixer(self) -> Mixer:
        first = self.layers[0]
        assert isinstance(first, Mixer)
        return first

    def caches(self) -> list[Any]:
        return [layer.cache_layer() for layer in self.layers]  # type: ignore[operator]  (a Mixer)

    def forward(
        self,
        x: Tensor,
        positions: Positions | None = None,
        documents: Tensor | None = None,
        caches: Sequence[Any] | None = None,
        mask: Mask = Causal(),  # noqa: B008 (frozen)
    ) -> Tensor:
        """X [B, L, dim]; documents [B, Lk], cached tokens included, -1 for padding; positions None: they count on."""
        if self.encoding.at_input:
            x = self.encoding.embed(x, explicit(positions or 0, x.shape[1], x.device))
        for n, layer in enumerate(self.layers):
            cache = None if caches is None else caches[n]
            x = x + layer(x, mask=mask, positions=positions, documents=documents, cache=cache, encoding=self.encoding)
        return x

    def in_pieces(
        self,
        x: Tensor,
        cuts: Sequence[int],
        positions: Callable[[int, int], Positions | None] = lambda a, b: a,
        documents: Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> Tensor:
        """The same, cut at `cuts`, 0 and L among them, with a cache between the pieces."""
        caches = self.caches() if caches is None else caches
        parts = [
            self(x[:, a:b], positions(a, b), None if documents is None else documents[:, :b], caches)
            for a, b in pairwise(cuts)
        ]
        return torch.cat(parts, 1)


def random_cuts(length: int, seed: int, most: int = 6) -> tuple[int, ...]:
    """0, some places in between, length."""
    draw = random.Random(seed)
    inner = draw.sample(range(1, length), min(length - 1, draw.randint(1, most))) if length > 1 else []
    return (0, *sorted(inner), length)


def schedules(length: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Ways to cut a sequence: token by token, and at random."""
    yield "one by one", tuple(range(length + 1))
    for seed in range(2):
        cuts = random_cuts(length, seed)
        yield f"cut at {', '.join(map(str, cuts[1:-1])) or 'no place'}", cuts
