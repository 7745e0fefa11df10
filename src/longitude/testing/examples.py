"""Subjects of laws, encodings and mixers at toy size, and the two batteries of laws that try them; a law may be in both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.mixer import MIXERS, Mixer, list_mixers
from longitude.errors import unknown
from longitude.positions.base import ENCODINGS, Encoding, list_encodings
from longitude.positions.composed import Composed, compose
from longitude.recurrent.ops.checks import MODES
from longitude.registry import options_of
from longitude.testing.engine import Battery, Law, Measurement, Result, Test

Module = TypeVar("Module", bound=nn.Module)
SHAPES = {"dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_length": 600}
"""The toy size: options of these names are filled in; an encoding or mixer built otherwise must fit them."""
DIM = SHAPES["dim"]

OTHER_SHAPES = {"dim": 12, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "max_length": 500}

SMALL = {
    **dict.fromkeys(("size", "window"), 5),
    **dict.fromkeys(("state_size", "rope_dim"), 4),
    "features": 12,
    "chunk_size": 16,
    "k_top": 5,
    "kv_rank": 6,
    "q_rank": 10,
}
"""Values of mixer options with these names, whatever their defaults are, so that 20 tokens cover every case."""

SMALL_ENCODING = {"window": 5, "group": 3, "chunk_size": 7, "local_size": 2}
"""Small options of encodings, so that distant offsets occur within 20 tokens."""

FORMS = {"mode": MODES, "route": ("expanded", "absorbed")}
"""Options of these names choose between ways to compute the same numbers."""


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Context with random numbers of this seed on the CPU; the caller's generator is restored."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed also walks the stack, for devices that are not here: a millisecond inside pytest.
        torch.default_generator.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Example:
    """Makes one kind of encoding at toy size: fresh, in float64, learned parameters filled with random numbers.

    Args:
        factory: A class or a function that returns an encoding.
        options: Options of the encoding; others come from SMALL_ENCODING, from SHAPES and `model_defaults` if they have no
            default, or from defaults.
    """

    factory: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    kind: ClassVar[type[nn.Module]] = Encoding
    known: ClassVar[Mapping[str, Any]] = ENCODINGS
    small: ClassVar[Mapping[str, Any]] = SMALL_ENCODING
    std: ClassVar[float] = 0.5

    def __call__(self, seed: int = 0, filled: bool = True, **options: Any) -> Any:
        with seeded(seed):
            made = self.factory(**self.resolved(**options))
        if not isinstance(made, self.kind):
            raise ValueError(f"expected a function that returns a new {self.kind.__name__}, got {made!r}")
        made = made.double().eval()
        return fill(made, seed, self.std) if filled else made

    def resolved(self, **more: Any) -> dict[str, Any]:
        """The options it is built with; `more` override everything else, but sizes only if they have no default."""
        parameters, options = options_of(self.factory), {**self.options, **more}
        for name in options:
            if name not in parameters and (name in self.options or name not in SHAPES):
                raise unknown("option", name, parameters, f"of {self.factory!r}")
        known = {**SHAPES, **getattr(self.factory, "model_defaults", {}), **self.small, **options}
        fixed = {*self.options, *self.small, *(more.keys() - SHAPES.keys())}
        return {
            name: known[name]
            for name, p in parameters.items()
            if name in known and (name in fixed or p.default in (None, inspect.Parameter.empty))
        }

    def has(self, option: str) -> bool:
        return option in options_of(self.factory)

    @property
    def name(self) -> str:
        """The registered name, or the name of the class or function."""
        registered = (name for name, factory in self.known.items() if factory is self.factory and not self.options)
        return next(registered, getattr(self.factory, "__name__", repr(self.factory)))

    def in_attention(self) -> MixerExample:
        """Attention with this encoding."""
        return MixerExample(MultiHeadAttention, encoding=self)


@dataclass(frozen=True)
class MixerExample(Example):
    """Factory of a mixer at toy size: fresh, in float64, with parameters filled with random numbers.

    Args:
        factory: A class or a function that returns a mixer.
        options: Options of the mixer; others come from SHAPES if it has no default, from SMALL, or from defaults.
        encoding: Encodings that the surrounding model supplies: names, or an Example. None: rope if the mixer rotates, alibi if
            it has scores.
    """

    encoding: Sequence[str] | Example | None = None

    kind: ClassVar[type[nn.Module]] = Mixer
    known: ClassVar[Mapping[str, Any]] = MIXERS
    small: ClassVar[Mapping[str, Any]] = SMALL
    std: ClassVar[float] = DIM**-0.5

    def forms(self, chunks: Sequence[int] = (1, 5, 16, 200), backends: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """All options that must not change the result: description -> options. backends: names to try, if it has backends."""
        ways: list[dict[str, Any]] = [{}]
        for option, values in ({**FORMS, "backend": backends} if backends else FORMS).items():
            if self.has(option):
                ways = [{**way, option: value} for way in ways for value in values]
        if self.has("chunk_size"):
            chunked = [way for way in ways if way.get("mode", "chunked") == "chunked"]
            ways = [way for way in ways if way not in chunked]
            ways += [{**way, "chunk_size": size} for way in chunked for size in chunks]
        return {", ".join(f"{name} {value}" for name, value in way.items()): way for way in ways}

    def encodings(self, mixer: Mixer) -> Composed:
        """Encodings that the surrounding model supplies, at the mixer's sizes, with parameters filled."""
        if isinstance(self.encoding, Example):
            return compose(self.encoding())
        names = self.encoding
        if names is None:
            names = ["rope"] * mixer.rotates + ["alibi"] * mixer.scores
        shapes: dict[str, Any] = {**type(mixer).encoding_shapes(self.resolved())}
        return compose([example(name)(**shapes) for name in names])


