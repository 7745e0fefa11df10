"""What attention is asked to do, checked once for all backends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.attention.masks import AllOf, Band, Causal, Mask, Window, require_mask
from longitude.positions.base import Drift, Positions, Term, Transport, canonical, explicit


@dataclass(frozen=True)
class Request:
    """Queries and keys are transformed already when a backend sees them; it adds the terms, softmaxes, and sums values.

    It may be a piece of a larger one: `q_order` and `k_order` say where its first query and key stand in the stream, and
    per-token columns inside terms and masks always cover the whole stream.
    """

    q: Float[Tensor, "B H Lq D"]
    k: Float[Tensor, "B Hkv Lk D"]
    v: Float[Tensor, "B Hkv Lk Dv"]
    terms: tuple[Term, ...]
    mask: Mask
    q_positions: Positions
    k_positions: Positions
    scale: float
    dropout: float = 0.0
    weights: bool = False
    lse: bool = False
    learned: tuple[Tensor, ...] = ()  # what inside the terms wants a gradient
    q_order: int = 0
    k_order: int = 0
    band: tuple[int | None, int | None] = field(init=False)
    """Reach of the mask's parts that are nothing but their reach: causality and windows by plain order."""
    beyond_band: tuple[Mask, ...] = field(init=False)
    """The other parts of the mask: spans (documents, padding) and free predicates."""

    def __post_init__(self) -> None:  # found once: every backend asks
        parts = self.mask.parts()
        object.__setattr__(self, "band", AllOf(tuple(m for m in parts if is_band(m))).reach)
        object.__setattr__(self, "beyond_band", tuple(m for m in parts if not is_band(m)))

    def with_lse(self) -> Request:
        """The request that asks for the logsumexp of the scores, too."""
        if self.weights:
            raise ValueError("expected return_weights or return_lse, got both; the weights are e^(score - lse)")
        return replace(self, lse=True)

    @property
    def rows(self) -> int:
        return self.q.shape[2]

    @property
    def length(self) -> int:
        """Keys."""
        return self.k.shape[2]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def contiguous(self) -> bool:
        """Positions are known to count up by one without looking at them."""
        return isinstance(self.q_positions, int) and isinstance(self.k_positions, int)

    @property
    def order_gap(self) -> int:
        """Order of the first query minus order of the first key."""
        return self.q_order - self.k_order

    def q_tokens(self) -> Tensor:
        """Order of each query, [Lq]."""
        return torch.arange(self.q_order, self.q_order + self.rows, device=self.q.device)

    def k_tokens(self) -> Tensor:
        """Order of each key, [Lk]."""
        return torch.arange(self.k_order, self.k_order + self.length, device=self.q.device)

    def places(self) -> tuple[Tensor, Tensor]:
        """Positions of queries [..., Lq] and keys [..., Lk] as tensors."""
        device = self.q.device
        return explicit(self.q_positions, self.rows, device), explicit(self.k_positions, self.length, device)

    def allowed(self) -> Bool[Tensor, "... Lq Lk"]:
        return self.mask.allowed(self.q_tokens(), self.k_tokens())

    @property
    def sees_all(self) -> bool:
        """Every query sees every key: no mask, or one that asks no more than where the queries stand."""
        low, high = self.band
        late_enough = low is None or self.order_gap - low >= self.length - 1
        return late_enough and high is None and len(self.beyond_band) == 0

    @property
    def square(self) -> bool:
        """Causality alone, by the index of queries and keys."""
        return self.band == (0, None) and self.order_gap == 0 and len(self.beyond_band) == 0

    @property
    def causal(self) -> bool:
        low, _ = self.mask.reach
        return low is not None and low >= 0

    def reachable(self, start: int, stop: int) -> slice:
        """The keys that queries start .. stop-1 of this request may see, as far as the mask's reach says."""
        low, high = self.mask.reach
        first = 0 if high is None else max(0, min(self.length - 1, self.order_gap + start - high))
        last = self.length if low is None else max(first + 1, min(self.length, self.order_gap + stop - low))
        return slice(first, last)

    def piece(self, rows: slice, keys: slice, batch: slice | list[int] = slice(None)) -> Request:
        """Queries `rows` against keys `keys`, of the sequences `batch`; slices with plain bounds."""
        return replace(
            self,
            q=self.q[batch][:, :, rows],
            k=self.k[batch][:, :, keys],
            v=self.v[batch][:, :, keys],
            terms=tuple(_of_batch(term, batch) for term in self.terms),
            mask=self.mask.of(batch),
            q_positions=part_of(self.q_positions, batch, rows),
            k_positions=part_of(self.k_positions, batch, keys),
            q_order=self.q_order + rows.start,
            k_order=self.k_order + keys.start,
        )


