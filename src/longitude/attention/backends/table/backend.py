"""Attention with biases of the offset in C, in linear memory: a bias is a table of Lq + Lk - 1 numbers a head.

With the queries reversed (i = Lq - 1 - a) query i and key b meet at diagonal i + b. Causality and a sliding window allow
a band of diagonals. Vectors of offsets are multiplied with a block of queries, a column per diagonal, which each row reads one
column further. A number per token (a forget gate's level), counted keys, and a curve of the offset (FIRE) are added as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import Backend, wide_item
from longitude.attention.backends.operators import TIED, Inputs, Operators, heads_last
from longitude.attention.backends.table import band
from longitude.attention.backends.table.band import Limits, Terms, diagonals, limits_of
from longitude.attention.pairs import band_of
from longitude.attention.request import Request
from longitude.attention.spans import partial_by_spans, pieces, steady
from longitude.attention.terms import bias_of, drift_level
from longitude.errors import UsageError
from longitude.native.derivatives import exporting, recorded
from longitude.native.tensors import in_memory, needs_operator
from longitude.positions.coordinates import Positions, explicit
from longitude.positions.formulas import Counted, NormalizedOffset
from longitude.positions.terms import Drift, OffsetBias, OffsetVectors, PairBias, RowBias

FEW_KEYS = 2**20
"""Elements of the keys up to which a decoding step is left to torch's function."""


def table(r: Request) -> tuple[Tensor, Tensor]:
    """The output, and the logsumexp of the scores."""
    if len(r.pairs.beyond_band) == 0:
        return banded(r)
    if (single := single_pass(r)) is not None:
        return banded(*single, r.q_positions)
    out, lse = partial_by_spans(r, banded)
    assert lse is not None or not r.lse
    return out, lse  # type: ignore[return-value]


def counting(r: Request) -> Request | None:
    """The request with ints for positions, if all positions that terms read count up by one; None otherwise."""
    if r.contiguous:
        return r
    if not any(isinstance(term, OffsetBias | OffsetVectors | PairBias) for term in r.terms):
        return replace(r, q_positions=0, k_positions=0)
    return steady(r)


def formula(r: Request) -> Counted | NormalizedOffset | None:
    """Formula of a request with a single term: keys counted by gates, or offsets normalized by the query's position."""
    if len(r.terms) != 1:
        return None
    function = getattr(r.terms[0], "of" if isinstance(r.terms[0], RowBias) else "at", None)
    return function if isinstance(function, Counted | NormalizedOffset) else None


def single_pass(r: Request) -> tuple[Request, Tensor] | None:
    """Padding and documents without a call for each span: the request without them, and its spans [n, 5].

    None if there are vectors of offsets, or if there is no padding and no document.
    """
    if len(r.pairs.beyond_band) == 0 or any(isinstance(term, OffsetVectors) for term in r.terms):
        return None
    spans = r.pairs.spans
    assert not isinstance(spans, str), spans
    cuts = [
        (b, q_from - r.q_order, q_to - r.q_order, k_from - r.k_order, k_to - r.k_order)
        for batch, corners in spans
        for q_from, q_to, k_from, k_to in corners
        for b in batch
    ]
    if not r.contiguous:
        gaps = {_gap(r, *cut) for cut in cuts} if r.terms and cuts else {0}
        gap = gaps.pop()
        if gap is None or gaps:
            return None
        r = replace(r, q_positions=max(gap, 0), k_positions=max(-gap, 0))
    r = replace(r, mask=band_of(r.mask))
    return r, torch.tensor(cuts, dtype=torch.int64).view(-1, 5)


def _gap(r: Request, b: int, q_from: int, q_to: int, k_from: int, k_to: int) -> int | None:
    """Position of the request's first query minus that of its first key, by those of a span; None if these have gaps."""
    part = steady(r.piece(slice(q_from, q_to), slice(k_from, k_to), slice(b, b + 1)))
    return None if part is None else part.position_gap - q_from + k_from


def far_from(terms: list[OffsetBias | OffsetVectors]) -> int | None:
    """The offset from which on a request with vectors has the same for all keys; None: nowhere, or it has no vectors.

    The bias of far offsets is subtracted from all scores of a row, which changes no weight: far keys then have bias 0.
    """
    farthest, vectors = 0, False
    for term in terms:
        if term.reach is None:
            return None
        farthest, vectors = max(farthest, term.reach), vectors or isinstance(term, OffsetVectors)
    return farthest if vectors else None


