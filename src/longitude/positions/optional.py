"""What one or two encodings have besides the five methods of `Encoding`: define the method, and it is used.

`Composed` has them all, so whatever calls an encoding composes it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longitude.positions.terms import Term

Columns = dict[str, Tensor]
"""What content decides about position, per token: name -> [B, heads, tokens, ...]."""


class ReadsContent(Protocol):
    """Columns of numbers made of the tokens' content, which `terms` is given: FoX, PaTH."""

    carries: bool = False
    """Its context passes a state from token to token, so that a cache cannot be cropped."""
    passing_columns: frozenset[str] = frozenset()
    """Columns of which only those of new tokens are needed: a cache does not keep them."""

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        """What the next tokens of a sequence decide by their content.

        Args:
            x: [B, L, dim].
            carry: what the call for the tokens before returned; None for the first tokens.
            documents: [B, L]: tokens of different numbers are of different documents; padding counts as one of its own.

        Returns:
            Their columns, and the carry for the tokens after them.
        """
        ...

    def terms(self, context: Columns) -> tuple[Term, ...]:
        """What is added to or done to the scores, given the columns of all tokens."""
        ...


class ReadsIds(Protocol):
    """Positions of its own, made of the tokens' ids: Abacus, Coupled."""

    def places(self, ids: Tensor, documents: Tensor | None = None, random_start: bool = False) -> Tensor:
        """What `embed` gets instead of the model's positions.

        Args:
            ids: [B, L], from the first token of each row on.
            documents: [B, L]: tokens of different numbers are of different documents; negative for padding.
            random_start: as in training, where an encoding may draw where they begin.

        Returns:
            Integers [B, L]; a token's are decided by it and those before it.
        """
        ...


class FollowsLength(Protocol):
    """Tables that change while a sequence grows, as those of dynamic NTK do. Its stable_keys is False where they do."""

    def length_at(self, query: Any, newest: Any) -> Any:
        """The length that tables follow, for a query at position `query` whose newest key is at position `newest`.

        Queries of different lengths need different tables for the same key, so keys are kept untransformed, and both are
        transformed by prepare(positions, length) once for each length.

        Args:
            query: int, or int64 tensor.
            newest: int, or int64 tensor of the same shape.

        Returns:
            int or tensor alike; None: tables follow no length, one set serves every query and key.
        """
        ...


@dataclass(frozen=True)
class Region:
    """Pairs of a query and a key that an encoding moves alike: the query at position i to queries(i), the key at j to keys(j).

        first <= floor(i / block) - floor(j / block) <= last

    The regions of an encoding are disjoint, and every pair that a causal mask allows is in one. Attention over each of them is
    attention over parts of the keys, which are merged by their logsumexp.

    Args:
        queries: maps positions [...] to those that queries are rotated to, integers or float64 [...].
        keys: the same for keys.
        first: smallest difference; None: unbounded.
        last: largest difference; None: unbounded.
        block: positions that count as one; 1: the difference is the offset.
    """

    queries: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    first: int | None = None
    last: int | None = None
    block: int = 1

    def holds(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether pairs of positions, broadcast against each other, are in it."""
        ago = i - j if self.block == 1 else _floor(i, self.block) - _floor(j, self.block)
        inside = torch.ones_like(ago, dtype=torch.bool) if self.first is None else ago >= self.first
        return inside if self.last is None else inside & (ago <= self.last)


def _floor(positions: Tensor, block: int) -> Tensor:
    return positions.div(block, rounding_mode="floor")


class MovesPositions(Protocol):
    """Positions that depend on the pair of query and key, as ReRoPE's do. Its stable_keys is False."""

    def regions(self) -> tuple[Region, ...]:
        """Where it puts queries and keys: `prepare` then gets a keyword `move`, the map of a region for positions.

        Returns:
            Disjoint regions of all pairs.
        """
        ...


class Widens(Protocol):
    """Queries and keys that leave wider than they came, as PoPE's do; the scale of the scores stays that of the first width."""

    widens: int
    """How many times."""


class ScalesSoftmax(Protocol):
    """A factor of the scores' scale, as DeepSeek's YaRN has one; a model passes it in `scale`, nothing here does."""

    softmax_factor: float


class Together(Protocol):
    """Queries and keys in one call, where that is cheaper than two."""

    def queries_and_keys(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, ...]:
        """Q and k of the same tokens, each as by `queries` and `keys`."""
        ...


class Extends(Protocol):
    """Parameters that serve more positions without training. An encoding without it has no end of its own."""

    @classmethod
    def extended(cls, options: Mapping[str, Any], scheme: Any, original: int, length: int) -> Mapping[str, Any] | None:
        """Options of the same class for more positions.

        Args:
            options: all of those that it was trained with.
            scheme: of lg.scaling; Linear is position interpolation, for tables too.
            original: positions of its training.
            length: positions to serve.

        Returns:
            The options; the same where these have no end of their own; None where the scheme does not extend it.
        """
        ...
