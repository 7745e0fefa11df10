"""The terms: everything an encoding can do to the scores. Attention applies them whatever encoding they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.positions.formulas import Counted, NormalizedOffset

__all__ = [
    "Drift",
    "OffsetBias",
    "OffsetVectors",
    "PairBias",
    "RowBias",
    "SinkLogits",
    "Temperature",
    "Term",
    "Transport",
]


def require_shape(name: str, x: Tensor, q: Tensor, *shapes: tuple[int, ...]) -> None:
    """UsageError unless x has one of the shapes, floating-point numbers, and the device of q: kernels read it unchecked."""
    # Number by number: dynamo does not find a tuple of symbolic lengths in another one.
    fits = any(len(shape) == x.dim() and all(a == b for a, b in zip(x.shape, shape, strict=True)) for shape in shapes)
    if not fits or not x.is_floating_point() or x.device != q.device:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise UsageError(name, f"floats {expected} on {q.device}", f"{x.dtype} {list(x.shape)} on {x.device}")


def of_either_heads(q: Tensor, k: Tensor, *rest: int) -> list[tuple[int, ...]]:
    """Shapes [B, heads, *rest] with the heads of queries or of keys."""
    return [(q.shape[0], heads, *rest) for heads in (q.shape[1], k.shape[1])]


def require_among_keys(q: Tensor, k: Tensor) -> None:
    """UsageError if there are more queries than keys: a term of tokens has columns of the keys alone."""
    if q.shape[2] > k.shape[2]:
        raise UsageError("the encoding", "queries among the keys", f"{q.shape[2]} queries and {k.shape[2]} keys")


class Scored(Protocol):
    """What terms read of a call whose scores they add to: attention's Request."""

    q: Tensor
    k: Tensor
    scale: float

    @property
    def contiguous(self) -> bool:
        """Whether positions are known to count up by one without reading them."""
        ...

    def places(self) -> tuple[Tensor, Tensor]:
        """Positions of queries [..., Lq] and keys [..., Lk]."""
        ...

    def q_tokens(self) -> Tensor:
        """Order of each query in the sequence, [Lq]."""
        ...

    def k_tokens(self) -> Tensor:
        """Order of each key in the sequence, [Lk]."""
        ...


