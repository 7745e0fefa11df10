"""Attention in regions, for encodings whose positions differ by pair: regions are merged by their logsumexp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.attention.masks import AllOf, Mask
from longitude.attention.merge import merge_attention, with_logit
from longitude.attention.patterns import Ago
from longitude.attention.request import Request, transformed
from longitude.attention.spans import assembled, pieces
from longitude.attention.terms import with_sinks
from longitude.errors import UsageError
from longitude.native.derivatives import tracing
from longitude.positions.base import Region, RowBias, Transport
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, as_int, explicit, part_of


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
        inside = self.region.holds(i[..., :, None], j[..., None, :])
        return inside[:, None] if inside.dim() == 3 else inside

    def of(self, batch: slice | list[int]) -> Mask:
        i, j = (p[batch] if p.dim() == 2 and len(p) > 1 else p for p in (self.q_positions, self.k_positions))
        return replace(self, q_positions=i, k_positions=j)


class Box(NamedTuple):
    """Queries and keys of a request, of sequences `batch`, and the mask there."""

    batch: slice | list[int]
    rows: slice
    keys: slice
    mask: Mask


@dataclass(frozen=True)
class RegionCut:
    """A request restricted to a region: queries and keys rotated for it, and the boxes that contain its pairs.

    rows, keys: the part of the call that `moved` covers; None: all, with a single box.
    """

    moved: Request
    boxes: list[Box]
    rows: slice | None = None
    keys: slice | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def __iter__(self) -> Iterator[tuple[slice | list[int], slice, Request]]:
        """Sequences, rows of their queries, and their request.

        Each is built when it runs, so that backward sums the gradients of its keys before it computes those of the box before.
        """
        for box in self.boxes:
            if self.rows is None or self.keys is None:
                yield box.batch, box.rows, replace(self.moved, mask=box.mask)
                continue
            rows, keys = (_within(*pair) for pair in ((box.rows, self.rows), (box.keys, self.keys)))
            yield box.batch, box.rows, replace(self.moved.piece(rows, keys, box.batch), mask=box.mask)

    def with_lse(self) -> RegionCut:
        return replace(self, moved=self.moved.with_lse())


Answer = tuple[Tensor, Tensor | None]


def cut_by_region(
    r: Request, encoding: Composed, q_positions: Positions, k_positions: Positions
) -> tuple[RegionCut, ...]:
    """Each region that contains pairs; queries and keys of r are raw.

    They return their logsumexp if there is something to merge.
    """
    for term in r.terms:
        if isinstance(term, RowBias | Transport):
            raise ValueError(
                f"the encoding moves positions, for which attention runs in parts, and {type(term).__name__} reads whole rows "
                "of scores; use one of them"
            )
    places = _of_one_axis(q_positions), _of_one_axis(k_positions)
    if r.weights or tracing():  # slices with bounds would be constants of a graph
        sizes = (r.q_order, r.k_order), (r.rows, r.length), r.q.device
        masks = [(x, AllOf((*r.mask.parts(), _mask_of(x, *places, *sizes)))) for x in encoding.regions()]
        all_of = slice(None), slice(None), slice(None)
        moved = ((transformed(r, encoding, *places, region=region), mask) for region, mask in masks)
        return tuple(RegionCut(replace(x, sinks=None, lse=not r.weights), [Box(*all_of, mask)]) for x, mask in moved)
    dense = _dense(r)
    boxed = [
        (region, [box for whole in dense for box in _boxes(r, whole, region, *places)]) for region in encoding.regions()
    ]
    boxed = [(region, boxes) for region, boxes in boxed if boxes]
    lse = r.lse or r.sinks is not None or len(boxed) > 1
    cuts = []
    for region, boxes in boxed:
        rows, keys = _hull([box.rows for box in boxes]), _hull([box.keys for box in boxes])
        i, j = part_of(places[0], slice(None), rows), part_of(places[1], slice(None), keys)
        moved = transformed(r.piece(rows, keys), encoding, i, j, region=region)
        cuts.append(RegionCut(replace(moved, sinks=None, lse=lse), boxes, rows, keys))
    return tuple(cuts) or (RegionCut(r, []),)


def merged(r: Request, cuts: Sequence[RegionCut], run: Callable[[Request], Answer]) -> Answer:
    """The output, and what else r requests, of attention over all regions."""
    if r.weights:
        return _with_weights(r, cuts, run)
    needed = r.lse or r.sinks is not None or len(cuts) > 1
    whole = replace(r, lse=needed)
    answers = [_in_places(whole, cut, run) for cut in cuts]
    if not needed:
        return answers[0]
    out, lse = merge_attention(*map(list, zip(*answers, strict=True)))
    if r.sinks is not None:
        out, lse = with_sinks(out, lse, r.sinks)
    return out, lse if r.lse else None


def _with_weights(r: Request, cuts: Sequence[RegionCut], run: Callable[[Request], Answer]) -> Answer:
    """Weights of each region times its share; the logsumexps need a second call, because a backend returns one of both."""
    outs, weights = zip(*(_in_places(r, cut, run) for cut in cuts), strict=True)
    again = replace(r, weights=False, lse=True)
    lses: list[Any] = [
        _in_places(again, cut, lambda part: run(replace(part, weights=False, dropout=0.0, lse=True)))[1] for cut in cuts
    ]
    out, lse = merge_attention(list(outs), lses)
    total = lse if r.sinks is None else with_logit(lse, r.sinks.to(lse.dtype)[:, None])
    total = total.masked_fill(total == -math.inf, 0.0)
    shares = [(lse_of - total).exp()[..., None] for lse_of in lses]
    if r.sinks is not None:
        out, _ = with_sinks(out, lse, r.sinks)
    return out, torch.stack([part * share.to(part.dtype) for part, share in zip(weights, shares, strict=True)]).sum(0)


def _in_places(r: Request, cut: RegionCut, run: Callable[[Request], Answer]) -> Answer:
    """The answer of a region for all queries."""
    if len(cut) == 1 and cut.boxes[0].batch == slice(None) and cut.boxes[0].rows in (slice(None), slice(0, r.rows)):
        return run(next(iter(cut))[2])
    return assembled(r, cut, run)


# ---- which queries and keys ----------------------------------------------------------------------------------------------
def _dense(r: Request) -> list[Box]:
    """The request, cut at padding and documents where these are known: positions count up within most of the pieces."""
    everything = Box(slice(None), slice(0, r.rows), slice(0, r.length), r.mask)
    if r.rows == 1 or len(r.beyond_band) == 0 or isinstance(cut := pieces(r), str):
        return [everything]
    first = [piece.k_order - r.k_order for *_, piece in cut]
    return [
        Box(batch, rows, slice(start, start + piece.length), piece.mask)
        for (batch, rows, piece), start in zip(cut, first, strict=True)
    ]


def _boxes(r: Request, box: Box, region: Region, q_positions: Positions, k_positions: Positions) -> list[Box]:
    """Parts of a box that a region may cover: bands and blocks if positions count up, else arbitrary pairs."""
    i, j = as_int(part_of(q_positions, box.batch, box.rows)), as_int(part_of(k_positions, box.batch, box.keys))
    q_first, k_first = r.q_order + box.rows.start, r.k_order + box.keys.start
    if isinstance(i, int) and isinstance(j, int) and region.block > 1:
        return _blocks(box, region, i, j, q_first - k_first)
    rows, keys = box.rows.stop - box.rows.start, box.keys.stop - box.keys.start
    region_mask = _mask_of(region, i, j, (q_first, k_first), (rows, keys), r.q.device)
    box = box._replace(mask=AllOf((*box.mask.parts(), region_mask)))
    return _trimmed(box, q_first - k_first)


def _mask_of(
    region: Region, i: Positions, j: Positions, first: tuple[int, int], counts: tuple[int, int], device: torch.device
) -> Mask:
    """The pairs of a region as a mask. i, j: positions of queries and keys; first: their first orders; counts: how many."""
    if isinstance(i, int) and isinstance(j, int) and region.block == 1:
        shift = first[0] - first[1] - (i - j)  # order and position may count from different tokens
        return Ago(*(None if end is None else end + shift for end in (region.first, region.last)))
    return InRegion(region, explicit(i, counts[0], device), explicit(j, counts[1], device), *first)


def _blocks(box: Box, region: Region, i: int, j: int, gap: int) -> list[Box]:
    """A box for each block of the queries. i, j: positions of its first query and key; gap: between their orders."""
    size, rows, keys = region.block, box.rows.stop - box.rows.start, box.keys.stop - box.keys.start
    trimmed = []
    for block in range(i // size, (i + rows - 1) // size + 1):
        start, stop = max(block * size - i, 0), min((block + 1) * size - i, rows)
        first = 0 if region.last is None else max((block - region.last) * size - j, 0)
        last = keys if region.first is None else min((block - region.first + 1) * size - j, keys)
        if first < last:
            block_box = Box(box.batch, _moved(start, stop, box.rows), _moved(first, last, box.keys), box.mask)
            trimmed += _trimmed(block_box, gap + start - first)
    return trimmed


def _trimmed(box: Box, gap: int) -> list[Box]:
    """The box without queries and keys that the reach of its mask excludes, in a list; an empty list if nothing remains.

    gap: order of its first query minus order of its first key.
    """
    low, high = box.mask.reach
    start, stop, first, last = 0, box.rows.stop - box.rows.start, 0, box.keys.stop - box.keys.start
    if low is not None:
        start = max(start, low - gap)
    if high is not None:
        stop = min(stop, high - gap + last)
    if low is not None:
        last = min(last, gap + stop - low)
    if high is not None:
        first = max(first, gap + start - high)
    if start >= stop or first >= last:
        return []
    return [box._replace(rows=_moved(start, stop, box.rows), keys=_moved(first, last, box.keys))]


def _moved(start: int, stop: int, inside: slice) -> slice:
    return slice(inside.start + start, inside.start + stop)


def _within(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _hull(parts: list[slice]) -> slice:
    """The smallest slice that covers all."""
    if len(parts) == 1:
        return parts[0]
    return slice(min(part.start for part in parts), max(part.stop for part in parts))


def _of_one_axis(positions: Positions) -> Positions:
    if isinstance(positions, int) or positions.dim() < 3:
        return positions
    if positions.shape[-1] > 1:
        raise UsageError(
            "positions", "[L] or [B, L], because the encoding moves positions of one axis", list(positions.shape)
        )
    return positions[..., 0]
