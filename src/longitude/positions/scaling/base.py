"""Frequencies of rotary pairs, and the base classes of scaling schemes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from longitude.errors import UsageError, Within, unknown
from longitude.positions.coordinates import wide
from longitude.registry import Checked, Registry

Length = TypeVar("Length", int, Tensor)
Follow = Literal["declared", "row", "sequence"]
Factor = Annotated[float, Within(1)]
"""How many times longer the context becomes."""


class Frequencies(NamedTuple):
    """Frequencies of rotary pairs, and two factors.

    Args:
        inverse: [rotary_dim/2], radians per position, float64.
        attention_factor: multiplies cos and sin.
        softmax_factor: multiplies the scale of the scores, for attention with partly rotated scores (DeepSeek).
    """

    inverse: Tensor
    attention_factor: float
    softmax_factor: float = 1.0


def plain(rotary_dim: int, base: float | Tensor, device: torch.device | None) -> Tensor:
    """theta_k = base^(-2k/d), float64 where the device has it."""
    pair = torch.arange(0, rotary_dim, 2, device=device, dtype=wide(device or torch.device("cpu")))
    return base ** (-pair / rotary_dim)


def at_least(length: int | Tensor, least: int) -> Any:
    """Maximum of a length and `least`; the length is an int or a tensor."""
    return length.clamp(min=least) if isinstance(length, Tensor) else max(length, least)


@dataclass(frozen=True)
class Scaling(Checked):
    """Base of all schemes, and the scheme that changes nothing. A scheme is a formula with options."""

    name: ClassVar[str] = "none"
    source: ClassVar[str] = ""
    """Paper of the scheme: authors and year with a link."""

    def frequencies(
        self, rotary_dim: int, base: float, length: int | Tensor | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Frequencies [rotary_dim/2], float64, for sequences of `length`; None: the declared or the original length."""
        return plain(rotary_dim, base, device)

    def factors(self) -> tuple[float, float]:
        """(attention_factor, softmax_factor)."""
        return 1.0, 1.0

    @classmethod
    def extending(cls, factor: float, original_length: int) -> Self | None:
        """The scheme for `factor` times a training length; None if it needs more than these two."""
        known = {"factor": factor, "original_max_length": original_length}
        options = {field.name: field.default for field in dataclasses.fields(cls)}
        if MISSING in [default for name, default in options.items() if name not in known]:
            return None
        return cls(**{name: value for name, value in known.items() if name in options})

    def then(self, scheme: Scaling) -> Scaling | None:
        """What `scheme` becomes for a model that was trained with this one; None if it cannot extend the model."""
        return None

    def written(self, base: float, rotary_dim: int | None) -> tuple[str, float, Scaling | None]:
        """(rope_type, rope_theta, scheme of that type) with the same frequencies. ValueError if transformers has none."""
        for kind, row in ROPE_TYPES.items():
            if row.scheme is type(self):
                return kind, base, self
        raise UsageError("", "a scaling that has a rope_type", self, "`longitude extend` writes it as longrope")

    def length_at(self, query: Length, newest: Length) -> Length | None:
        """The length that tables follow, for a query at position `query` and the newest key at position `newest`.

        Equal numbers mean equal tables; None: tables never change. Elementwise, for ints or int64 tensors.
        """
        return None

    def as_dict(self) -> dict[str, Any]:
        """Name and all options of the scheme, for JSON."""
        options = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {"name": self.name} | {name: list(v) if isinstance(v, tuple) else v for name, v in options}


# ---- the registers of schemes ----------------------------------------------------------------------------------------
class RopeType(NamedTuple):
    """A rope_type of config.json. Its keys are {name in transformers: option of the scheme}.

    Args:
        scheme: the class; None: no scaling.
        required: keys that must be there.
        optional: other keys.
    """

    scheme: type[Scaling] | None
    required: dict[str, str]
    optional: dict[str, str]


@dataclass(frozen=True)
class Method:
    """How a scheme extends a trained model: its row, which its file registers.

    Attributes:
        name: Its name in `longitude extend`.
        note: For the user.
        make: (factor, training length) -> the scheme, or None if it needs more; by default `extending` of the scheme.
        searched: Whether a search with the model chooses the factors.
        needs_training: Whether the model must be trained on afterwards.
        raises_length: Whether max_position_embeddings becomes the new length.
        starts: Whether a search of factors starts from it.
    """

    name: str
    note: str
    make: Callable[[float, int], Scaling | None] | None = None
    searched: bool = False
    needs_training: bool = False
    raises_length: bool = True
    starts: bool = False

    @property
    def extends(self) -> bool:
        """Whether it extends a model. A registered scheme that needs further options does not."""
        return bool(self.searched or self.needs_training or (self.make and self.make(2.0, 4096)))


