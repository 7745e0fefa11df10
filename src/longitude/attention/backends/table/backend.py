"""What offsets decide is a table of Lq + Lk - 1 entries, what tokens add is a number each: attention in linear memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import NO_FORWARD_MODE, Backend, in_forward_mode, wide_item
from longitude.attention.backends.table.compiled import available
from longitude.attention.backends.table.function import toeplitz_attention
from longitude.attention.backends.table.tiles import TILE_ELEMENTS
from longitude.attention.bias_tables import bias_of
from longitude.attention.request import Request, band_of
from longitude.attention.scores import drift_level
from longitude.attention.spans import partial_by_spans, pieces, steady
from longitude.positions.base import Drift, OffsetBias, OffsetVectors


def table(r: Request) -> tuple[Tensor, Tensor]:
    """The output, and the logsumexp of the scores."""
    if (single := single_pass(r)) is not None:
        return banded(*single)
    out, lse = partial_by_spans(r, banded)
    assert lse is not None or not r.lse
    return out, lse  # type: ignore[return-value]


def counting(r: Request) -> Request | None:
    """The request with ints for positions, if all that terms read of them counts up by one; None otherwise."""
    if r.contiguous:
        return r
    if not any(isinstance(term, OffsetBias | OffsetVectors) for term in r.terms):
        return replace(r, q_positions=0, k_positions=0)
    return steady(r)


def in_c(r: Request) -> bool:
    """Whether the loop in C takes it: nothing but biases of the offset, and a compiler at hand."""
    wide = torch.promote_types(r.q.dtype, torch.float32)
    return all(isinstance(term, OffsetBias) for term in r.terms) and available(wide)


def single_pass(r: Request) -> tuple[Request, Tensor] | None:
    """Padding and documents without a call for each span: the request without them, and its spans [n, 5] for the loop in C.

    None where the loop cannot, or where there are none.
    """
    if len(r.beyond_band) == 0 or not in_c(r):
        return None
    found = r.pairs.spans
    assert not isinstance(found, str), found
    cuts = [
        (b, q_from - r.q_order, q_to - r.q_order, k_from - r.k_order, k_to - r.k_order)
        for batch, own in found
        for q_from, q_to, k_from, k_to in own
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
    """Position of the first query minus that of the first key, by a span whose positions count up by one."""
    part = steady(r.piece(slice(q_from, q_to), slice(k_from, k_to), slice(b, b + 1)))
    if part is None:
        return None
    assert isinstance(part.q_positions, int) and isinstance(part.k_positions, int)
    return part.q_positions - q_from - (part.k_positions - k_from)


def banded(r: Request, cuts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Out [B, H, Lq, D] and the logsumexp of the scores [B, H, Lq] of a request whose mask is a band, cut into spans or not."""
    r = counting(r) or r
    assert isinstance(r.q_positions, int) and isinstance(r.k_positions, int)
    wide = torch.promote_types(r.q.dtype, torch.float32)
    # toeplitz_attention counts orders so that the last query has the order of the last key.
    late = r.order_gap + r.rows - r.length
    low, high = (None if bound is None else bound - late for bound in r.band)
    diagonals = r.rows + r.length - 1
    newest = r.q_positions - r.k_positions + r.rows - 1  # the offset of the first diagonal

    # What all far offsets share moves all scores of a row alike, and the weights not at all: the rest is counted from it.
    of_offsets = [term for term in r.terms if isinstance(term, OffsetBias | OffsetVectors)]
    reaches = [term.reach for term in of_offsets]
    reach = None if None in reaches or in_c(r) else max([x for x in reaches if x is not None], default=None)
    near = 0 if reach is None else max(0, min(diagonals - 1, newest - reach))

    # No query attends to the diagonals from `stop` on.
    stop = diagonals if low is None else max(near + 1, min(diagonals, r.length - low))

    def counted(of: Callable[[Tensor], Tensor]) -> Tensor:
        """Vectors [H or 1, N, D] of the diagonals from `near` on."""
        offsets = newest - near - torch.arange(stop - near, device=r.q.device)
        return at(of, offsets) if reach is None else at(of, offsets) - at(of, offsets.new_tensor([reach]))

    def at(of: Callable[[Tensor], Tensor], offsets: Tensor) -> Tensor:
        found = of(offsets).to(wide)
        return found if found.dim() == 3 else found[None]

    biases, keys, values = [], [], []
    for term in of_offsets:
        if isinstance(term, OffsetBias):
            bias = bias_of(term, newest - near, newest - diagonals + 1, r.q, wide)
            if reach is not None:
                bias = F.pad(bias - bias_of(term, reach, reach, r.q, wide), (near, 0))
            biases.append(bias)
            continue
        keys.append(counted(term.keys))
        if term.values is not None:
            values.append(counted(term.values))
        if isinstance(term.shift, Tensor) or term.shift:  # a shift of the queries is multiplied with each vector once
            shift = torch.as_tensor(term.shift, device=r.q.device).to(wide).expand(r.heads, 1, r.q.shape[3])
            biases.append(F.pad((r.scale * shift @ keys[-1].mT)[:, 0], (near, diagonals - stop)))

    level = drift_level(r)
    queries, others = (slice(start, start + n) for start, n in ((r.q_order, r.rows), (r.k_order, r.length)))
    out, lse = toeplitz_attention(
        r.q,
        r.k,
        r.v,
        total(biases),
        levels=None if level is None else (level[:, :, queries], level[:, :, others]),
        key_vectors=total(keys),
        value_vectors=total(values),
        spans=cuts,
        near=near,
        low=low,
        high=high,
        scale=r.scale,
    )
    if reach is None:
        return out, lse
    nothing = lse == -math.inf  # nor has what is shared a gradient there
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
    if in_forward_mode():
        return NO_FORWARD_MODE
    if single_pass(r) is None and any(counting(part) is None for part in parts(r)):
        return "positions do not count up by one, as far as is known; pass one int p for p, p+1, p+2, ..."
    if r.v.shape[3] != r.k.shape[3]:
        return f"it needs values as wide as keys, not {r.v.shape[3]} and {r.k.shape[3]}"
    return None