def _of_batch(term: Term, batch: slice | list[int]) -> Term:
    match term:
        case Drift(level):
            return replace(term, level=level[batch])
        case Transport(w, b):
            return replace(term, w=w[batch], b=b[batch])
    return term


def is_band(mask: Mask) -> bool:
    """Whether it is nothing but its reach in plain order."""
    return isinstance(mask, Band) or (isinstance(mask, Causal | Window) and mask.order is None)


def validate(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, dropout: float) -> None:
    """ValueError for what no backend could mean."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected a floating-point tensor [batch, heads, length, head_dim], got {got}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"expected q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] with the same B, D and Lk, "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"expected heads of k and v to divide those of q, got {k.shape[1]} and {q.shape[1]}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(
            "expected q, k, v of one dtype on one device, got "
            + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"expected no empty dimension, got q {list(q.shape)}, k {list(k.shape)}")
    require_mask(mask)
    mask.validate(q.shape[0], q.shape[2], k.shape[2])
    require_options(scale, dropout)


def require_options(scale: float | None, dropout: float) -> None:
    """ValueError unless scale is a finite number or None, and dropout a number of 0 or more below 1."""
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale)
    ):
        raise ValueError(f"scale: expected a finite number or None for head_dim**-0.5, got {scale!r}")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout: expected 0 <= dropout < 1, got {dropout!r}")


def part_of(positions: Positions, batch: slice | list[int], part: slice) -> Positions:
    """Positions of some rows of the batch and some tokens."""
    if isinstance(positions, int):
        return positions + part.start
    if positions.dim() == 1:
        return positions[part]
    return (positions if positions.shape[0] == 1 else positions[batch])[:, part]


def following(first: Tensor, length: int) -> Tensor:
    """Positions of `length` tokens from `first` on: [1] -> [L], [B, 1] -> [B, L], [B, 1, 1] -> [B, L, 1]."""
    step = torch.arange(length, device=first.device)
    return first + (step[:, None] if first.dim() == 3 else step)


def as_int(positions: Positions) -> Positions:
    """The int that positions [L] or [B, L] count up from in every row, where a look at them is free; else themselves."""
    if (
        not isinstance(positions, Tensor)
        or positions.dim() > 2
        or not positions.is_cpu
        or torch.compiler.is_compiling()
    ):
        return positions
    first = int(positions.flatten()[0])
    counted = positions == torch.arange(first, first + positions.shape[-1])
    return first if bool(counted.all()) else positions


def places(
    q: Tensor, k: Tensor, q_positions: Positions | None, k_positions: Positions | None, axes: int = 1
) -> tuple[Positions, Positions]:
    """Positions of queries and keys, where what is not said follows from: queries are the last Lq of the Lk keys."""
    batch, rows, keys = q.shape[0], q.shape[2], k.shape[2]
    if q_positions is not None:
        q_positions = canonical("q_positions", q_positions, batch, rows, axes)
    if k_positions is not None:
        k_positions = canonical("k_positions", k_positions, batch, keys, axes)
    if q_positions is None and k_positions is None:
        k_positions = 0 if rows <= keys else rows - keys
    if k_positions is None:
        assert q_positions is not None
        if rows == keys:
            k_positions = q_positions
        elif isinstance(q_positions, int):
            k_positions = q_positions + rows - keys
        if k_positions is None or (isinstance(k_positions, int) and k_positions < 0):
            raise ValueError(f"k_positions: say them, for {rows} queries at {q_positions!r} and {keys} keys")
    if q_positions is None:
        if rows == keys:
            q_positions = k_positions
        elif isinstance(k_positions, int):
            q_positions = k_positions + keys - rows
        elif rows <= keys:
            assert isinstance(k_positions, Tensor)
            q_positions = k_positions[:, keys - rows :] if k_positions.dim() > 1 else k_positions[keys - rows :]
        if q_positions is None or (isinstance(q_positions, int) and q_positions < 0):
            raise ValueError(f"q_positions: say them, for {rows} queries and {keys} keys at {k_positions!r}")
    return q_positions, k_positions