def example(encoding: str | Callable[..., Encoding] | Example, **options: Any) -> Example:
    """An Example of an encoding.

    Args:
        encoding: A registered name, a class, or a function that builds a fresh one.
        options: Options to build it with.

    Returns:
        The Example; calling it builds a fresh encoding in float64, its parameters filled with random numbers.

    Raises:
        ValueError: For an unknown name or option, or an encoding that is built already.
    """
    return _example(Example, encoding, options)


def mixer_example(mixer: str | Callable[..., Mixer] | MixerExample, **options: Any) -> MixerExample:
    """A MixerExample.

    Args:
        mixer: A registered name, a class, or a function that builds a fresh one.
        options: Options to build it with.

    Returns:
        The MixerExample; calling it builds a fresh mixer in float64, its parameters filled with random numbers.

    Raises:
        ValueError: For an unknown name or option, or a mixer that is built already.
    """
    return _example(MixerExample, mixer, options)


def _example(kind: type[Example], part: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(part, Example):
        return type(part)(**{**vars(part), "options": {**part.options, **options}})
    if isinstance(part, kind.kind):
        noun = kind.kind.__name__.lower()
        raise ValueError(f"expected a name, a class or a function that builds a fresh {noun}, got one that is built")
    return kind(kind.known[part] if isinstance(part, str) else part, options)


@torch.no_grad()
def fill(module: Module, seed: int = 0, std: float = 0.5) -> Module:
    """Fill every parameter with random numbers, in place, because zeros hide errors. Positive parameters stay positive.

    Args:
        module: The module with the parameters.
        seed: Seed for the random numbers.
        std: Their standard deviation.

    Returns:
        The module.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(module.named_parameters()):
        above = bool((p > 0).all())
        noise = std * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.copy_(noise.abs() + 0.1 if above else noise)
    return module


# ---- their batteries ---------------------------------------------------------------------------------------------------
class PartBattery(Battery):
    """The laws of encodings, or of mixers, and how they are tried on one that is registered, a class or a function."""

    def __init__(self, noun: str, example: Callable[..., Example], registered: Callable[[], list[str]]):
        super().__init__(noun, "longitude.testing.battery")
        self.example, self.registered = example, registered

    def examine(self, law: str | Law, part: Any, **options: Any) -> Result:
        """Try a law on an encoding or mixer.

        Args:
            law: A Law, or its name.
            part: A registered name, a class, or a function that builds a fresh one at the toy size, SHAPES.
            options: Options to build it with.

        Returns:
            The Result: it passed, or does not apply.

        Raises:
            LawBroken: If the law is broken, or an unexpected error is raised.
            ValueError: For an unknown law, name or option.
        """
        law = self[law] if isinstance(law, str) else law
        build = self.example(part, **options)
        build()
        return law(build).require(build.name)

    def check(self, part: Any, *, without: Iterable[str] = (), **options: Any) -> dict[str, Result]:
        """Try every law on one encoding or mixer.

        Args:
            part: A registered name, a class, or a function that builds a fresh one at the toy size, SHAPES.
            without: Names of laws to leave out, such as "compile".
            options: Options to build it with.

        Returns:
            The Result of each law by its name: status, measured number, threshold, reason.

        Raises:
            LawBroken: For the first law that is broken, an AssertionError with the law and the measured number.
            ValueError: For an unknown law, name or option.
        """
        return {law.name: self.examine(law, part, **options) for law in self.chosen(without=without)}

    def cases(self) -> list[tuple[str, str]]:
        """(name, law) for everything registered, to parametrize a test with.

        Returns:
            Every pair of a registered name and a law's name.
        """
        return [(name, law) for name in self.registered() for law in self.laws()]


ENCODING_LAWS = PartBattery("encoding", example, list_encodings)
MIXER_LAWS = PartBattery("mixer", mixer_example, list_mixers)


def shared_law(**options: Any) -> Callable[[Test], Test]:
    """Decorator: a law of mixers that is one of encodings, too, which are tried in attention. options: those of Battery.law."""

    def add(test: Test) -> Test:
        @wraps(test)
        def in_attention(build: Example, **how: Any) -> Measurement | None:
            return test(build.in_attention(), **how)

        ENCODING_LAWS.law(**options)(in_attention)
        return MIXER_LAWS.law(**options)(test)

    return add
