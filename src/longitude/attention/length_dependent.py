"""Splitting of calls in which the encoding of a key depends on the query: into runs of equal length, or regions of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longitude.attention.masks import Ago, AllOf, Mask, for_heads, of_rows
from longitude.attention.merge import merge_attention
from longitude.attention.request import Request, transformed
from longitude.attention.spans import Cut, assembled, pieces
from longitude.attention.terms import with_sinks
from longitude.errors import UsageError
from longitude.native.derivatives import readable, recomputed, tracing
from longitude.positions.base import Region
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, as_int, explicit, part_of, single_axis
from longitude.positions.terms import RowBias, Transport

Answer = tuple[Tensor, Any]


@dataclass(frozen=True)
class Part:
    """A part of a call: rows of the batch, queries, and the request for them.

    If a call has several parts, `transform` encodes the keys of one part at a time. A single part has slices without bounds,
    because compilers would treat bounds as constants. regions: the requests of each region, for encodings with regions. Their
    results are merged, and the call then has a single part.
    """

    batch: slice
    rows: slice
    request: Request
    transform: Callable[[Request], Request] | None = None
    regions: tuple[Cut, ...] = ()

    @property
    def requests(self) -> list[Request]:
        """Requests that backends compute."""
        return [request for cut in self.regions for *_, request in cut] or [self.request]

    def with_lse(self) -> Part:
        """Return a copy that requests the logsumexp of the scores."""
        regions = tuple([(*places, r.with_lse()) for *places, r in cut] for cut in self.regions)
        return replace(self, request=self.request.with_lse(), regions=regions)


def parted(r: Request, encoding: Composed, q_positions: Positions, k_positions: Positions) -> list[Part]:
    """Split a call by the sequence length that its tables depend on; a single part is already transformed."""
    if encoding.regions():
        return [Part(slice(None), slice(None), r, regions=in_regions(r, encoding, q_positions, k_positions))]
    runs = list(_runs(encoding, q_positions, k_positions, r))
    if len(runs) == 1:
        return [Part(slice(None), slice(None), transformed(r, encoding, q_positions, k_positions, runs[0][2]))]
    parts = []
    for batch, rows, length in runs:
        keys = slice(0, r.length) if r.weights else r.reachable(rows.start, rows.stop)
        places = part_of(q_positions, batch, rows), part_of(k_positions, batch, keys)
        transform = partial(transformed, encoding=encoding, q_positions=places[0], k_positions=places[1], length=length)
        parts.append(Part(batch, rows, r.piece(rows, keys, batch), transform))
    return parts


def joined(parts: list[Part], run: Callable[[Request], tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Run all parts: the whole output, and the weights or logsumexp. Backward transforms each part again."""

    def run_part(part: Part) -> tuple[Tensor, Tensor | None]:
        return run(part.transform(part.request) if part.transform else part.request)

    batch, rows = max(part.batch.stop for part in parts), max(part.rows.stop for part in parts)
    r = parts[0].request
    out = r.q.new_zeros(batch, r.heads, rows, r.v.shape[3])
    second = None
    for part in parts:
        of_part, second_of_part = recomputed(run_part, part)
        out[part.batch, :, part.rows] = of_part
        if second_of_part is not None:
            if second is None:
                second = second_of_part.new_zeros(batch, r.heads, rows, *second_of_part.shape[3:])
            second[part.batch, :, part.rows] = second_of_part
    return out, second


def require_same_past(encoding: Composed, max_position: int | Tensor, now: int | Tensor) -> None:
    """ValueError if cached tokens were encoded with other tables than a full forward pass would use now.

    Upper layers have mixed the outputs of lower ones, so rotating raw keys again could not correct it.
    max_position: the largest position when they were made; now: with this call's tokens.
    """
    if isinstance(max_position, Tensor) or isinstance(now, Tensor):
        max_position, now = torch.broadcast_tensors(*both(max_position, now))
    changed = encoding.length_at(max_position, max_position) != encoding.length_at(max_position, now)
    if bool(changed.any()) if isinstance(changed, Tensor) else changed:
        expected, got = (
            "new tokens that rotate with the tables of the cached ones",
            "a length at which the tables change",
        )
        raise UsageError("cache", expected, got, "prefill again from the start, or pass follow='row' or 'declared'")


