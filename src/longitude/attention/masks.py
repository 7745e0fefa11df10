"""Who may look at whom: predicates over order, document and validity, that combine with & and |.

Order is a token's place in its stream: keys have 0 .. Lk-1, and queries are the last Lq of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.errors import nearest

Reach = tuple[int | None, int | None]
"""Smallest and largest allowed (query order - key order); None: unbounded."""


class Mask:
    """A predicate on pairs of tokens."""

    reach: Reach = (None, None)
    """Bounds that every allowed pair keeps; what lies outside need not be computed."""

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
        """ValueError where tokens that passed before would have had to see those that come now."""

    def __and__(self, other: Mask) -> Mask:
        require_mask(other)
        return AllOf((*self.parts(), *other.parts()))

    def __or__(self, other: Mask) -> Mask:
        require_mask(other)
        return AnyOf((self, other))


@dataclass(frozen=True)
class NoMask(Mask):
    """Every token sees every token."""

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return (q_order[:, None] >= k_order) | True

    def parts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A token sees itself and what came before it. order [Lk]: the place of each key in its stream, if not 0, 1, 2, ..."""

    order: Tensor | None = None

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return (0, None) if self.order is None else (None, None)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        i, j = _places(self.order, q_order, k_order)
        return i[:, None] >= j

    def validate(self, batch: int, rows: int, keys: int) -> None:
        _validate_order("Causal", self.order, rows, keys)

    def since(self, first: int) -> Mask:
        return self if self.order is None else Causal(self.order[first:])


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """A token sees itself and the size - 1 before it: size keys. Causal by itself."""

    size: int
    order: Tensor | None = None

    def __post_init__(self):
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ValueError(f"Window: expected a size of 1 or more keys, got {self.size!r}")

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return (0, self.size - 1) if self.order is None else (None, None)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        i, j = _places(self.order, q_order, k_order)
        ago = i[:, None] - j
        return (ago >= 0) & (ago < self.size)

    def validate(self, batch: int, rows: int, keys: int) -> None:
        _validate_order("Window", self.order, rows, keys)

    def since(self, first: int) -> Mask:
        return self if self.order is None else Window(self.size, self.order[first:])


@dataclass(frozen=True)
class Band(Mask):
    """A token sees itself, `before` tokens before it and `after` tokens after it. Band(w, w) is a window to both sides."""

    before: int
    after: int

    def __post_init__(self):
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (self.before, self.after)):
            raise ValueError(f"Band: expected two numbers of tokens, 0 or more, got {self.before!r} and {self.after!r}")

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return -self.after, self.before

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        ago = q_order[:, None] - k_order
        return (ago >= -self.after) & (ago <= self.before)

    def require_past(self, past: int) -> None:
        if self.after:
            raise ValueError(
                f"Band: cached tokens see the {self.after} after them, which were not there yet; expected the whole sequence "
                "in one call, or after=0"
            )


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Tokens see only tokens with the same number, wherever those stand. ids [Lk] or [B, Lk], of the keys; queries are the last
    of them. (`documents=` of a layer is another thing: there each run of one number is a document.)
    """

    ids: Int[Tensor, ...]

    def __post_init__(self):
        if not isinstance(self.ids, Tensor) or self.ids.is_floating_point() or self.ids.dim() not in (1, 2):
            raise ValueError(f"Documents: expected integer ids [Lk] or [B, Lk], got {kind_of(self.ids)}")

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        same = self.ids[..., q_order][..., :, None] == self.ids[..., k_order][..., None, :]
        return same[:, None] if same.dim() == 3 else same

    def of(self, batch: slice | list[int]) -> Mask:
        return Documents(of_rows(self.ids, batch))

    def since(self, first: int) -> Mask:
        return Documents(self.ids[..., first:])

    def validate(self, batch: int, rows: int, keys: int) -> None:
        validate_tokens("Documents(ids)", self.ids, batch, keys)
        if rows > keys:
            raise ValueError(f"Documents: expected queries among the {keys} keys, got {rows} queries")


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Keys that are not valid are seen by nobody. valid [B, Lk] (or [Lk]), True or 1 for real tokens."""

    valid: Tensor

    def __post_init__(self):
        if not isinstance(self.valid, Tensor) or self.valid.is_floating_point() or self.valid.dim() not in (1, 2):
            raise ValueError(f"Padding: expected valid [B, Lk] of bool or int, got {kind_of(self.valid)}")

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        seen = self.valid[..., k_order].bool()[..., None, :] & (q_order[:, None] >= q_order[:1, None])
        return seen[:, None] if seen.dim() == 3 else seen

    def of(self, batch: slice | list[int]) -> Mask:
        return Padding(of_rows(self.valid, batch))

    def since(self, first: int) -> Mask:
        return Padding(self.valid[..., first:])

    def validate(self, batch: int, rows: int, keys: int) -> None:
        validate_tokens("Padding(valid)", self.valid, batch, keys)


