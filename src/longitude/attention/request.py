"""A request of attention, checked once for all backends; and the step, in which the layers of one forward share requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any, TypedDict, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.attention.masks import Mask, from_tensor, of_rows, require_mask
from longitude.attention.pairs import AllowedPairs
from longitude.errors import UsageError, check_positive
from longitude.positions.base import Columns, Encoding, Region
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, canonical, explicit, part_of
from longitude.positions.terms import Term

Result = TypeVar("Result")


class Options(TypedDict, total=False):
    """Keywords of `attend` and `explain`, except those that decide what is returned."""

    encoding: Encoding | Sequence[Encoding] | str | None
    context: Columns | None
    mask: Mask | Bool[Tensor, "*B Lq Lk"]
    q_positions: Positions | None
    k_positions: Positions | None
    scale: float | None
    dropout: float
    softcap: float | None
    backend: str


COUNTS = "counts in the signature"
BY_SHAPE, BY_PRESENCE, BY_TERM, BY_BAND, OUT = ({COUNTS: how} for how in ("shape", "presence", "term", "band", "out"))
"""How a field of a request counts in its signature: a mask by its band if this is all of it, and by identity otherwise.

Fields without such metadata count as they are: numbers by value, tensors by identity.
"""


@dataclass(eq=False)  # frozen ones take longer to make than a short decoding step allows; they are never changed
class Request:
    """A call of attention as backends receive it: q and k are already transformed; terms, softmax and values remain.

    A request may be a part of a larger one. `q_order` and `k_order` are the order of its first query and key in the sequence.
    Per-token columns inside terms and masks always cover the whole sequence.
    """

    q: Float[Tensor, "B H Lq D"] = field(metadata=BY_SHAPE)
    k: Float[Tensor, "B Hkv Lk D"] = field(metadata=BY_SHAPE)
    v: Float[Tensor, "B Hkv Lk Dv"] = field(metadata=BY_SHAPE)
    terms: tuple[Term, ...] = field(metadata=BY_TERM)
    mask: Mask = field(metadata=BY_BAND)
    q_positions: Positions
    k_positions: Positions
    scale: float
    dropout: float = 0.0
    weights: bool = False
    lse: bool = False
    learned: tuple[Tensor, ...] = field(
        default=(), metadata=BY_PRESENCE
    )  # tensors of the terms that require a gradient
    q_order: int = 0
    k_order: int = 0
    pairs: AllowedPairs = field(default=None, metadata=OUT)  # type: ignore[assignment]  (of the mask; built unless given)
    # Factors of queries, and sinks, which are logits of virtual keys, are applied around a backend.
    factors: Float[Tensor, "#B #H Lq 1"] | None = field(default=None, metadata=BY_PRESENCE)
    sinks: Float[Tensor, " H"] | None = field(default=None, metadata=BY_PRESENCE)
    finish: Callable[[Tensor], Tensor] | None = field(default=None, metadata=OUT)  # of the output: values were rotated
    step: Step | None = field(default=None, init=False, metadata=OUT)  # what layers with such a request share

    def __post_init__(self) -> None:
        place = self.mask, self.q.shape[0], self.q.shape[2], self.k.shape[2], self.q_order, self.k_order
        if self.pairs is None or not self.pairs.fit(*place):
            self.pairs = AllowedPairs(*place)

    def of_layer(self, q: Any, k: Any, v: Any) -> Request:
        """Return a copy with other q, k and v of as many tokens, such as those of another layer of a decoding step."""
        other = object.__new__(Request)
        other.__dict__.update(self.__dict__)  # dataclasses.replace would check again what stays the same
        other.q, other.k, other.v = q, k, v
        return other

    def once(self, make: Callable[..., Any], *reads: Any) -> Any:
        """Return `make(self, *reads)`, which may not depend on q, k, v: the first layer of a step computes it for all."""
        if self.step is None:
            return make(self, *reads)
        key = make, reads
        if key not in self.step.results:
            self.step.results[key] = make(self, *reads)
        return self.step.results[key]

    def signature(self) -> Hashable:
        """What the choice of a backend may depend on: each field as its metadata says, and whether gradients are recorded."""
        return (
            torch.is_grad_enabled(),
            ITSELF(self),
            SHAPES(self),
            (len(self.learned), self.factors is None, self.sinks is None),
            tuple([term.signature() for term in self.terms]),
            self.mask if self.pairs.beyond_band else self.pairs.band,
        )

    def with_lse(self) -> Request:
        """Return a copy that requests the logsumexp of the scores."""
        if self.weights:
            raise UsageError("", "return_weights or return_lse", "both", "the weights are e^(score - lse)")
        return replace(self, lse=True)

    @property
    def rows(self) -> int:
        return self.q.shape[2]

    @property
    def length(self) -> int:
        """Number of keys."""
        return self.k.shape[2]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def contiguous(self) -> bool:
        """Whether positions are known to count up by one without reading them."""
        return isinstance(self.q_positions, int) and isinstance(self.k_positions, int)

    @property
    def position_gap(self) -> int:
        """Position of the first query minus position of the first key, if both are ints."""
        assert isinstance(self.q_positions, int) and isinstance(self.k_positions, int)
        return self.q_positions - self.k_positions

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
        """Whether every query attends to every key: no mask, or one that hides nothing from queries of these orders."""
        low, high = self.pairs.band
        late_enough = low is None or self.q_order - self.k_order - low >= self.k.shape[2] - 1
        return late_enough and high is None and len(self.pairs.beyond_band) == 0

    @property
    def square(self) -> bool:
        """Whether the mask is causality alone, by the index of queries and keys."""
        pairs = self.pairs
        return pairs.band == (0, None) and self.q_order == self.k_order and len(pairs.beyond_band) == 0

    def reachable(self, start: int, stop: int) -> slice:
        """The keys that queries start .. stop-1 of this request may attend to, by the mask's reach."""
        low, high = self.mask.reach
        first = 0 if high is None else max(0, min(self.length - 1, self.order_gap + start - high))
        last = self.length if low is None else max(first + 1, min(self.length, self.order_gap + stop - low))
        return slice(first, last)

    def piece(self, rows: slice, keys: slice, batch: slice | list[int] = slice(None)) -> Request:
        """Queries `rows` against keys `keys`, of the sequences `batch`; slices with plain bounds."""
        q, k, v = (self.q, self.k, self.v) if batch == slice(None) else (x[batch] for x in (self.q, self.k, self.v))
        return replace(
            self,
            q=q[:, :, rows],
            k=k[:, :, keys],
            v=v[:, :, keys],
            terms=tuple(term.of_queries(batch, rows) for term in self.terms),
            mask=self.mask.of(batch),
            q_positions=part_of(self.q_positions, batch, rows),
            k_positions=part_of(self.k_positions, batch, keys),
            q_order=self.q_order + rows.start,
            k_order=self.k_order + keys.start,
            factors=None if self.factors is None else of_rows(self.factors, batch)[:, :, rows],
        )


