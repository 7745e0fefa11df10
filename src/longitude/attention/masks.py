"""Which keys a query attends to: predicates over order, document and validity, that combine with & and |.

Order is a token's place in its stream: keys have 0 .. Lk-1, and queries are the last Lq of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.errors import UsageError, check_sizes
from longitude.native.derivatives import assert_later, numbers_of
from longitude.positions.coordinates import floor_divide, within

Reach = tuple[int | None, int | None]
"""Smallest and largest allowed (query order - key order); None: unbounded."""


class Mask:
    """Which keys each query attends to: a predicate on pairs of tokens, joined with & and |.

    Attributes:
        reach: Smallest and largest (query order - key order) that it may allow; None: unbounded. Pairs outside are not
            computed.
    """

    reach: Reach = (None, None)
    _columns: ClassVar[tuple[str, ...]] = ()  # names of its tensors with a number for each key, [Lk] or [B, Lk]

    def _by_column(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """The mask with each of its columns changed."""
        columns = {name: change(x) for name in self._columns if (x := getattr(self, name)) is not None}
        return replace(self, **columns) if columns else self  # type: ignore[type-var]

    def allowed(self, q_order: Int[Tensor, " Lq"], k_order: Int[Tensor, " Lk"]) -> Bool[Tensor, ...]:
        """-> [Lq, Lk] or [B, 1, Lq, Lk]."""
        raise NotImplementedError

    def validate(self, batch: int, rows: int, keys: int) -> None:
        """ValueError unless it fits q [batch, H, rows, D] and k [batch, Hkv, keys, D]."""
        for name in self._columns:
            x = getattr(self, name)
            if x is not None and (x.shape[-1] != keys or (x.dim() == 2 and not one_or(x.shape[0], batch))):
                who = f"{type(self).__name__}({name})"
                raise UsageError(who, f"[{keys}] or [{batch}, {keys}], one per key", list(x.shape))

    def require_column(self, expected: str) -> None:
        """ValueError unless its column is a tensor of integers or bools, [Lk] or [B, Lk]."""
        (x,) = (getattr(self, name) for name in self._columns)
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dim() not in (1, 2):
            raise UsageError(type(self).__name__, expected, kind_of(x))

    def parts(self) -> tuple[Mask, ...]:
        """The masks that must all allow a pair."""
        return (self,)

    def of(self, batch: slice | list[int]) -> Mask:
        """The mask of these rows of the batch."""
        return self._by_column(lambda x: of_rows(x, batch))

    def since(self, first: int) -> Mask:
        """The mask of the stream without its first tokens."""
        return self._by_column(lambda x: x[..., first:])

    looks_ahead: bool = False
    """Whether tokens attend to later ones, alone; a mask joined by & may hide them."""

    def require_past(self, past: int) -> None:
        """ValueError if cached tokens would have had to attend to the new ones."""
        if self.looks_ahead:
            what = f"mask: {type(self).__name__}, in which cached tokens attend to later ones"
            raise UsageError(what, "the whole sequence in one call, or (...) & lg.Causal()", f"{past} cached tokens")

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


class _Offsets(Mask):
    """Base class of masks that allow all pairs in their reach."""

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return within(q_order[:, None] - k_order, *self.reach)


@dataclass(frozen=True)
class Causal(_Offsets):
    """A token attends to itself and those before it."""

    reach = (0, None)


@dataclass(frozen=True)
class Window(_Offsets):
    """A token attends to itself and the size - 1 before it. Causal by itself.

    Args:
        size: Keys per query, the token itself included.

    Raises:
        ValueError: For a size below 1.
    """

    size: int

    def __post_init__(self):
        check_sizes("Window", size=self.size)

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return 0, self.size - 1


@dataclass(frozen=True)
class Band(_Offsets):
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

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        return self.after > 0


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Tokens attend to tokens with the same number only, wherever those are.

    (`documents=` of a layer differs: there each run of one number is a document.) NaN or infinity in one document reaches no
    output and no gradient of another document's tokens.

    Args:
        ids: Integers [Lk] or [B, Lk], of the keys; queries are the last of them.

    Raises:
        ValueError: For anything else.
    """

    _columns = ("ids",)
    ids: Int[Tensor, ...]

    def __post_init__(self):
        self.require_column("integer ids [Lk] or [B, Lk]")

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Int[Tensor, " n"]) -> Documents:
        """Documents from cumulative sequence lengths, as in kernels for packed sequences.

        Args:
            cu_seqlens: Integers [documents + 1], from 0 to the number of keys; an empty document has none.

        Raises:
            ValueError: They do not begin with 0, or decrease.
        """
        return cls(numbers_by_ends("cu_seqlens", cu_seqlens))

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return equal_pairs(self.ids[..., q_order], self.ids[..., k_order])

    def validate(self, batch: int, rows: int, keys: int) -> None:
        super().validate(batch, rows, keys)
        require_among("Documents", rows, keys)


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """No token attends to keys that are not valid.

    Args:
        valid: Bool or int [Lk] or [B, Lk], True or 1 for real tokens.

    Raises:
        ValueError: For anything else.
    """

    _columns = ("valid",)
    valid: Tensor

    def __post_init__(self):
        self.require_column("valid [Lk] or [B, Lk] of bool or int")

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return for_heads(self.valid[..., k_order].bool()[..., None, :] & (q_order[:, None] >= q_order[:1, None]))


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """The prefix-LM mask: the first tokens attend to each other in both directions, everything else is causal.

        query i attends to key j  where  j <= i  or  j < length

    Args:
        length: Tokens of the prefix, of all rows or integers [B]; padding on the left counts. 0 is plain causality.

    Raises:
        ValueError: `length` is negative or no integer; in attention, not one per row.

    Source:
        Raffel et al. 2020, arXiv:1910.10683, https://arxiv.org/abs/1910.10683 (section 3.2.1).
    """

    length: int | Int[Tensor, " B"]

    def __post_init__(self):
        length = self.length
        if isinstance(length, Tensor):
            ok = length.dim() == 1 and length.dtype in (torch.int64, torch.int32)
            ok = ok and (torch.compiler.is_compiling() or bool((numbers_of(length) >= 0).all()))
        else:
            ok = isinstance(length, int) and not isinstance(length, bool) and length >= 0
        if not ok:
            raise UsageError("Prefix", "a length of 0 or more tokens, an int or integers [B]", repr(length))

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return (None, None) if isinstance(self.length, Tensor) else (min(0, 1 - self.length), None)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        length = self.length.view(-1, 1, 1, 1) if isinstance(self.length, Tensor) else self.length
        return (k_order <= q_order[:, None]) | (k_order < length)

    def validate(self, batch: int, rows: int, keys: int) -> None:
        if isinstance(self.length, Tensor) and not one_or(len(self.length), batch):
            raise UsageError("Prefix", f"one length per row, [{batch}]", list(self.length.shape))
        require_among("Prefix", rows, keys)

    def of(self, batch: slice | list[int]) -> Mask:
        several = isinstance(self.length, Tensor) and len(self.length) > 1
        return Prefix(self.length[batch]) if several else self  # type: ignore[index]

    def since(self, first: int) -> Mask:
        if isinstance(self.length, Tensor):
            return Prefix((self.length - first).clamp(min=0))
        return Prefix(max(0, self.length - first))

    def require_past(self, past: int) -> None:
        longest = int(self.length.max()) if isinstance(self.length, Tensor) else self.length
        if past < longest:
            expected = f"a first call with the whole prefix of {longest} tokens, which attend to each other"
            raise UsageError("Prefix", expected, f"{past} tokens in the cache")


