"""How fast rotary pairs turn, and what a scheme that changes it is. The schemes themselves are in `scaling`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from longitude.positions.base import check_positive, check_sizes, wide

Length = TypeVar("Length", int, Tensor)


class Frequencies(NamedTuple):
    """inverse [rotary_dim/2]: radians per position, float64. attention_factor multiplies cos and sin; softmax_factor
    multiplies the scale of the scores, for attentions whose scores are only partly rotated (DeepSeek).
    """

    inverse: Tensor
    attention_factor: float
    softmax_factor: float = 1.0


def plain(rotary_dim: int, base: float | Tensor, device: torch.device | None) -> Tensor:
    """theta_k = base^(-2k/d)."""
    pair = torch.arange(0, rotary_dim, 2, device=device, dtype=wide(device or torch.device("cpu")))
    return base ** (-pair / rotary_dim)


def longest(length: int | Tensor, least: int) -> Any:
    """The greater of the two, for ints and tensors alike."""
    return length.clamp(min=least) if isinstance(length, Tensor) else max(length, least)


# ---- what a scheme is ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scaling:
    """Base of all schemes, and the scheme that changes nothing. A scheme owns a formula, its options and their errors."""

    name: ClassVar[str] = "none"

    def frequencies(
        self, rotary_dim: int, base: float, length: int | Tensor | None = None, device: torch.device | None = None
    ) -> Tensor:
        """-> [rotary_dim/2], float64, for sequences of `length` (None: declared, else original)."""
        return plain(rotary_dim, base, device)

    def factors(self) -> tuple[float, float]:
        """(attention_factor, softmax_factor)."""
        return 1.0, 1.0

    def length_at(self, query: Length, newest: Length) -> Length | None:
        """The length that the tables of a query at position `query` follow, where the sequence's newest key is at position
        `newest`: equal numbers mean equal tables. None: tables that never change. Elementwise, for ints or int64 tensors.
        """
        return None

    def as_dict(self) -> dict[str, Any]:
        """Its name and every option, for JSON."""
        options = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {"name": self.name} | {name: list(v) if isinstance(v, tuple) else v for name, v in options}

    def __post_init__(self) -> None:
        """Errors of the options that many schemes have."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (value, field.default) == (None, None):  # an option left out
                continue
            if field.name in ("original_max_length", "max_length"):
                check_sizes(self.name, **{field.name: value})
            elif field.name == "factor":
                check_positive(self.name, factor=value)
                if value < 1:
                    raise ValueError(
                        f"{self.name}: expected a factor of 1 or more, got {value!r}; it multiplies lengths"
                    )


class Follows(Scaling):
    """A scheme whose frequencies depend on a length. follow says on whose:

    "declared": max_length, once and for all; rotated keys stay right. "row": each query's own, its position + 1; whole
    passes, pieces and single steps agree exactly. "sequence": the whole sequence's, the newest key's position + 1: the
    published rule, which makes what was computed before wrong whenever the tables change. With it, documents packed into one
    row all follow the row's newest position, so a document is not what it is alone; with the others it is.

    Where no length is given, max_length counts if given, else original_max_length; "declared" needs one: ValueError.
    """

    original_max_length: int
    max_length: int | None
    follow: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow not in ("declared", "row", "sequence"):
            raise ValueError(f"{self.name}: expected follow='declared', 'row' or 'sequence', got {self.follow!r}")

    def declared(self) -> int | None:
        """The length that the options declare."""
        return self.max_length

    def followed(self, length: int | Tensor | None) -> int | Tensor:
        """`length`, or what stands for it where None."""
        if length is not None:
            return length
        if self.follow != "declared":
            return self.max_length or self.original_max_length
        if (declared := self.declared()) is None:
            raise ValueError(
                f"{self.name}: expected max_length, the length that follow='declared' chooses its frequencies for, got None; "
                "give it, or follow='row' or 'sequence'"
            )
        return declared

    def canonical(self, length: Any) -> Any:
        """One number for all lengths of equal tables."""
        raise NotImplementedError

    def length_at(self, query: Length, newest: Length) -> Length | None:
        match self.follow:
            case "row":
                return self.canonical(query + 1)
            case "sequence":
                return self.canonical(newest + 1)
        return None