class Step:
    """Results of one forward, each under the function that made it and everything that this function read.

    A model makes one for each forward and passes it to its layers. Tensors, masks and modules are the same if they are the same
    object; a key holds them, so that no other object gets their identity. Nothing is shared under torch.compile, where lengths
    are symbolic.
    """

    def __init__(self) -> None:
        self.results: dict[Hashable, Any] = {}

    def once(self, make: Callable[..., Result], *reads: Any) -> Result:
        """Return make(*reads), computed once for equal `reads`. make: a function of a module, which reads nothing else."""
        if torch.compiler.is_compiling():
            return make(*reads)
        key = make, reads
        if key not in self.results:
            self.results[key] = make(*reads)
        return self.results[key]

    def request(self, make: Callable[..., Request], q: Tensor, k: Tensor, v: Tensor, *reads: Any) -> Request:
        """Return make(q, k, v, *reads) without gradients: later layers with such tensors get a copy with their own.

        Checking a call and choosing its backend takes 60 us, and attention to 2,048 keys of 3 heads of 64 takes 300 us.
        """
        key = make, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, type(q), reads
        if key not in self.results:
            first = make(q, k, v, *reads)
            first.step = Step()
            self.results[key] = first.of_layer(None, None, None)
            return first
        return self.results[key].of_layer(q, k, v)


def _counting(how: str | None, *of_value: str) -> Callable[[Request], tuple[Any, ...]]:
    """The values of the fields that count so, or attributes of these values."""
    names = [x.name for x in fields(Request) if x.metadata.get(COUNTS) == how]
    return attrgetter(*[".".join(path) for path in product(names, of_value)] if of_value else names)


ITSELF = _counting(None)
SHAPES = _counting("shape", "shape", "dtype", "device", "requires_grad")


def checked_mask(q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor) -> Mask:
    """The mask of a call; ValueError for a mask or tensors that no backend could support."""
    require_heads(q, k, v)
    sizes = q.shape[0], q.shape[2], k.shape[2]
    mask = from_tensor(mask, *sizes) if isinstance(mask, Tensor) else mask
    require_mask(mask)
    mask.validate(*sizes)
    return mask


