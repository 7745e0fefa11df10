"""Masks of several regions: a prefix seen both ways, tokens that see and are seen by all, windows with steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.attention.masks import Mask, Reach, kind_of, of_rows, validate_tokens


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """The first `length` tokens of the stream see each other in both directions, everything else is causal:

        i sees j  where  j <= i  or  j < length.

    length: of all rows, or [B], padding on the left included; 0 is plain causality. The prefix-LM mask (Raffel et al. 2020).
    """

    length: int | Int[Tensor, " B"]

    def __post_init__(self):
        if isinstance(self.length, Tensor):
            ok = self.length.dim() == 1 and self.length.dtype in (torch.int64, torch.int32)
            ok = ok and (torch.compiler.is_compiling() or bool((self.length >= 0).all()))
        else:
            ok = isinstance(self.length, int) and not isinstance(self.length, bool) and self.length >= 0
        if not ok:
            raise ValueError(
                f"Prefix: expected a length of 0 or more tokens, an int or integers [B], got {self.length!r}"
            )

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return (None, None) if isinstance(self.length, Tensor) else (min(0, 1 - self.length), None)

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        length = self.length.view(-1, 1, 1, 1) if isinstance(self.length, Tensor) else self.length
        return (k_order <= q_order[:, None]) | (k_order < length)

    def validate(self, batch: int, rows: int, keys: int) -> None:
        if isinstance(self.length, Tensor) and len(self.length) not in (1, batch):
            raise ValueError(f"Prefix: expected one length per row, [{batch}], got {list(self.length.shape)}")
        _require_among("Prefix", rows, keys)

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
            raise ValueError(
                f"Prefix: expected a first call with the whole prefix of {longest} tokens, which see each other, got {past} "
                "tokens in the cache"
            )


@dataclass(frozen=True, eq=False)
class Global(Mask):
    """Some tokens see everything and are seen by everything: i sees j where i or j is one of them.

    tokens: bool [Lk] or [B, Lk], True for these; or their places in the stream, as a list or integers [n]. Joined to a
    local mask, as in Window(64) | Global([0]); a causal model says (Window(64) | Global([0])) & Causal().
    (Beltagy et al. 2020, Zaheer et al. 2020.)
    """

    tokens: Bool[Tensor, ...] | Int[Tensor, " n"] | Sequence[int]

    def __post_init__(self):
        tokens = self.tokens
        if not isinstance(tokens, Tensor):
            try:
                tokens = torch.tensor([*tokens]) if len(tokens) else torch.zeros(0, dtype=torch.long)
            except (TypeError, ValueError):
                raise ValueError(
                    f"Global: expected bool [Lk] or [B, Lk], or places as integers, got {tokens!r}"
                ) from None
        ok = (
            tokens.dim() in (1, 2)
            if tokens.dtype == torch.bool
            else tokens.dim() == 1 and not tokens.is_floating_point()
        )
        if not ok:
            raise ValueError(f"Global: expected bool [Lk] or [B, Lk], or places as integers [n], got {kind_of(tokens)}")
        if tokens.dtype != torch.bool and not torch.compiler.is_compiling() and bool((tokens < 0).any()):
            raise ValueError(f"Global: expected places of 0 or more, got {tokens.tolist()}")
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
        _require_among("Global", rows, keys)
        if self.tokens.dtype == torch.bool:
            validate_tokens("Global(tokens)", self.tokens, batch, keys)
        elif not torch.compiler.is_compiling() and bool((self.tokens >= keys).any()):
            raise ValueError(f"Global: expected places below {keys}, the number of keys, got {int(self.tokens.max())}")

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
            "Global: cached tokens that see everything would see the new ones too; expected the whole sequence in one call, "
            "or (... | lg.Global(tokens)) & lg.Causal()"
        )


@dataclass(frozen=True)
class Dilated(Mask):
    """A token sees `size` keys: itself and those step, 2 step, ..., (size - 1) step before it. Causal by itself.

    Dilated(size, 1) is Window(size). (Beltagy et al. 2020, section 3.1.)
    """

    size: int
    step: int

    def __post_init__(self):
        for name, n in (("a size", self.size), ("a step", self.step)):
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                raise ValueError(f"Dilated: expected {name} of 1 or more, got {n!r}")

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return 0, (self.size - 1) * self.step

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        ago = q_order[:, None] - k_order
        return (ago >= 0) & (ago <= (self.size - 1) * self.step) & (ago % self.step == 0)


@dataclass(frozen=True, eq=False)
class Pairs(Mask):
    """Exactly these pairs of tokens chosen out of a stream. q_first, k_first: the orders that the first ones go by."""

    seen: Bool[Tensor, "*B Lq Lk"]
    q_first: int
    k_first: int

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        return self.seen[..., q_order - self.q_first, :][..., k_order - self.k_first]

    def of(self, batch: slice | list[int]) -> Mask:
        return replace(self, seen=self.seen[batch]) if self.seen.dim() == 4 and len(self.seen) > 1 else self


def _require_among(who: str, rows: int, keys: int) -> None:
    if rows > keys:
        raise ValueError(f"{who}: expected queries among the {keys} keys, got {rows} queries")