def banded(r: Request, cuts: Tensor | None = None, q_positions: Positions | None = None) -> tuple[Tensor, Tensor]:  # noqa: C901
    """Output [B, H, Lq, Dv] and logsumexp of the scores [B, H, Lq] of a request with a band mask, cut into spans or not.

    q_positions: positions of the queries, if the request's positions are valid only as offsets.
    """
    q_positions = r.q_positions if q_positions is None else q_positions
    r = counting(r) or r
    wide = torch.promote_types(r.q.dtype, torch.float32)
    rows, keys = r.q.shape[2], r.k.shape[2]
    diagonals = rows + keys - 1
    newest = r.position_gap + rows - 1  # the offset of the first diagonal

    of_offsets = [term for term in r.terms if isinstance(term, OffsetBias | OffsetVectors)]
    reach = far_from(of_offsets)
    near = 0 if reach is None else max(0, min(diagonals - 1, newest - reach))

    # No query attends to the diagonals from `stop` on.
    limits = limits_of(r, cuts, near)
    stop = diagonals if limits.low is None else max(near + 1, min(diagonals, keys - limits.low))

    def of_diagonals(of: Callable[[Tensor], Tensor]) -> Tensor:
        """Vectors [H or 1, N, D] of the diagonals from `near` on."""
        offsets = newest - near - torch.arange(stop - near, device=r.q.device)
        return at(of, offsets) if reach is None else at(of, offsets) - at(of, offsets.new_tensor([reach]))

    def at(of: Callable[[Tensor], Tensor], offsets: Tensor) -> Tensor:
        values = of(offsets).to(wide)
        return values if values.dim() == 3 else values[None]

    biases, of_keys, of_values = [], [], []
    for term in of_offsets:
        if isinstance(term, OffsetBias):
            bias = bias_of(term, newest - near, newest - diagonals + 1, r.q, wide)
            if reach is not None:
                bias = F.pad(bias - bias_of(term, reach, reach, r.q, wide), (near, 0))
            biases.append(bias)
            continue
        of_keys.append(of_diagonals(term.keys))
        if term.values is not None:
            of_values.append(of_diagonals(term.values))
        if isinstance(term.shift, Tensor) or term.shift:  # a shift of the queries is multiplied with each vector once
            shift = torch.as_tensor(term.shift, device=r.q.device).to(wide).expand(r.heads, 1, r.q.shape[3])
            biases.append(F.pad((r.scale * shift @ of_keys[-1].mT)[:, 0], (near, diagonals - stop)))

    added = {"key_vectors": total(of_keys), "value_vectors": total(of_values)} if of_keys else {}
    if (level := drift_level(r)) is not None:
        level = level.double()
        added["q_level"] = level[:, :, r.q_order : r.q_order + rows]
        added["k_level"] = level[:, :, r.k_order : r.k_order + keys]
    if isinstance(function := formula(r), Counted):
        added["logits"] = function.logits(r.q).to(wide)
    elif function is not None:
        offsets, places = newest - torch.arange(diagonals), explicit(q_positions, rows, r.q.device)
        biases.append(function.distances(offsets).to(wide).expand(r.heads, -1))
        added["curves"] = function.curves().to(wide)
        added["rates"] = (1 / function.scale_of(places)).to(wide).expand(len(r.q), -1)[:, None]
    out, lse = toeplitz_attention(r.q, r.k, r.v, Terms(table=total(biases), **added), limits, r.scale)
    if reach is None:
        return out, lse
    nothing = lse == -math.inf  # the subtracted bias has no gradient there either
    far = torch.tensor([reach], device=r.q.device)
    for term in of_offsets:
        if isinstance(term, OffsetVectors) and term.values is not None:
            out = out + (at(term.values, far) * ~nothing[..., None]).to(out.dtype)
        if r.lse and isinstance(term, OffsetBias):
            lse = lse + bias_of(term, reach, reach, r.q, wide)
        if r.lse and isinstance(term, OffsetVectors):
            lse = lse + (r.scale * (r.q.to(wide) + term.shift) @ at(term.keys, far).mT)[..., 0]
    return out, lse.masked_fill(nothing, -math.inf)


def total(parts: list[Tensor]) -> Tensor | None:
    return sum(parts[1:], parts[0]) if parts else None


def table_limits(r: Request) -> str | None:
    if exporting():
        return TIED
    if not band.available(torch.promote_types(r.q.dtype, torch.float32)):
        return "it runs in C, which is not compiled here"
    if any(isinstance(term, RowBias | PairBias) for term in r.terms):
        if formula(r) is None:
            return "it supports no biases of rows and pairs but counted keys and normalized offsets, alone"
        if torch.compiler.is_compiling():
            return "in a compiled graph the formula of such a bias is faster"
        if r.rows <= band.MOST_OF_DECODE:
            return "for a few queries the formula of such a bias is faster"
    cut = pieces(r) if single_pass(r) is None else []
    assert not isinstance(cut, str), cut
    if any(counting(part) is None for _, _, part in cut):
        return "it needs positions that count up by one; pass one int p for p, p+1, p+2, ..."
    return None


