"""Optional methods of encodings besides the five of `Encoding`: they are called if an encoding defines them.

`Composed` has all of them, so callers compose an encoding first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longitude.positions.coordinates import floor_divide
from longitude.positions.terms import Term

Columns = dict[str, Tensor]
"""Content-dependent tensors of an encoding, per token: name -> [B, heads, tokens, ...]."""


class ReadsContent(Protocol):
    """Encodings that compute columns from the tokens' content, as input to `terms`: FoX, PaTH, Inkling."""

    carries: bool = False
    """Whether its context passes a state from token to token, so that a cache cannot be cropped."""
    columns: frozenset[str] = frozenset()
    """Names of its columns; two encodings of a list have none in common."""
    passing_columns: frozenset[str] = frozenset()
    """Names of columns needed only for new tokens: a cache does not keep them, and rewrites its keys by them."""
    query_columns: frozenset[str] = frozenset()
    """Names of columns that only a token's own query reads: a cache does not keep them."""

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        """Compute the columns of the next tokens of a sequence from their content.

        Args:
            x: [B, L, dim].
            carry: the carry returned by the call for the previous tokens; None for the first tokens.
            documents: document numbers [B, L]; padding counts as a separate document.

        Returns:
            Their columns, and the carry for the tokens after them.
        """
        ...

    def terms(self, context: Columns) -> tuple[Term, ...]:
        """Terms that attention adds or applies to the scores, from the columns of all tokens."""
        ...


class ReadsIds(Protocol):
    """Encodings that compute positions from the token ids: Abacus, Coupled."""

    def places(self, ids: Tensor, documents: Tensor | None = None, random_start: bool = False) -> Tensor:
        """Compute the positions that `embed` gets instead of the model's.

        Args:
            ids: [B, L], from the first token of each row on.
            documents: document numbers [B, L]; negative for padding.
            random_start: whether an encoding may draw a random start, as in training.

        Returns:
            Integers [B, L]; a token's position depends only on it and earlier tokens.
        """
        ...


class FollowsLength(Protocol):
    """Encodings whose tables change while a sequence grows, such as dynamic NTK; stable_keys is False if they do."""

    def length_at(self, query: Any, newest: Any) -> Any:
        """Return the length that tables depend on, for a query at position `query` and its newest key at position `newest`.

        Queries of different lengths need different tables for the same key. Keys are therefore cached untransformed, and
        queries and keys are transformed by prepare(positions, length) once for each length.

        Args:
            query: int, or int64 tensor.
            newest: int, or int64 tensor of the same shape.

        Returns:
            An int or tensor, as the arguments; None: tables do not depend on length, one set serves every query and key.
        """
        ...


@dataclass(frozen=True)
class Region:
    """Pairs of queries and keys for which an encoding uses the positions queries(i) for i, and keys(j) for j.

        first <= floor(i / block) - floor(j / block) <= last

    The regions of an encoding are disjoint, and every pair that a causal mask allows is in one. Attention runs in each region,
    over a part of the keys, and results are merged by their logsumexp.

    Args:
        queries: maps positions [...] to the positions used to rotate queries, integers or float64 [...].
        keys: maps positions [...] to the positions used to rotate keys.
        first: smallest difference; None: unbounded.
        last: largest difference; None: unbounded.
        block: number of consecutive positions that share an index; 1: the difference is the offset.
    """

    queries: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    first: int | None = None
    last: int | None = None
    block: int = 1

    def holds(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether pairs of positions, broadcast against each other, are in the region."""
        ago = i - j if self.block == 1 else floor_divide(i, self.block) - floor_divide(j, self.block)
        inside = torch.ones_like(ago, dtype=torch.bool) if self.first is None else ago >= self.first
        return inside if self.last is None else inside & (ago <= self.last)


class MovesPositions(Protocol):
    """Encodings whose positions depend on the pair of query and key, such as ReRoPE; stable_keys is False."""

    def regions(self) -> tuple[Region, ...]:
        """Return the regions; `prepare` then gets a keyword `move`, the map of positions of a region.

        Returns:
            Disjoint regions of all pairs.
        """
        ...


class Widens(Protocol):
    """Encodings that widen queries and keys, such as PoPE; the scale of the scores stays that of the original width."""

    widens: int
    """Factor by which the width grows."""


class ScalesSoftmax(Protocol):
    """Encodings with a factor for the scale of scores (DeepSeek's YaRN). Latent attention applies it; else pass `scale`."""

    softmax_factor: float


class Together(Protocol):
    """Encodings that transform queries and keys in one call, if that is cheaper than two."""

    def queries_and_keys(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, ...]:
        """Transform q and k of the same tokens, as `queries` and `keys` do."""
        ...


class RotatesValues(Protocol):
    """Encodings that also transform values, and outputs back, such as RoPE with rotate_values."""

    rotate_values: bool
    """Whether this encoding does; if not, the two methods change nothing."""

    def values(self, v: Tensor, prepared: Any) -> Tensor:
        """Transform values v [B, Hkv, L, head_dim] at the positions of the keys; the shape stays the same."""
        ...

    def outputs(self, out: Tensor, prepared: Any) -> Tensor:
        """Transform outputs [B, H, L, head_dim] back at the positions of the queries; the shape stays the same."""
        ...


class Extends(Protocol):
    """Encodings with a maximum length that can be extended without training. Others have no maximum."""

    @classmethod
    def extended(cls, options: Mapping[str, Any], scheme: Any, original: int, length: int) -> Mapping[str, Any] | None:
        """Options of the same class for more positions.

        Args:
            options: all options of the trained encoding.
            scheme: a scheme of lg.scaling; Linear is position interpolation, for tables too.
            original: number of positions in training.
            length: number of positions needed.

        Returns:
            The options; unchanged if they have no maximum length; None if the scheme does not extend the encoding.
        """
        ...