class Term:
    """Base class of terms. A new kind is one class: `dense` is all that the reference and the chunked backend need.

    Faster backends list the kinds that they support.

    Attributes:
        added: whether backends receive it; attention applies the others before or after a backend.
        reads_positions: whether it depends on positions.
        reads_axes: whether it takes positions of several axes, [..., L, axes].
        reads_query: whether it reads the queries as they are after all rotations.
        of_tokens: names of its tensors with an entry per token, [B, heads, tokens, ...], for all tokens or the last ones.
    """

    added: ClassVar[bool] = True
    reads_positions: ClassVar[bool] = False
    reads_axes: ClassVar[bool] = False
    reads_query: ClassVar[bool] = False
    of_tokens: ClassVar[tuple[str, ...]] = ()

    def require(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """UsageError unless its tensors fit queries [B, H, Lq, D], keys [B, Hkv, Lk, D] and values [B, Hkv, Lk, Dv]."""

    def dense(self, r: Scored, q: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
        """The numbers added to the scores of a request, [..., heads, Lq, Lk].

        q: its queries in float32 or wider. scores [B, H, Lq, Lk]: scale q.k. allowed [..., Lq, Lk]: visible pairs.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no dense()")

    def numbers_of(self, r: Scored, pairs: int) -> int:
        """Numbers that it allocates on the way to its bias, beyond a few [B, H, Lq, Lk].

        pairs: Lq Lk, times B if positions may differ between the sequences of the batch.
        """
        return 0

    def signature(self) -> tuple:
        """What its cost depends on: its class, its numbers, the shapes of its tensors, the classes of its functions."""
        values = vars(self).values()
        return type(self), *[x.shape if isinstance(x, Tensor) else type(x) if callable(x) else x for x in values]

    def placed(self, rows: int, keys: int) -> Term:
        """The term for queries that are the last `rows` of the tokens, with `keys` keys."""
        return self

    def of_queries(self, batch: slice | list[int], rows: slice) -> Term:
        """The term for some sequences of the batch and some of their queries."""
        return self

    def behind_zeros(self, width: int) -> Term:
        """The term for queries and keys with `width` zeros in front."""
        return self


@dataclass(frozen=True)
class OffsetBias(Term):
    """A bias that depends on the offset alone: score += at(offset).

    Args:
        at: maps offsets [...] to [heads, ...], in float32 or wider.
        reach: all offsets of `reach` or more have the bias of `reach`; None: each may have its own.
        of: the module whose parameters alone decide `at`. While they do not change, attention without gradients may cache the
            table, unless the module contains layers.
    """

    reads_positions = True
    at: Callable[[Tensor], Tensor]
    reach: int | None = None
    of: nn.Module | None = None

    def dense(self, r: Scored, q: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
        return self.bias(r)

    def bias(self, r: Scored) -> Tensor:
        """The bias of all pairs, [..., heads, Lq, Lk]."""
        i, j = r.places()
        offsets = i[..., :, None] - j[..., None, :]
        bias = self.at(offsets)
        require_shape("OffsetBias", bias, r.q, (r.q.shape[1], *offsets.shape), (1, *offsets.shape))
        return bias if bias.dim() == 3 else bias.movedim(0, 1)


@dataclass(frozen=True)
class PairBias(Term):
    """A bias that depends on both positions: score += at(query position, key position).

    Args:
        at: maps query positions [..., Lq, 1] and key positions [..., 1, Lk] to [..., heads, Lq, Lk].
        numbers: intermediate numbers per pair, from which memory is estimated: 64 for a hidden layer of 32, before and after
            its ReLU.
    """

    reads_positions = True
    at: Callable[[Tensor, Tensor], Tensor]
    numbers: int = 64

    def numbers_of(self, r: Scored, pairs: int) -> int:
        return self.numbers * pairs

    def require(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if isinstance(self.at, NormalizedOffset):
            self.at.require(q)

    def dense(self, r: Scored, q: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
        return self.bias(r)

    def bias(self, r: Scored) -> Tensor:
        """The bias of all pairs, [..., heads, Lq, Lk]."""
        i, j = r.places()
        bias = self.at(i[..., :, None], j[..., None, :])
        *batch, rows, keys = torch.broadcast_shapes((*i.shape, 1), (*j.shape[:-1], 1, j.shape[-1]))
        require_shape("PairBias", bias, r.q, (*batch, r.q.shape[1], rows, keys), (*batch, 1, rows, keys))
        return bias


@dataclass(frozen=True)
class Drift(Term):
    """A difference of levels: score += level of the query's token - level of the key's token.

    Args:
        level: [B, heads, tokens], float32 or wider.
        scaled: the difference is multiplied by the scale of the scores, as q.k is.
    """

    of_tokens = ("level",)
    level: Tensor
    scaled: bool = False

    def require(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        require_among_keys(q, k)
        require_shape("Drift.level", self.level, q, *of_either_heads(q, k, k.shape[2]))

    def dense(self, r: Scored, q: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
        level = self.level.repeat_interleave(r.q.shape[1] // self.level.shape[1], 1)
        drift = level[..., r.q_tokens(), None] - level[..., None, r.k_tokens()]
        return r.scale * drift if self.scaled else drift

    def of_queries(self, batch: slice | list[int], rows: slice) -> Term:
        return replace(self, level=self.level[batch])


@dataclass(frozen=True)
class OffsetVectors(Term):
    """A vector per offset: score += scale (query + shift) . keys(offset), output += sum of weight * values(offset).

    Args:
        keys: maps offsets [...] to [..., head_dim] or, one per head, [heads, ..., head_dim].
        values: the same for the output; None: nothing is added to the output.
        shift: added to the query, [heads, 1, head_dim] or a number.
        reach: all offsets of `reach` or more have the vectors of `reach`; None: each may have its own.
        mix: [B, heads, tokens, n], read instead of query and scale: score += mix . keys(offset), keys of width n. A temperature
            multiplies it as it multiplies the query.
    """

    reads_positions = True
    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor] | None = None
    shift: Tensor | float = 0.0
    reach: int | None = None
    mix: Tensor | None = None

    @property
    def reads_query(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mix is None

    def numbers_of(self, r: Scored, pairs: int) -> int:
        """A column per offset, before it moves to its key; or a vector per pair and head."""
        batch, heads, rows, width = r.q.shape
        return 2 * batch * heads * rows * (rows + r.k.shape[2]) if r.contiguous else heads * width * pairs

    def require(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        heads, width = q.shape[1], q.shape[3]
        if self.mix is not None:
            require_among_keys(q, k)
            width = self.mix.shape[-1]
            require_shape("OffsetVectors.mix", self.mix, q, *of_either_heads(q, k, q.shape[2], width))
        if isinstance(self.shift, Tensor):
            whole = heads, 1, width
            require_shape("OffsetVectors.shift", self.shift, q, whole, (1, 1, width), whole[1:], whole[2:], ())
        nearest = torch.zeros(1, dtype=torch.long, device=q.device)
        require_shape("OffsetVectors.keys", self.keys(nearest), q, (1, width), (heads, 1, width), (1, 1, width))
        if self.values is not None:
            width = v.shape[3]
            require_shape("OffsetVectors.values", self.values(nearest), q, (1, width), (heads, 1, width), (1, 1, width))

    def placed(self, rows: int, keys: int) -> Term:
        if self.mix is None:
            return self
        if not rows <= self.mix.shape[2] <= keys:
            raise UsageError("OffsetVectors.mix", f"{rows} to {keys} tokens", list(self.mix.shape))
        return replace(self, mix=self.mix[:, :, -rows:])

    def of_queries(self, batch: slice | list[int], rows: slice) -> Term:
        return self if self.mix is None else replace(self, mix=self.mix[batch][:, :, rows])

    def behind_zeros(self, width: int) -> Term:
        if self.mix is not None:
            return self
        shift = F.pad(self.shift, (width, 0)) if isinstance(self.shift, Tensor) else self.shift
        return replace(self, keys=lambda offset: F.pad(self.keys(offset), (width, 0)), shift=shift)


@dataclass(frozen=True)
class RowBias(Term):
    """A bias computed from whole rows of scores: score += of(queries, scaled raw scores, allowed).

    Args:
        of: maps queries [B, heads, Lq, head_dim], scores and allowed [B, heads, Lq, Lk] to [B, heads, Lq, Lk].
    """

    reads_query = True
    of: Callable[[Tensor, Tensor, Tensor], Tensor]

    def numbers_of(self, r: Scored, pairs: int) -> int:
        """Gates, their sum, two neighbors of a table, as numbers and as indices."""
        return 5 * r.q.shape[:3].numel() * r.k.shape[2]

    def require(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if isinstance(self.of, Counted):
            require_shape("Counted.table", self.of.table, q, (q.shape[3], self.of.columns))

    def dense(self, r: Scored, q: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
        bias = self.of(q, scores, allowed)
        require_shape("RowBias", bias, q, tuple(scores.shape))
        return bias

    def behind_zeros(self, width: int) -> Term:
        return RowBias(lambda q, scores, allowed: self.of(q[..., width:], scores, allowed))


@dataclass(frozen=True)
class Transport(Term):
    """Reflections between key and query: q . H_i H_(i-1) ... H_(j+1) k instead of q . k, where H_t = I - b_t w_t w_t'.

    Args:
        w: [B, heads, tokens, head_dim] of the last tokens among the keys; heads are those of queries or of keys. Earlier keys
            must be reflected up to these tokens already, as in a cache.
        b: [B, heads, tokens].
        chunk: tokens whose reflections are multiplied at once; any number gives the same result.
        first: order of the first of these tokens; attention sets it.
    """

    reads_query = True
    of_tokens = ("w", "b")
    w: Tensor
    b: Tensor
    chunk: int = 128
    first: int = 0

    def require(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        require_among_keys(q, k)
        tokens = min(self.w.shape[2], k.shape[2])
        require_shape("Transport.w", self.w, q, *of_either_heads(q, k, tokens, q.shape[3]))
        require_shape("Transport.b", self.b, q, tuple(self.w.shape[:3]))

    def placed(self, rows: int, keys: int) -> Term:
        return replace(self, first=keys - self.w.shape[2])

    def of_queries(self, batch: slice | list[int], rows: slice) -> Term:
        return replace(self, w=self.w[batch], b=self.b[batch])

    def behind_zeros(self, width: int) -> Term:
        return replace(self, w=F.pad(self.w, (width, 0)))


@dataclass(frozen=True)
class Temperature(Term):
    """A factor of each query: q_i *= at(n_i), before scores are computed. It does not multiply the biases of other terms.

    Attention applies it before a backend runs, so every backend supports it.

    Args:
        at: maps numbers [B or 1, 1, Lq] to factors [B or 1, heads or 1, Lq], float32 or wider.
        of: meaning of n_i: "visible", the number of visible keys of query i, 1 if there are none; or
            "positions", the query's position.
        module: whose parameters decide `at`, if any do.
    """

    added = False
    at: Callable[[Tensor], Tensor]
    of: Literal["visible", "positions"]
    module: nn.Module | None = None

    @property
    def reads_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of == "positions"


@dataclass(frozen=True)
class SinkLogits(Term):
    """A logit per head of a virtual key without value: e^logit is added to the denominator of the softmax.

        out' = out sigmoid(lse - logit),    lse' = log(e^lse + e^logit)

    Attention applies it to a backend's output and logsumexp, so every backend that returns both supports it.

    Args:
        logits: [heads], one per head of queries.
    """

    added = False
    logits: Tensor

    def require(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        require_shape("SinkLogits.logits", self.logits, q, (q.shape[1],))


@dataclass(frozen=True)
class Softcap(Term):
    """A cap of the products: score = cap tanh(scale q . k / cap), before anything else is added and before the mask.

    Args:
        cap: above 0; no product is above it or below -cap.
    """

    cap: float