def table_memory(r: Request) -> int:
    """Copies of a head's keys and values for each thread; biases; vectors of near offsets; copies in float32."""
    batch, keys, heads, dim = r.q.shape[0], r.length, r.heads, max(r.q.shape[3], r.v.shape[3])
    numbers = torch.get_num_threads() * (5 * keys * dim + 4 * (r.rows + keys)) + 6 * heads * (r.rows + keys)
    if isinstance(function := formula(r), Counted):  # logits and their gradients
        numbers += 2 * batch * heads * r.rows * function.columns
    for term in r.terms:
        if isinstance(term, OffsetVectors):
            numbers += 6 * heads * (keys if term.reach is None else min(keys, 256 + term.reach)) * dim
        if isinstance(term, Drift):  # in float64
            numbers += 8 * batch * heads * (r.rows + keys)
    if r.q.dtype not in band.OPTIONS:
        numbers += batch * dim * (heads * r.rows + 2 * r.k.shape[1] * keys)
    return numbers * wide_item(r)


def table_price(r: Request) -> float:
    if any(isinstance(term, OffsetVectors) for term in r.terms):
        everywhere = any(isinstance(term, OffsetBias | OffsetVectors) and term.reach is None for term in r.terms)
        return 1.3 if everywhere else 1.0  # a product more for all keys, or for near ones
    # Finding spans takes longer than decoding by a dense row, as preparing the call does; float16 is copied, and for bfloat16
    # some processors have instructions that torch uses.
    narrow = r.q.dtype not in band.OPTIONS or (r.q.dtype.itemsize < 4 and torch.cpu._is_amx_tile_supported())
    return 1.2 if (r.rows == 1 and r.pairs.beyond_band) or is_short(r) or narrow else 1.0


def is_short(r: Request) -> bool:
    """Whether a request is a decoding step with few keys.

    Measured in us (table backend, sdpa), with a cached bias and one thread: 39 and 9 with 128 keys of 4 heads of 16; 101 and 92
    with 1024 keys of 8 heads of 64; 660 and 906 with 4096.
    """
    return r.rows == 1 and not torch.compiler.is_compiling() and r.k.numel() <= FEW_KEYS


TABLE = Backend(
    "table",
    run=lambda r: table(r)[0],
    partial=table,
    terms=(OffsetBias, OffsetVectors, Drift, RowBias, PairBias),
    devices=("cpu",),
    transforms=False,
    limits=table_limits,
    memory=table_memory,
    price=table_price,
)


