"""The terms: everything an encoding can do to the scores. Attention applies them whatever encoding they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

__all__ = [
    "Drift",
    "OffsetBias",
    "OffsetVectors",
    "PairBias",
    "RowBias",
    "SinkLogits",
    "Softcap",
    "Temperature",
    "Transport",
]


@dataclass(frozen=True)
class OffsetBias:
    """A bias that depends on the offset alone: score += at(offset).

    Args:
        at: maps offsets [...] to [heads, ...], in float32 or wider.
        reach: all offsets of `reach` or more have the bias of `reach`; None: each may have its own.
        of: the module whose parameters alone decide `at`. While they do not change, attention without gradients may cache the
            table, unless the module contains layers.
    """

    at: Callable[[Tensor], Tensor]
    reach: int | None = None
    of: nn.Module | None = None


@dataclass(frozen=True)
class PairBias:
    """A bias that depends on both positions: score += at(query position, key position).

    Args:
        at: maps query positions [..., Lq, 1] and key positions [..., 1, Lk] to [..., heads, Lq, Lk].
        numbers: intermediate numbers per pair, from which memory is estimated: 64 for a hidden layer of 32, before and after
            its ReLU.
    """

    at: Callable[[Tensor, Tensor], Tensor]
    numbers: int = 64


@dataclass(frozen=True)
class Drift:
    """A difference of levels: score += level of the query's token - level of the key's token.

    Args:
        level: [B, heads, tokens], float32 or wider.
        scaled: the difference is multiplied by the scale of the scores, as q.k is.
    """

    level: Tensor
    scaled: bool = False


@dataclass(frozen=True)
class OffsetVectors:
    """A vector per offset: score += scale (query + shift) . keys(offset), output += sum of weight * values(offset).

    Args:
        keys: maps offsets [...] to [..., head_dim] or, one per head, [heads, ..., head_dim].
        values: the same for the output; None: nothing is added to the output.
        shift: added to the query, [heads, 1, head_dim] or a number.
        reach: all offsets of `reach` or more have the vectors of `reach`; None: each may have its own.
        mix: [B, heads, tokens, n], read instead of query and scale: score += mix . keys(offset), keys of width n. A temperature
            multiplies it as it multiplies the query.
    """

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor] | None = None
    shift: Tensor | float = 0.0
    reach: int | None = None
    mix: Tensor | None = None


@dataclass(frozen=True)
class RowBias:
    """A bias computed from whole rows of scores: score += of(queries, scaled raw scores, allowed).

    Args:
        of: maps queries [B, heads, Lq, head_dim], scores and allowed [B, heads, Lq, Lk] to [B, heads, Lq, Lk].
    """

    of: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Transport:
    """Reflections between key and query: q . H_i H_(i-1) ... H_(j+1) k instead of q . k, where H_t = I - b_t w_t w_t'.

    Args:
        w: [B, heads, tokens, head_dim] of the last tokens among the keys; heads are those of queries or of keys. Earlier keys
            must be reflected up to these tokens already, as in a cache.
        b: [B, heads, tokens].
        chunk: tokens whose reflections are multiplied at once; any number gives the same result.
        first: order of the first of these tokens; attention sets it.
    """

    w: Tensor
    b: Tensor
    chunk: int = 128
    first: int = 0


@dataclass(frozen=True)
class Temperature:
    """A factor of each query: q_i *= at(n_i), before scores are computed. It does not multiply the biases of other terms.

    Attention applies it before a backend runs, so every backend supports it.

    Args:
        at: maps numbers [B or 1, 1, Lq] to factors [B or 1, heads or 1, Lq], float32 or wider.
        of: meaning of n_i: "visible", the number of visible keys of query i, 1 if there are none; or
            "positions", the query's position.
        module: whose parameters decide `at`, if any do.
    """

    at: Callable[[Tensor], Tensor]
    of: Literal["visible", "positions"]
    module: nn.Module | None = None


@dataclass(frozen=True)
class SinkLogits:
    """A logit per head of a virtual key without value: e^logit is added to the denominator of the softmax.

        out' = out sigmoid(lse - logit),    lse' = log(e^lse + e^logit)

    Attention applies it to a backend's output and logsumexp, so every backend that returns both supports it.

    Args:
        logits: [heads], one per head of queries.
    """

    logits: Tensor


@dataclass(frozen=True)
class Softcap:
    """A cap of the products: score = cap tanh(scale q . k / cap), before anything else is added and before the mask.

    Args:
        cap: above 0; no product is above it or below -cap.
    """

    cap: float


Term = OffsetBias | PairBias | Drift | OffsetVectors | RowBias | Transport | Temperature | SinkLogits | Softcap
ADDED = (OffsetBias, PairBias, Drift, OffsetVectors, RowBias, Transport, Softcap)
"""The terms that backends receive; attention applies the others before or after a backend."""