def parts(r: Request) -> list[Request]:
    """The request cut into bands."""
    cut = pieces(r)
    assert not isinstance(cut, str), cut
    return [part for _, _, part in cut]


def table_memory(r: Request) -> int:
    """Tiles of scores, their values and queries; biases and their band; vectors of near offsets; copies in float32."""
    batch, keys, heads, dim = r.q.shape[0], r.length, r.heads, r.q.shape[3]
    step = max(1, min(batch, TILE_ELEMENTS // (heads * min(128, r.rows) * min(256, keys))))
    tile = step * heads * min(2**15, r.rows * keys)
    numbers = tile + 4 * step * min(256, r.rows) * heads * dim + 6 * heads * (r.rows + keys)
    for term in r.terms:
        if isinstance(term, OffsetVectors):
            near = keys if term.reach is None else min(keys, 256 + term.reach)
            numbers += (4 if term.values is None else 8) * tile + 3 * heads * near * dim
        if isinstance(term, Drift):  # in float64
            numbers += 8 * batch * heads * (r.rows + keys)
    if r.q.dtype.itemsize < 4:
        numbers += step * dim * (heads * r.rows + 2 * r.k.shape[1] * keys)
    return numbers * wide_item(r)


def table_price(r: Request) -> float:
    if any(isinstance(term, OffsetVectors) for term in r.terms):
        return 2.5
    if in_c(r):
        # Finding spans takes longer than decoding by a dense row; and what is narrow is copied first.
        return 1.2 if (r.rows == 1 and r.beyond_band) or r.q.dtype.itemsize < 4 else 1.0
    return 2.0 if r.learned else 1.2


TABLE = Backend(
    "table",
    run=lambda r: table(r)[0],
    partial=table,
    terms=(OffsetBias, OffsetVectors, Drift),
    devices=("cpu",),
    limits=table_limits,
    memory=table_memory,
    price=table_price,
)