def require_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError unless they are floats of shapes, dtypes and devices that fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(name, "a floating-point tensor [batch, heads, length, head_dim]", got)
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        expected = "q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] with the same B, D and Lk"
        raise UsageError("", expected, f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    if k.shape[1] and q.shape[1] % k.shape[1]:
        raise UsageError("", "heads of k and v to divide those of q", f"{k.shape[1]} and {q.shape[1]}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise UsageError("", "q, k, v of one dtype on one device", kinds)
    if 0 in q.shape or 0 in k.shape:
        raise UsageError("", "no empty dimension", f"q {list(q.shape)}, k {list(k.shape)}")


def require_options(scale: float | None, dropout: float, softcap: float | None = None) -> None:
    """ValueError unless scale is a finite number or None, dropout a number in [0, 1), and softcap one above 0 or None."""
    if softcap is not None:
        check_positive("attention", softcap=softcap)
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale)
    ):
        raise UsageError("scale", "a finite number or None for head_dim**-0.5", repr(scale))
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise UsageError("dropout", "0 <= dropout < 1", repr(dropout))


def transformed(
    r: Request,
    encoding: Composed,
    q_positions: Positions,
    k_positions: Positions,
    length: int | None = None,
    region: Region | None = None,
) -> Request:
    """The request with queries and keys transformed by the encoding: its tables for `length`, at the positions of a region."""
    if not (encoding.prepares or encoding.transforms):
        return r
    if region is not None:
        q_tables, k_tables = (
            encoding.prepare(explicit(positions, count, r.q.device), length, r.q.dtype, move)
            for positions, count, move in (
                (q_positions, r.rows, region.queries),
                (k_positions, r.length, region.keys),
            )
        )
        return replace(r, q=encoding.queries(r.q, q_tables), k=encoding.keys(r.k, k_tables))
    center = encoding.center(k_positions, r.length, r.q.device)
    q_tables = k_tables = encoding.prepare(explicit(q_positions, r.rows, r.q.device), length, r.q.dtype, center=center)
    ints = isinstance(q_positions, int) and isinstance(k_positions, int)
    if r.rows == r.length and (q_positions == k_positions if ints else q_positions is k_positions):
        q, k = encoding.queries_and_keys(r.q, r.k, q_tables)
    else:
        k_tables = encoding.prepare(explicit(k_positions, r.length, r.q.device), length, r.q.dtype, center=center)
        q, k = encoding.queries(r.q, q_tables), encoding.keys(r.k, k_tables)
    r = r.of_layer(q, k, r.v)
    if encoding.rotate_values:
        r.v, r.finish = encoding.transform_values(r.v, k_tables), partial(encoding.restore_outputs, prepared=q_tables)
    return r


def places(
    q: Tensor, k: Tensor, q_positions: Positions | None, k_positions: Positions | None, axes: int = 1
) -> tuple[Positions, Positions]:
    """Positions of queries and keys. By default keys count from 0, and the queries are the last Lq of the Lk tokens."""
    batch, rows, keys = q.shape[0], q.shape[2], k.shape[2]
    if q_positions is not None:
        q_positions = canonical("q_positions", q_positions, batch, rows, axes)
    if k_positions is not None:
        k_positions = canonical("k_positions", k_positions, batch, keys, axes)
    if q_positions is None and k_positions is None:
        k_positions = 0 if rows <= keys else rows - keys  # an int for torch.export too, as max() is not
    if k_positions is None:
        k_positions = _last_of(q_positions, rows, keys) if rows == keys or isinstance(q_positions, int) else None
        if k_positions is None:
            raise ValueError(f"k_positions: expected them, for {rows} queries at {q_positions!r} and {keys} keys")
    if q_positions is None:
        q_positions = _last_of(k_positions, keys, rows)
        if q_positions is None:
            raise ValueError(f"q_positions: expected them, for {rows} queries and {keys} keys at {k_positions!r}")
    return q_positions, k_positions


def _last_of(positions: Positions | None, count: int, last: int) -> Positions | None:
    """Positions of the `last` last tokens of a stream, from those of its last `count`; None if these do not determine them."""
    if count == last:
        return positions  # without arithmetic on symbolic sizes
    first = count - last
    if isinstance(positions, int):
        return positions + first if positions + first >= 0 else None
    if positions is None or first < 0:
        return None
    return positions[:, first:] if positions.dim() > 1 else positions[first:]