def later(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    """The greater position, row by row."""
    return torch.maximum(*both(a, b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else max(a, b)


def both(a: int | Tensor, b: int | Tensor) -> tuple[Tensor, Tensor]:
    """Both as tensors on one device."""
    device = a.device if isinstance(a, Tensor) else b.device if isinstance(b, Tensor) else None
    return torch.as_tensor(a, device=device), torch.as_tensor(b, device=device)


def newest(positions: Positions, count: int) -> int | Tensor:
    """The largest position: an int, or [1] or [B, 1]."""
    if isinstance(positions, int):
        return positions + count - 1
    return positions.amax(tuple(range(1, positions.dim())))[:, None] if positions.dim() > 1 else positions.amax(0, True)


def _runs(
    encoding: Composed, q_positions: Positions, k_positions: Positions, r: Request
) -> Iterator[tuple[slice, slice, int | None]]:
    """Yield rows of the batch, queries, and the sequence length that their tables depend on."""
    everything = slice(0, r.q.shape[0]), slice(0, r.rows)
    last = newest(k_positions, r.length)
    if not isinstance(q_positions, Tensor) and not isinstance(last, Tensor):
        length = encoding.length_at(q_positions, last)
        if length == encoding.length_at(q_positions + r.rows - 1, last):  # it never falls
            yield *everything, length
            return
    places = explicit(q_positions, r.rows, r.q.device)
    if not readable(places, *([last] if isinstance(last, Tensor) else [])):
        expected = "an int to count from, because tables of this encoding follow the length"
        got = "a tensor while compiling or under torch.func.vmap, where its numbers are not known"
        remedy = "call it for each row, outside of them; a RoPE scaling may also have follow='declared'"
        raise UsageError("positions", expected, got, remedy)
    places = places.amax(-1) if places.dim() == 3 else places
    lengths = encoding.length_at(*torch.broadcast_tensors(places, torch.as_tensor(last, device=places.device)))
    lengths = lengths if lengths.dim() == 2 else lengths[None]
    alike = bool((lengths == lengths[:1]).all())
    for b, row in enumerate(lengths[:1] if alike else lengths):
        values, counts = row.unique_consecutive(return_counts=True)
        start = 0
        for length, count in zip(values.tolist(), counts.tolist(), strict=True):
            yield everything[0] if alike else slice(b, b + 1), slice(start, start + count), length
            start += count


# ---- regions of pairs ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class InRegion(Mask):
    """Pairs of a region, by positions that need not count up. q_first, k_first: orders of the first query and key."""

    region: Region
    q_positions: Tensor
    k_positions: Tensor
    q_first: int
    k_first: int

    def allowed(self, q_order: Tensor, k_order: Tensor) -> Tensor:
        i, j = self.q_positions[..., q_order - self.q_first], self.k_positions[..., k_order - self.k_first]
        return for_heads(self.region.holds(i[..., :, None], j[..., None, :]))

    def of(self, batch: slice | list[int]) -> Mask:
        i, j = of_rows(self.q_positions, batch), of_rows(self.k_positions, batch)
        return replace(self, q_positions=i, k_positions=j)


def in_regions(
    r: Request, encoding: Composed, q_positions: Positions, k_positions: Positions, whole: bool = False
) -> tuple[Cut, ...]:
    """The requests of each region that has pairs, for queries and keys of r that are raw.

    They return their logsumexp if there is something to merge. whole: one request for each region, and none left out.
    """
    for term in r.terms:
        if isinstance(term, RowBias | Transport):
            raise ValueError(
                f"the encoding moves positions, for which attention runs in parts, and {type(term).__name__} reads whole rows "
                "of scores; use one of them"
            )
    whole = whole or r.weights or tracing()  # slices with bounds would be constants of a graph
    i, j = (single_axis("the encoding moves positions", p) for p in (q_positions, k_positions))
    cut = (
        [] if whole or r.rows == 1 or len(r.pairs.beyond_band) == 0 else pieces(r)
    )  # positions count up within documents
    everything = slice(None) if whole else slice(0, r.rows)
    dense = [(slice(None), everything, r)] if isinstance(cut, str) or not cut else cut
    regions = []
    for region in encoding.regions():
        requests = []
        for batch, rows, part in dense:
            start, places = part.k_order - r.k_order, (i, j)
            if not whole:
                keys = slice(start, start + part.length)
                places = as_int(part_of(i, batch, rows)), as_int(part_of(j, batch, keys))
            for part_rows, request in _of_region(replace(part, sinks=None), encoding, region, *places, whole):
                moved = slice(None) if whole else slice(rows.start + part_rows.start, rows.start + part_rows.stop)
                requests.append((batch, moved, request))
        regions += [requests] if requests else []
    if not regions:
        return in_regions(r, encoding, q_positions, k_positions, whole=True)
    several = not r.weights and (r.lse or r.sinks is not None or len(regions) > 1)
    return tuple([(*places, replace(part, lse=several)) for *places, part in requests] for requests in regions)


def _of_region(
    r: Request, encoding: Composed, region: Region, i: Positions, j: Positions, whole: bool
) -> Iterator[tuple[slice, Request]]:
    """Queries of a request and their rotated request in a region, which has an interval of keys for each block of them.

    i, j: positions of queries and keys.
    """
    size, rows, keys = region.block, slice(None), slice(None)
    if not whole:
        rows, keys = slice(0, r.rows), slice(0, r.length)
    boxes: list[tuple[slice, slice, Mask | None]]
    if isinstance(i, int) and isinstance(j, int) and size == 1:
        shift = r.order_gap - (i - j)  # order and position may count from different tokens
        boxes = [(rows, keys, Ago(*(None if end is None else end + shift for end in (region.first, region.last))))]
    elif isinstance(i, int) and isinstance(j, int) and not whole:
        boxes = []
        for block in range(i // size, (i + r.rows - 1) // size + 1):
            first = 0 if region.last is None else max((block - region.last) * size - j, 0)
            last = r.length if region.first is None else min((block - region.first + 1) * size - j, r.length)
            block_rows = slice(max(block * size - i, 0), min((block + 1) * size - i, r.rows))
            boxes += [(block_rows, slice(first, last), None)] if first < last else []
    else:
        places = explicit(i, r.rows, r.q.device), explicit(j, r.length, r.q.device)
        boxes = [(rows, keys, InRegion(region, *places, r.q_order, r.k_order))]
    for rows, keys, inside in boxes:
        part = r if inside is None else replace(r, mask=AllOf((*r.mask.parts(), inside)))
        places = i, j
        if not whole:
            part = part.piece(rows, keys)
            low, high = part.mask.reach
            beyond = low is not None and low > part.order_gap + part.rows - 1
            if beyond or (high is not None and high < part.order_gap - part.length + 1):
                continue
            reached = part.reachable(0, part.rows)
            part = part.piece(slice(0, part.rows), reached)
            keys = slice(keys.start + reached.start, keys.start + reached.stop)
            places = part_of(i, slice(None), rows), part_of(j, slice(None), keys)
        yield rows, transformed(part, encoding, *places, region=region)


def merged(r: Request, regions: Sequence[Cut], run: Callable[[Request], Answer]) -> Answer:
    """The output, and what else r requests, of attention over all regions.

    Weights of each region are multiplied by its share; the logsumexps then need a second call, because a backend returns one of
    both.
    """
    several = regions[0][0][-1].lse
    answers = [_in_places(replace(r, lse=several), cut, run) for cut in regions]
    if not several and not r.weights:
        return answers[0]
    outs, seconds = map(list, zip(*answers, strict=True))
    lses = seconds
    if r.weights:
        lses = [run(replace(part, weights=False, dropout=0.0, lse=True))[1] for ((*_, part),) in regions]
    out, lse = merge_attention(outs, lses)
    total = lse
    if r.sinks is not None:
        out, total = with_sinks(out, lse, r.sinks)
    if not r.weights:
        return out, total if r.lse else None
    total = total.masked_fill(total == -math.inf, 0.0)
    shares = [(lse_of - total).exp()[..., None] for lse_of in lses]
    return out, torch.stack([part * share.to(part.dtype) for part, share in zip(seconds, shares, strict=True)]).sum(0)


def _in_places(r: Request, cut: Cut, run: Callable[[Request], Answer]) -> Answer:
    """The answer of a region for all queries."""
    batch, rows, part = cut[0]
    alone = len(cut) == 1 and batch == slice(None) and rows in (slice(None), slice(0, r.rows))
    return run(part) if alone else assembled(r, cut, run)