@dataclass(frozen=True, eq=False)
class AllOf(Mask):
    """Pairs that every mask allows; written a & b."""

    masks: tuple[Mask, ...]

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return reduce(_meet, (mask.reach for mask in self.masks), (None, None))

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return reduce(torch.logical_and, (mask.allowed(q_order, k_order) for mask in (NoMask(), *self.masks)))

    def validate(self, batch: int, rows: int, keys: int) -> None:
        for mask in self.masks:
            mask.validate(batch, rows, keys)

    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def of(self, batch: slice | list[int]) -> Mask:
        return AllOf(tuple(mask.of(batch) for mask in self.masks))

    def since(self, first: int) -> Mask:
        return AllOf(tuple(mask.since(first) for mask in self.masks))

    def require_past(self, past: int) -> None:
        if not is_causal(self):
            for mask in self.masks:
                mask.require_past(past)


@dataclass(frozen=True, eq=False)
class AnyOf(Mask):
    """Pairs that one of the masks allows; written a | b."""

    masks: tuple[Mask, ...]

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        lows, highs = zip(*(mask.reach for mask in self.masks), strict=True)
        return None if None in lows else min(lows), None if None in highs else max(highs)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return reduce(torch.logical_or, (mask.allowed(q_order, k_order) for mask in self.masks))

    def of(self, batch: slice | list[int]) -> Mask:
        return AnyOf(tuple(mask.of(batch) for mask in self.masks))

    def since(self, first: int) -> Mask:
        return AnyOf(tuple(mask.since(first) for mask in self.masks))

    def require_past(self, past: int) -> None:
        for mask in self.masks:
            mask.require_past(past)

    def validate(self, batch: int, rows: int, keys: int) -> None:
        for mask in self.masks:
            mask.validate(batch, rows, keys)


def is_causal(mask: Mask) -> bool:
    """Whether its reach leaves no key after the query."""
    low, _ = mask.reach
    return low is not None and low >= 0


def require_causal(causal_only: bool, mask: Mask) -> None:
    """ValueError where the mask lets a query attend to a future that means nothing to an encoding."""
    if causal_only and not is_causal(mask):
        raise ValueError(
            "the encoding has no meaning for keys in the future: expected a mask with lg.Causal() or Window(size)"
        )


def _meet(a: Reach, b: Reach) -> Reach:
    lows, highs = [r[0] for r in (a, b) if r[0] is not None], [r[1] for r in (a, b) if r[1] is not None]
    return max(lows) if lows else None, min(highs) if highs else None  # compilers do not follow default=


KNOWN = ("Causal", "Window", "Dilated", "Band", "Prefix", "Global", "Documents", "Padding", "NoMask")


def require_mask(mask: object) -> None:
    """ValueError unless it is a mask; for a name, with the nearest one."""
    if not isinstance(mask, Mask):
        near = nearest(mask, KNOWN) if isinstance(mask, str) else None
        hint = f"; did you mean lg.{near}?" if near else ""
        raise ValueError(
            "mask: expected lg.Causal(), Window(size), Dilated(size, step), Band(before, after), Prefix(length), "
            "Global(tokens), Documents(ids), Padding(valid), NoMask() or their & and |, "
            f"got {kind_of(mask)}{hint}"
        )


def _places(order: Tensor | None, q_order: Tensor, k_order: Tensor) -> tuple[Tensor, Tensor]:
    return (q_order, k_order) if order is None else (order[q_order], order[k_order])


def of_rows(tokens: Tensor, batch: slice | list[int]) -> Tensor:
    return tokens[batch] if tokens.dim() == 2 and len(tokens) > 1 else tokens


def kind_of(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else repr(x)


def _validate_order(who: str, order: Tensor | None, rows: int, keys: int) -> None:
    if order is not None and not isinstance(order, Tensor):
        raise ValueError(f"{who}: expected order as a tensor [{keys}], got {order!r}")
    if order is not None and (order.is_floating_point() or order.shape != (keys,) or rows > keys):
        raise ValueError(
            f"{who}: expected order [{keys}], one integer per key, got {kind_of(order)} with {rows} queries"
        )


def validate_tokens(who: str, tokens: Tensor, batch: int, keys: int) -> None:
    if tokens.shape[-1] != keys or (tokens.dim() == 2 and tokens.shape[0] not in (1, batch)):
        raise ValueError(f"{who}: expected [{keys}] or [{batch}, {keys}], one per key, got {list(tokens.shape)}")
