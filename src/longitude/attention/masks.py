"""Which keys a query attends to: predicates over order, document and validity, that combine with & and |.

Order is a token's place in its stream: keys have 0 .. Lk-1, and queries are the last Lq of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.errors import UsageError, check_sizes, nearest
from longitude.native.tensors import in_memory

Reach = tuple[int | None, int | None]
"""Smallest and largest allowed (query order - key order); None: unbounded."""


class Mask:
    """Which keys each query attends to: a predicate on pairs of tokens, joined with & and |.

    Attributes:
        reach: Smallest and largest (query order - key order) that it may allow; None: unbounded. Pairs outside are not
            computed.
    """

    reach: Reach = (None, None)

    def allowed(self, q_order: Int[Tensor, " Lq"], k_order: Int[Tensor, " Lk"]) -> Bool[Tensor, ...]:
        """-> [Lq, Lk] or [B, 1, Lq, Lk]."""
        raise NotImplementedError

    def validate(self, batch: int, rows: int, keys: int) -> None:
        """ValueError unless it fits q [batch, H, rows, D] and k [batch, Hkv, keys, D]."""

    def parts(self) -> tuple[Mask, ...]:
        """The masks that must all allow a pair."""
        return (self,)

    def of(self, batch: slice | list[int]) -> Mask:
        """The mask of these rows of the batch."""
        return self

    def since(self, first: int) -> Mask:
        """The mask of the stream without its first tokens."""
        return self

    def require_past(self, past: int) -> None:
        """ValueError if cached tokens would have had to attend to the new ones."""

    def __and__(self, other: Mask) -> Mask:
        require_mask(other)
        return AllOf((*self.parts(), *other.parts()))

    def __or__(self, other: Mask) -> Mask:
        require_mask(other)
        return AnyOf((self, other))


@dataclass(frozen=True)
class NoMask(Mask):
    """Every token attends to every token."""

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return (q_order[:, None] >= k_order) | True

    def parts(self) -> tuple[Mask, ...]:
        return ()


class _Ordered(Mask):
    """Base class of Causal and Window, with an optional order of the keys."""

    order: Tensor | None

    def ago(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        """Order of the query minus order of the key, [Lq, Lk]."""
        i, j = (q_order, k_order) if self.order is None else (self.order[q_order], self.order[k_order])
        return i[:, None] - j

    def validate(self, batch: int, rows: int, keys: int) -> None:
        order, who = self.order, type(self).__name__
        if order is not None and not isinstance(order, Tensor):
            raise UsageError(who, f"order as a tensor [{keys}]", repr(order))
        if order is not None and (order.is_floating_point() or order.shape != (keys,) or rows > keys):
            raise UsageError(who, f"order [{keys}], one integer per key", f"{kind_of(order)} with {rows} queries")

    def since(self, first: int) -> Mask:
        return self if self.order is None else replace(self, order=self.order[first:])  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class Causal(_Ordered):
    """A token attends to itself and those before it.

    Args:
        order: Place of each key in its stream [Lk], if not 0, 1, 2, ...
    """

    order: Tensor | None = None

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return (0, None) if self.order is None else (None, None)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return self.ago(q_order, k_order) >= 0


@dataclass(frozen=True, eq=False)
class Window(_Ordered):
    """A token attends to itself and the size - 1 before it. Causal by itself.

    Args:
        size: Keys per query, the token itself included.
        order: As in Causal.

    Raises:
        ValueError: For a size below 1.
    """

    size: int
    order: Tensor | None = None

    def __post_init__(self):
        check_sizes("Window", size=self.size)

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return (0, self.size - 1) if self.order is None else (None, None)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        ago = self.ago(q_order, k_order)
        return (ago >= 0) & (ago < self.size)


@dataclass(frozen=True)
class Band(Mask):
    """A token attends to itself, `before` tokens before it and `after` tokens after it. Band(w, w) is a bidirectional window.

    Args:
        before: Keys before each query.
        after: Keys after each query.

    Raises:
        ValueError: For a number below 0.
    """

    before: int
    after: int

    def __post_init__(self):
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (self.before, self.after)):
            raise UsageError("Band", "two numbers of tokens, 0 or more", f"{self.before!r} and {self.after!r}")

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return -self.after, self.before

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        ago = q_order[:, None] - k_order
        return (ago >= -self.after) & (ago <= self.before)

    def require_past(self, past: int) -> None:
        if self.after:
            raise ValueError(
                f"Band: cached tokens attend to the {self.after} after them, which were not there yet; expected the whole "
                "sequence in one call, or after=0"
            )


class _PerToken(Mask):
    """Base class of Documents and Padding, with a tensor that has a number for each key."""

    column: ClassVar[str]

    @property
    def numbers(self) -> Tensor:
        """The tensor, [Lk] or [B, Lk]."""
        return getattr(self, self.column)

    def of(self, batch: slice | list[int]) -> Mask:
        return replace(self, **{self.column: of_rows(self.numbers, batch)})  # type: ignore[type-var]

    def since(self, first: int) -> Mask:
        return replace(self, **{self.column: self.numbers[..., first:]})  # type: ignore[type-var]

    def validate(self, batch: int, rows: int, keys: int) -> None:
        validate_tokens(f"{type(self).__name__}({self.column})", self.numbers, batch, keys)


@dataclass(frozen=True, eq=False)
class Documents(_PerToken):
    """Tokens attend to tokens with the same number only, wherever those are.

    (`documents=` of a layer differs: there each run of one number is a document.) NaN or infinity in one document reaches no
    output and no gradient of another document's tokens.

    Args:
        ids: Integers [Lk] or [B, Lk], of the keys; queries are the last of them.
        contiguous: Whether the tokens of each document are known to be adjacent, so that the host need not wait for a GPU to
            check this; on the CPU it is checked.

    Raises:
        ValueError: For anything else, and for contiguous=True where a document comes back.
    """

    column = "ids"
    ids: Int[Tensor, ...]
    contiguous: bool = False

    def __post_init__(self):
        if not isinstance(self.ids, Tensor) or self.ids.is_floating_point() or self.ids.dim() not in (1, 2):
            raise UsageError("Documents", "integer ids [Lk] or [B, Lk]", kind_of(self.ids))
        if self.contiguous and in_memory(self.ids):
            changes, distinct = ((x.diff() != 0).sum(-1) for x in (self.ids, self.ids.sort(-1).values))
            if not torch.equal(changes, distinct):
                raise UsageError(
                    "Documents", "the tokens of each document side by side", "contiguous=True and one that returns"
                )

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Int[Tensor, " n"]) -> Documents:
        """Documents from cumulative sequence lengths, as in kernels for packed sequences.

        Args:
            cu_seqlens: Integers [documents + 1], from 0 to the number of keys; an empty document has none.

        Raises:
            ValueError: They do not begin with 0, or decrease.
        """
        integers = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int64, torch.int32)
        fits = integers and cu_seqlens.dim() == 1 and len(cu_seqlens) > 1
        if not fits or cu_seqlens[0] != 0 or bool((cu_seqlens.diff() < 0).any()):
            got = cu_seqlens.tolist() if integers else kind_of(cu_seqlens)
            raise UsageError(
                "cu_seqlens",
                "a tensor of integers from 0 up to the number of keys, such as torch.tensor([0, 5, 9])",
                got,
            )
        token = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        return cls(torch.searchsorted(cu_seqlens[1:], token, right=True), contiguous=True)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        same = self.ids[..., q_order][..., :, None] == self.ids[..., k_order][..., None, :]
        return same[:, None] if same.dim() == 3 else same

    def validate(self, batch: int, rows: int, keys: int) -> None:
        super().validate(batch, rows, keys)
        require_among("Documents", rows, keys)


@dataclass(frozen=True, eq=False)
class Padding(_PerToken):
    """No token attends to keys that are not valid.

    Args:
        valid: Bool or int [Lk] or [B, Lk], True or 1 for real tokens.

    Raises:
        ValueError: For anything else.
    """

    column = "valid"
    valid: Tensor

    def __post_init__(self):
        if not isinstance(self.valid, Tensor) or self.valid.is_floating_point() or self.valid.dim() not in (1, 2):
            raise UsageError("Padding", "valid [B, Lk] of bool or int", kind_of(self.valid))

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        real = self.valid[..., k_order].bool()[..., None, :] & (q_order[:, None] >= q_order[:1, None])
        return real[:, None] if real.dim() == 3 else real


@dataclass(frozen=True, eq=False)
class _Joined(Mask):
    """Base class of AllOf and AnyOf: a combination of masks."""

    masks: tuple[Mask, ...]

    def validate(self, batch: int, rows: int, keys: int) -> None:
        for mask in self.masks:
            mask.validate(batch, rows, keys)

    def of(self, batch: slice | list[int]) -> Mask:
        return type(self)(tuple(mask.of(batch) for mask in self.masks))

    def since(self, first: int) -> Mask:
        return type(self)(tuple(mask.since(first) for mask in self.masks))

    def require_past(self, past: int) -> None:
        for mask in self.masks:
            mask.require_past(past)


class AllOf(_Joined):
    """Pairs that every mask allows; written a & b.

    Args:
        masks: The masks.
    """

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return reduce(_meet, (mask.reach for mask in self.masks), (None, None))

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return reduce(torch.logical_and, (mask.allowed(q_order, k_order) for mask in (NoMask(), *self.masks)))

    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def require_past(self, past: int) -> None:
        if not is_causal(self):
            super().require_past(past)


class AnyOf(_Joined):
    """Pairs that one of the masks allows; written a | b.

    Args:
        masks: The masks.
    """

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        lows, highs = zip(*(mask.reach for mask in self.masks), strict=True)
        return None if None in lows else min(lows), None if None in highs else max(highs)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return reduce(torch.logical_or, (mask.allowed(q_order, k_order) for mask in self.masks))


def is_causal(mask: Mask) -> bool:
    """Whether its reach leaves no key after the query."""
    low, _ = mask.reach
    return low is not None and low >= 0


def require_causal(causal_only: bool, mask: Mask) -> None:
    """ValueError if an encoding has no formula for keys in the future, and the mask does not hide them."""
    if causal_only and not is_causal(mask):
        raise ValueError(
            "the encoding has no meaning for keys in the future: expected a mask with lg.Causal() or Window(size)"
        )


def _meet(a: Reach, b: Reach) -> Reach:
    lows, highs = [r[0] for r in (a, b) if r[0] is not None], [r[1] for r in (a, b) if r[1] is not None]
    return max(lows) if lows else None, min(highs) if highs else None  # torch.compile does not support default=


KNOWN = ("Causal", "Window", "Dilated", "Chunks", "Band", "Prefix", "Global", "Documents", "Padding", "NoMask")


def require_mask(mask: object) -> None:
    """ValueError unless it is a mask; for a name, with the nearest one."""
    if not isinstance(mask, Mask):
        near = nearest(mask, KNOWN) if isinstance(mask, str) else None
        hint = f"; did you mean lg.{near}?" if near else ""
        raise UsageError(
            "mask",
            "lg.Causal(), Window(size), Dilated(size, step), Chunks(size), Band(before, after), "
            "Prefix(length), Global(tokens), Documents(ids), Padding(valid), NoMask() or their & and |",
            f"{kind_of(mask)}{hint}",
        )


def of_rows(tokens: Tensor, batch: slice | list[int]) -> Tensor:
    """Numbers per token of these rows of the batch; one row is broadcast."""
    return tokens[batch] if tokens.dim() > 1 and len(tokens) > 1 else tokens


def kind_of(x: object) -> str:
    """Describe an argument in an error message: dtype and shape of a tensor, else its repr."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else repr(x)


def one_or(size: int, batch: int) -> bool:
    """Whether size is 1 or `batch`; torch.compile does not find symbolic sizes by `in`."""
    return size == 1 or size == batch


def require_among(who: str, rows: int, keys: int) -> None:
    """ValueError if there are more queries than keys."""
    if rows > keys:
        raise UsageError(who, f"queries among the {keys} keys", f"{rows} queries")


def validate_tokens(who: str, tokens: Tensor, batch: int, keys: int) -> None:
    """ValueError unless it is [keys] or [batch, keys]."""
    if tokens.shape[-1] != keys or (tokens.dim() == 2 and not one_or(tokens.shape[0], batch)):
        raise UsageError(who, f"[{keys}] or [{batch}, {keys}], one per key", list(tokens.shape))
