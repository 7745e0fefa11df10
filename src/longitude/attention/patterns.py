"""Masks of several regions: bidirectional prefixes, global tokens, dilated windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.attention.masks import Causal, Mask, Reach, kind_of, of_rows, one_or, require_among, validate_tokens
from longitude.errors import UsageError, check_sizes
from longitude.native.derivatives import assert_later, numbers_of
from longitude.positions.coordinates import floor_divide


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
            raise UsageError(
                "Prefix",
                f"a first call with the whole prefix of {longest} tokens, which attend to each other",
                f"{past} tokens in the cache",
            )


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
        either = self.chosen(q_order)[..., :, None] | self.chosen(k_order)[..., None, :]
        return either[:, None] if either.dim() == 3 else either

    def validate(self, batch: int, rows: int, keys: int) -> None:
        assert isinstance(self.tokens, Tensor)
        require_among("Global", rows, keys)
        if self.tokens.dtype == torch.bool:
            validate_tokens("Global(tokens)", self.tokens, batch, keys)
        elif not torch.compiler.is_compiling() and bool((numbers_of(self.tokens) >= keys).any()):
            raise UsageError("Global", f"places below {keys}, the number of keys", int(self.tokens.max()))

    def of(self, batch: slice | list[int]) -> Mask:
        assert isinstance(self.tokens, Tensor)
        return Global(of_rows(self.tokens, batch))

    def since(self, first: int) -> Mask:
        assert isinstance(self.tokens, Tensor)
        if self.tokens.dtype == torch.bool:
            return Global(self.tokens[..., first:])
        return Global(self.tokens[self.tokens >= first] - first)

    def require_past(self, past: int) -> None:
        raise ValueError(
            "Global: cached global tokens would attend to the new ones too; expected the whole sequence in one call, or "
            "(... | lg.Global(tokens)) & lg.Causal()"
        )


@dataclass(frozen=True)
class Dilated(Mask):
    """A causal window with gaps: a token attends to itself and those step, 2 step, ..., (size - 1) step before it.

    Dilated(size, 1) is Window(size).

    Args:
        size: Keys of each query.
        step: Distance between them.

    Raises:
        ValueError: `size` or `step` is below 1 or no int.

    Source:
        Beltagy et al. 2020, arXiv:2004.05150, https://arxiv.org/abs/2004.05150 (section 3.1).
    """

    size: int
    step: int

    def __post_init__(self):
        check_sizes("Dilated", size=self.size, step=self.step)

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return 0, (self.size - 1) * self.step

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        ago = q_order[:, None] - k_order
        return (ago >= 0) & (ago <= (self.size - 1) * self.step) & (ago % self.step == 0)


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

    size: int
    places: Int[Tensor, ...] | None = None
    first: int = 0

    def __post_init__(self):
        check_sizes("Chunks", size=self.size)
        places = self.places
        if places is not None and (
            not isinstance(places, Tensor) or places.is_floating_point() or places.dim() not in (1, 2)
        ):
            raise UsageError("Chunks", "integer places [Lk] or [B, Lk]", kind_of(places))

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        # Places may start over, and tokens of one chunk are then any number of tokens apart.
        return (1 - self.size, self.size - 1) if self.places is None else (None, None)

    def ids(self, order: Int[Tensor, " L"]) -> Int[Tensor, "*B L"]:
        """The chunk of each token of these orders."""
        places = order + self.first if self.places is None else self.places[..., order]
        return floor_divide(places, self.size)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        same = self.ids(q_order)[..., :, None] == self.ids(k_order)[..., None, :]
        return same[:, None] if same.dim() == 3 else same

    def validate(self, batch: int, rows: int, keys: int) -> None:
        require_among("Chunks", rows, keys)
        if self.places is not None:
            validate_tokens("Chunks(places)", self.places, batch, keys)

    def of(self, batch: slice | list[int]) -> Mask:
        return self if self.places is None else replace(self, places=of_rows(self.places, batch))

    def since(self, first: int) -> Mask:
        if self.places is None:
            return replace(self, first=self.first + first)
        return replace(self, places=self.places[..., first:])

    def require_past(self, past: int) -> None:
        raise ValueError(
            "Chunks: cached tokens would attend to the new ones of their chunk too; expected the whole sequence in one call, or "
            "Causal() & lg.Chunks(size)"
        )


@dataclass(frozen=True)
class Ago(Mask):
    """Pairs whose orders differ by first .. last (query - key); None: unbounded. Internal: it masks parts of a call."""

    first: int | None
    last: int | None

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return self.first, self.last

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        ago = q_order[:, None] - k_order
        inside = torch.ones_like(ago, dtype=torch.bool) if self.first is None else ago >= self.first
        return inside if self.last is None else inside & (ago <= self.last)


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


def from_tensor(given: Tensor, batch: int, rows: int, keys: int) -> Mask:
    """Convert a mask tensor of F.scaled_dot_product_attention or transformers: bool, True if a query attends, or 0 and -inf.

    given: [Lq, Lk], [B, Lq, Lk] or [B, 1, Lq, Lk]; a batch of 1 serves all rows. Numbers below a quarter of the dtype's lowest
    count as -inf, as transformers writes it. A causal tensor becomes Causal(), which needs a check of all pairs.

    Raises:
        ValueError: It has another shape, differs between heads, or adds numbers other than 0 and -inf.
    """
    shape = f"bool [{rows}, {keys}] or [{batch}, 1, {rows}, {keys}], for all heads"
    seen = given[:, None] if given.dim() == 3 else given
    fits = given.dim() in (2, 3, 4) and seen.shape[-2] == rows and seen.shape[-1] == keys
    if not fits or given.dim() > 2 and (not one_or(seen.shape[0], batch) or seen.shape[1] != 1):
        raise UsageError("mask", f"{shape}, or a mask such as lg.Causal()", kind_of(given))
    if seen.is_floating_point():
        hidden = seen <= torch.finfo(seen.dtype).min / 4
        other = numbers_of(~hidden & (seen != 0)).any()
        if torch.compiler.is_compiling():
            assert_later(~other, "mask: expected bool, or 0 and -inf")
        elif bool(other):
            raise UsageError(
                "mask",
                f"{shape}, or 0 and -inf",
                f"{kind_of(given)} that adds other numbers to the scores",
                "an encoding with lg.terms.PairBias adds a bias",
            )
        seen = ~hidden
    elif seen.dtype != torch.bool:
        raise UsageError("mask", shape, kind_of(given))
    pairs = Pairs(seen, keys - rows, 0)
    if torch.compiler.is_compiling():  # whether it is causal is not known
        return pairs
    ahead = torch.ones(rows, keys, dtype=torch.bool, device=seen.device).triu(keys - rows + 1)
    return pairs if bool(numbers_of(seen & ahead).any()) else Causal() & pairs