@dataclass(frozen=True, eq=False)
class Global(Mask):
    """Global tokens attend to every token, and every token attends to them.

    Joined to a local mask, as in Window(64) | Global([0]); in a causal model (Window(64) | Global([0])) & Causal().

    Args:
        tokens: Bool [Lk] or [B, Lk], True for global tokens; or their orders in the stream, a list or integers [n].

    Raises:
        ValueError: `tokens` is of another kind or shape, or an order is negative or beyond the keys.

    Source:
        Beltagy et al. 2020, arXiv:2004.05150, https://arxiv.org/abs/2004.05150;
        Zaheer et al. 2020, arXiv:2007.14062, https://arxiv.org/abs/2007.14062.
    """

    _columns = ("tokens",)
    looks_ahead = True
    tokens: Bool[Tensor, ...] | Int[Tensor, " n"] | Sequence[int]

    def __post_init__(self):
        tokens = self.tokens
        expected = "bool [Lk] or [B, Lk], or places as integers [n]"
        if not isinstance(tokens, Tensor):
            try:
                tokens = torch.tensor([*tokens]) if len(tokens) else torch.zeros(0, dtype=torch.long)
            except (TypeError, ValueError):
                raise UsageError("Global", expected, repr(tokens)) from None
        if tokens.dim() != 1 and (tokens.dtype != torch.bool or tokens.dim() != 2) or tokens.is_floating_point():
            raise UsageError("Global", expected, kind_of(tokens))
        if tokens.dtype != torch.bool and not torch.compiler.is_compiling() and bool((numbers_of(tokens) < 0).any()):
            raise UsageError("Global", "places of 0 or more", tokens.tolist())
        object.__setattr__(self, "tokens", tokens)

    def chosen(self, order: Int[Tensor, " L"]) -> Bool[Tensor, "*B L"]:
        """Which tokens of these orders are global."""
        tokens = self.tokens
        assert isinstance(tokens, Tensor)
        return tokens[..., order] if tokens.dtype == torch.bool else torch.isin(order, tokens.to(order.device))

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return for_heads(self.chosen(q_order)[..., :, None] | self.chosen(k_order)[..., None, :])

    def validate(self, batch: int, rows: int, keys: int) -> None:
        assert isinstance(self.tokens, Tensor)
        require_among("Global", rows, keys)
        if self.tokens.dtype == torch.bool:
            super().validate(batch, rows, keys)
        elif not torch.compiler.is_compiling() and bool((numbers_of(self.tokens) >= keys).any()):
            raise UsageError("Global", f"places below {keys}, the number of keys", int(self.tokens.max()))

    def since(self, first: int) -> Mask:
        assert isinstance(self.tokens, Tensor)
        if self.tokens.dtype == torch.bool:
            return super().since(first)
        return Global(self.tokens[self.tokens >= first] - first)