# ---- the function ---------------------------------------------------------------------------------------------------------
def toeplitz_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, limits: Limits, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] = weights v, and logsumexp of each row's scores [B, H, Lq], in O(Lq + Lk) memory.

        scores[h, a, b] = scale q_a . k_b + table[h, n] + q_level[a] - k_level[b] + scale q_a . key_vectors[h, n]
        out[h, a]       = sum over b of weights[h, a, b] (v_b + value_vectors[h, n]),          n = (Lq - 1 - a) + b

    q [B, H, Lq, D]; k [B, Hkv, Lk, D]; v [B, Hkv, Lk, Dv]; Hkv divides H; on the CPU. In float32 or wider: table
    [H, Lq + Lk - 1], finite; vectors [H or 1, N, D or Dv], for the diagonals from `near` on, to the end of the band or further.
    Levels [B, H, Lq] and [B, H, Lk] are float64.
    Query row a has order Lk - Lq + a and key b has order b. The pair is allowed if low <= order_q - order_k <= high (None:
    unbounded). Causal is low=0, a window of w keys is low=0, high=w-1.
    spans, int64 [n, 5]: row of the batch, first and last + 1 of its queries, first and last + 1 of the keys that these attend
    to. No query and no key is in two spans. Vectors allow none.
    logits [B, H, Lq, columns] are the logits of `Counted`, curves [H, 3, pieces] the curves of `NormalizedOffset`, with rates
    [B, 1, Lq]; either allows only spans besides. With curves a curve's value at table[h, n] rates[a] is added; the table falls
    along diagonals up to the smallest distance and rises after it.
    A query without keys gives zeros, and a logsumexp of -inf. All inputs get gradients, through both results; double backward
    raises.
    """
    if terms.key_vectors is not None:
        near = max(0, diagonals(q.shape[2], k.shape[2], limits.low, None)[1] + 1 - limits.near)  # those in the band
        values = None if terms.value_vectors is None else terms.value_vectors[:, :near]
        terms = terms._replace(key_vectors=terms.key_vectors[:, :near], value_vectors=values)
    x = Inputs(q, k, v, terms, limits, scale)
    if needs_operator(q, k, v, terms.table) or recorded(q, k, v, *terms):
        return OPERATORS.forward(*OPERATORS.flat(x))[:2]
    return band.forward(x)[:2]  # the dispatcher would take a fifth of a short call


def like(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """New tensors like the results of `band.forward`."""
    lse = x.q.new_empty(x.q.shape[:3], dtype=x.wide)
    return heads_last(x.q, x.v.shape[3]), lse, lse.new_empty(2, *lse.shape)


OPERATORS = Operators(
    "longitude::toeplitz_attention", band.forward, band.backward, like, results=3, terms=Terms, limits=Limits,
    of_limits="Tensor? spans, SymInt near, SymInt? low, SymInt? high", device="cpu",
)  # fmt: skip


# ---- one query for each head: the first layer of a model describes the call of decode.c, and all layers use it ------------
SMALL = 2**17  # elements of keys up to which one thread ends before a second would begin


def decoding(r: Request) -> DecodingStep | None:
    """The description of a request of one query for each head, and biases of the offset, by plain order; None of any other.

    Its table [H or 1, Lk] has the bias at the offsets of the query from each key, the first of which is the largest.
    """
    plain = r.q.shape[2] == 1 and r.dropout == 0 and r.contiguous and len(r.pairs.beyond_band) == len(r.learned) == 0
    if not plain or r.q.dtype not in band.OPTIONS or not {*map(type, r.terms)} <= {OffsetBias}:
        return None
    if torch.is_grad_enabled() or not in_memory(r.q, r.k, r.v) or not band.available(r.q.dtype):
        return None
    first, wide = r.position_gap, torch.promote_types(r.q.dtype, torch.float32)
    biases = [bias_of(term, first, first - r.length + 1, r.q, wide) for term in r.terms]  # type: ignore[arg-type]
    table = sum(biases[1:], biases[0]) if biases else None
    return DecodingStep(Inputs(r.q, r.k, r.v, band.Terms(table), band.limits_of(r), r.scale))


class DecodingStep:
    """Attention of a single query, shared by the layers of a model, which differ only in q, k and v.

    It computes softmax(scale q.k + table) v [B, H, 1, Dv] for q [B, H, 1, D], k [B, Hkv, Lk, D] and v [B, Hkv, Lk, Dv].
    Describing a call to C takes longer than a short call. Measured with 192 keys of 4 heads of 64 (Zen 3, one thread, processor
    time): 20 us for a layer, 28 us for torch's function, 88 us for `band.forward`.
    """

    def __init__(self, x: Inputs):
        run = band.functions(x.q.dtype)
        assert run is not None
        (batch, heads, _, dim), (shared, keys), width, table = x.q.shape, x.k.shape[1:3], x.v.shape[3], x.terms.table
        self.shapes = (batch, heads, 1, dim), (batch, shared, keys, dim), (batch, shared, keys, width)
        self.dtype = x.q.dtype
        alone = table is None or (table.shape in ((heads, keys), (1, keys)) and table.dtype == x.wide and table.is_cpu)
        if heads % shared or not alone:
            band.require(x)  # its message says what does not fit; each call compares q, k and v with the shapes
        threads = torch.get_num_threads() if x.k.numel() > SMALL else 1
        shape = band.shape_of(x, threads)
        self.space = x.q.new_empty(threads * run.decode_space(shape), dtype=x.wide)
        self.size = batch, heads, 1, width
        self.inputs, self.out = (band.In(), band.In(), band.In()), band.Out(None, heads * width, width, width, 0)
        self.run = partial(run.decode, shape, *self.inputs, *shape.table, self.out, None, None, self.space.data_ptr())

    def __call__(self, r: Request) -> Tensor:
        out, kept = r.q.new_empty(self.size), []
        for argument, x, shape in zip(self.inputs, (r.q, r.k, r.v), self.shapes, strict=True):
            if x.shape != shape or x.dtype != self.dtype or not x.is_cpu:  # another layer's, which C would read past
                raise UsageError("decoding in C", f"{list(shape)} of {self.dtype}", f"{list(x.shape)} of {x.dtype}")
            if x.stride(3) != 1:
                kept.append(x := x.contiguous())  # alive until the loop has read it
            argument.at = x.data_ptr()
            argument.batch, argument.head, argument.row, _ = x.stride()
        self.out.at = out.data_ptr()
        self.run()
        return out