SCHEMES = Registry("scaling", "dir(lg.scaling)", ("longitude.positions.scaling",))
METHODS: dict[str, Method] = {}
"""Methods of `longitude extend`: a row for each registered scheme, and for other uses of one."""
ORIGINAL_LENGTH = {"original_max_position_embeddings": "original_max_length"}
ROPE_TYPES: dict[str, RopeType] = {"default": RopeType(None, {}, {})}
Scheme = TypeVar("Scheme", bound=type[Scaling])


def spellings(name: str) -> tuple[str, str]:
    """A name with hyphens, and with underscores."""
    return name.replace("_", "-"), name.replace("-", "_")


def register_scheme(name: str, note: str = "", **how: bool) -> Callable[[Scheme], Scheme]:
    """Decorator that registers a subclass of Scaling for lg.Rotary; if it needs a factor alone, also for `longitude extend`.

    Args:
        name: name of the scheme in labels, configs, messages and `longitude extend`; - and _ are read alike.
        note: what `longitude extend` says of it; by default the first line of the docstring.
        **how: other fields of its row in `METHODS`: searched, needs_training, raises_length, starts.

    Returns:
        A decorator that sets the name and returns the class.

    Raises:
        ValueError: the name is taken by another scheme.
    """

    def add(scheme: Scheme) -> Scheme:
        scheme.name = name
        SCHEMES.aliases |= {spelled: name for spelled in spellings(name) if spelled != name}
        row: Any = {"note": note or (scheme.__doc__ or "").partition("\n")[0], "make": scheme.extending} | how
        METHODS[name] = Method(name, **row)
        return SCHEMES.register(name)(scheme)

    return add


def method_of(name: str) -> Method:
    """The method of a name, written with hyphens or underscores. ValueError, with the nearest, for an unknown one."""
    SCHEMES.load()
    method = next((METHODS[spelled] for spelled in spellings(name) if spelled in METHODS), None)
    if method is None or not method.extends:
        names = [other for other in ("all", *METHODS) if other != name and (other == "all" or METHODS[other].extends)]
        raise unknown("method", name, names, "`longitude extend --method all` compares those without training.")
    return method


def scheme_of(name: str, factor: float, original_length: int) -> Scaling:
    """The scheme of a method that needs no more than a factor and the training length."""
    make = method_of(name).make
    scheme = None if make is None else make(float(factor), original_length)
    assert scheme is not None, name
    return scheme


def rope_type(kind: str, required: str = "", optional: str = "") -> Callable[[Scheme], Scheme]:
    """Decorator of a scheme that configs of transformers have. required, optional: its keys there, named as its options."""

    def add(scheme: Scheme) -> Scheme:
        keys = ({key: ORIGINAL_LENGTH.get(key, key) for key in names.split()} for names in (required, optional))
        ROPE_TYPES[kind] = RopeType(scheme, *keys)
        return scheme

    return add


class Follows(Scaling):
    """A scheme with frequencies that depend on a length; `follow` decides which length.

    "declared": max_length, fixed; rotated keys stay valid. "row": each query's position + 1; full forward passes, chunks and
    single steps agree exactly. "sequence": the newest key's position + 1, as published; earlier results become wrong whenever
    the tables change. With "sequence", documents packed into a row all depend on the row's newest position, so a packed
    document differs from the same document alone. With the others it does not.

    Without a length, max_length applies if set, else original_max_length. "declared" without a declared length: ValueError.
    """

    original_max_length: int
    max_length: int | None
    follow: Follow

    @classmethod
    def extending(cls, factor: float, original_length: int) -> Self | None:
        return None  # what it follows is a choice

    def declared(self) -> int | None:
        """The length that the options declare."""
        return self.max_length

    def followed(self, length: int | Tensor | None) -> int | Tensor:
        """`length`, or its default if it is None."""
        if length is not None:
            return length
        if self.follow != "declared":
            return self.max_length or self.original_max_length
        if (declared := self.declared()) is None:
            expected = "max_length, the length that follow='declared' chooses its frequencies for"
            raise UsageError(self.name, expected, "None", "pass it, or follow='row' or 'sequence'")
        return declared

    def canonical(self, length: Any) -> Any:
        """Map a length to a representative of all lengths with equal tables."""
        raise NotImplementedError

    def length_at(self, query: Length, newest: Length) -> Length | None:
        if self.follow == "declared":
            return None
        return self.canonical((query if self.follow == "row" else newest) + 1)