@dataclass(frozen=True, eq=False)
class Chunks(Mask):
    """Chunked attention: a sequence is cut into chunks of `size` tokens, and tokens attend within their chunk.

        floor(place of i / size) = floor(place of j / size)

    Joined to causality, as in Causal() & Chunks(8192), it is Llama 4's attention in its layers with rotation.

    Args:
        size: Tokens of a chunk.
        places: Index of each key in its sequence, integers [Lk] or [B, Lk], for padded or packed sequences; None: 0, 1, 2, ...
        first: Index of the first key if `places` is None.

    Raises:
        ValueError: `size` is below 1, places are no integers or of another shape.

    Source:
        Meta AI 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence/
    """

    _columns = ("places",)
    looks_ahead = True
    size: int
    places: Int[Tensor, ...] | None = None
    first: int = 0

    def __post_init__(self):
        check_sizes("Chunks", size=self.size)
        if self.places is not None:
            self.require_column("integer places [Lk] or [B, Lk]")

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        # Places may start over, and tokens of one chunk are then any number of tokens apart.
        return (1 - self.size, self.size - 1) if self.places is None else (None, None)

    def ids(self, order: Int[Tensor, " L"]) -> Int[Tensor, "*B L"]:
        """The chunk of each token of these orders."""
        places = order + self.first if self.places is None else self.places[..., order]
        return floor_divide(places, self.size)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return equal_pairs(self.ids(q_order), self.ids(k_order))

    def validate(self, batch: int, rows: int, keys: int) -> None:
        require_among("Chunks", rows, keys)
        super().validate(batch, rows, keys)

    def since(self, first: int) -> Mask:
        return replace(self, first=self.first + first) if self.places is None else super().since(first)


@dataclass(frozen=True)
class Ago(_Offsets):
    """Pairs whose orders differ by first .. last (query - key); None: unbounded. Internal: it masks parts of a call."""

    first: int | None
    last: int | None

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return self.first, self.last


@dataclass(frozen=True, eq=False)
class Pairs(Mask):
    """Exactly these pairs of tokens chosen out of a stream. q_first, k_first: the orders of the first ones."""

    seen: Bool[Tensor, "*B Lq Lk"]
    q_first: int
    k_first: int

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return self.seen[..., q_order - self.q_first, :][..., k_order - self.k_first]

    def of(self, batch: slice | list[int]) -> Mask:
        return replace(self, seen=self.seen[batch]) if self.seen.dim() == 4 and len(self.seen) > 1 else self


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


def require_mask(mask: object) -> None:
    """ValueError unless it is a mask."""
    if not isinstance(mask, Mask):
        raise UsageError(
            "mask",
            "lg.Causal(), Window(size), Chunks(size), Band(before, after), "
            "Prefix(length), Global(tokens), Documents(ids), Padding(valid), NoMask() or their & and |",
            kind_of(mask),
        )


def of_rows(tokens: Tensor, batch: slice | list[int]) -> Tensor:
    """Numbers per token of these rows of the batch; one row is broadcast."""
    return tokens[batch] if tokens.dim() > 1 and len(tokens) > 1 else tokens


def for_heads(pairs: Bool[Tensor, "*B Lq Lk"]) -> Bool[Tensor, ...]:
    """[B, Lq, Lk] -> [B, 1, Lq, Lk]; [Lq, Lk] is unchanged."""
    return pairs[:, None] if pairs.dim() == 3 else pairs


def equal_pairs(i: Int[Tensor, "*B Lq"], j: Int[Tensor, "*B Lk"]) -> Bool[Tensor, ...]:
    """Pairs of a query and a key with the same number."""
    return for_heads(i[..., :, None] == j[..., None, :])


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


def numbers_by_ends(name: str, ends: Int[Tensor, " n+1"], length: int | None = None) -> Int[Tensor, " L"]:
    """Where n documents begin, and the length: cumulative sequence lengths -> a number per token. ValueError for others."""
    if not isinstance(ends, Tensor) or ends.dim() != 1 or ends.is_floating_point() or len(ends) < 2:
        raise UsageError(name, "integers [documents + 1], such as torch.tensor([0, 5, 9])", kind_of(ends))
    if not torch.compiler.is_compiling():
        bounds = ends.tolist()
        length = bounds[-1] if length is None else length
        if bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
            raise UsageError(name, f"integers that rise from 0 to the {length} tokens", bounds)
    token = torch.arange(int(ends[-1]) if length is None else length, device=ends.device)
    return torch.bucketize(token, ends[1:].long(), right=True)


def from_tensor(tensor: Tensor, batch: int, rows: int, keys: int) -> Mask:
    """Convert a mask tensor of F.scaled_dot_product_attention or transformers: bool, True if a query attends, or 0 and -inf.

    tensor: [Lq, Lk], [B, Lq, Lk] or [B, 1, Lq, Lk]; a batch of 1 serves all rows. Numbers below a quarter of the dtype's lowest
    count as -inf, as transformers writes it. A causal tensor becomes Causal(), which needs a check of all pairs.

    Raises:
        ValueError: It has another shape, differs between heads, or adds numbers other than 0 and -inf.
    """
    shape = f"bool [{rows}, {keys}] or [{batch}, 1, {rows}, {keys}], for all heads"
    seen = for_heads(tensor)
    fits = tensor.dim() in (2, 3, 4) and seen.shape[-2] == rows and seen.shape[-1] == keys
    if not fits or tensor.dim() > 2 and (not one_or(seen.shape[0], batch) or seen.shape[1] != 1):
        raise UsageError("mask", f"{shape}, or a mask such as lg.Causal()", kind_of(tensor))
    if seen.is_floating_point():
        hidden = seen <= torch.finfo(seen.dtype).min / 4
        other = numbers_of(~hidden & (seen != 0)).any()
        if torch.compiler.is_compiling():
            assert_later(~other, "mask: expected bool, or 0 and -inf")
        elif bool(other):
            got = f"{kind_of(tensor)} that adds other numbers to the scores"
            raise UsageError("mask", f"{shape}, or 0 and -inf", got, "an encoding with lg.terms.PairBias adds a bias")
        seen = ~hidden
    elif seen.dtype != torch.bool:
        raise UsageError("mask", shape, kind_of(tensor))
    pairs = Pairs(seen, keys - rows, 0)
    if torch.compiler.is_compiling():  # whether it is causal is not known
        return pairs
    ahead = torch.ones(rows, keys, dtype=torch.bool, device=seen.device).triu(keys - rows + 1)
    return pairs if bool(numbers_of(seen & ahead).any()) else Causal() & pairs
