"""A mask as the interval of keys that each query attends to, if it is one and its ends never decrease."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from longitude.attention.masks import AllOf, Chunks, Documents, Mask, Padding, Prefix, Reach
from longitude.attention.pairs import AllowedPairs, is_band
from longitude.attention.request import Request
from longitude.native.gpu import captured, stream_of
from longitude.native.tensors import needs_operator


class Intervals(NamedTuple):
    """Intervals of visible keys, lo[i] .. hi[i]-1 for query i; both never decrease. One row if all sequences agree."""

    lo: Int[Tensor, "B Lq"]
    hi: Int[Tensor, "B Lq"]

    def first_queries(self, keys: int, block: int) -> Int[Tensor, "B 4 blocks"]:
        """Bounds of queries for each block of keys: first of some, first of all, first after all, first after some.

        "some" queries attend to at least one key of the block; "all" queries attend to every key.
        """
        start = torch.arange(0, keys, block, device=self.lo.device, dtype=self.lo.dtype).expand(len(self.lo), -1)
        start, stop = start.contiguous(), (start + block).clamp(max=keys)
        edges = (self.hi, start, True), (self.hi, stop, False), (self.lo, start, True), (self.lo, stop, False)
        return torch.stack([torch.searchsorted(*edge[:2], right=edge[2], out_int32=True) for edge in edges], 1)


_KNOWN: WeakKeyDictionary[AllowedPairs, Intervals] = WeakKeyDictionary()
"""Layers of one forward share their pairs."""


def intervals_of(r: Request) -> Intervals:
    """Intervals of a request that `refusal` accepts."""
    if not r.beyond_band:
        return _of_band(r, r.band)
    if (known := _KNOWN.get(r.pairs)) is None:
        known = _KNOWN[r.pairs] = _found(r)
    return known


def refusal(r: Request) -> str | None:
    """Why its mask is no interval of keys for each query."""
    if not all(is_band(part) or isinstance(part, Prefix | Chunks | Documents | Padding) for part in r.mask.parts()):
        return "it supports causality and windows in token order, prefixes, chunks, padding and documents, joined by & only"
    _, cuts, _ = _split(r)
    if cuts and torch.compiler.is_compiling():
        return "it needs one interval of keys per query, and padding and documents are unknown while compiling"
    if all(isinstance(part, Chunks) or (isinstance(part, Documents) and part.contiguous) for part in cuts):
        return None
    runs = _runs_of(r)
    if (whole := _WHOLE.get(r.pairs)) is None:
        whole = _WHOLE[r.pairs] = bool(runs.documents & runs.padding)  # the one number that the host waits for
    if whole:
        return None
    what = (
        "padding is in the middle of a sequence" if bool(runs.documents) else "a document's tokens are not contiguous"
    )
    return f"it needs one interval of keys per query, and {what}"


def _split(r: Request) -> tuple[list[Prefix], list[Mask], Reach]:
    """Prefixes; documents, chunks and padding; and the reach of the others."""
    parts = r.mask.parts()
    prefixes = [part for part in parts if isinstance(part, Prefix)]
    cuts = [part for part in parts if not is_band(part) and not isinstance(part, Prefix)]
    return prefixes, cuts, AllOf(tuple(part for part in parts if is_band(part))).reach


def _of_band(r: Request, band: tuple[int | None, int | None]) -> Intervals:
    """Intervals of a band, cached for later calls on the same CUDA stream: on another they may not be computed yet.

    In a CUDA graph tensors exist only once it is replayed, so intervals are computed inside the graph.
    """
    numbers = r.rows, r.length, r.order_gap, *band, r.q.device
    if needs_operator(r.q) or captured(r.q.device):
        return _made(*numbers)
    return _kept(*numbers, stream_of(r.q.device))


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _kept(*numbers: Any) -> Intervals:
    return _made(*numbers[:-1])


def _made(rows: int, keys: int, gap: int, low: int | None, high: int | None, device: torch.device) -> Intervals:
    i = torch.arange(rows, device=device, dtype=torch.int32) + gap
    return Intervals(*(x[None] for x in _within(i, torch.zeros_like(i), torch.full_like(i, keys), low, high)))


def _within(i: Tensor, lo: Tensor, hi: Tensor, low: int | None, high: int | None) -> tuple[Tensor, Tensor]:
    """Intervals of queries of order i that a band leaves of the keys lo .. hi-1."""
    first = lo if high is None else torch.minimum(torch.maximum(i - high, lo), hi)
    stop = hi if low is None else torch.minimum(torch.maximum(i - low + 1, lo), hi)
    return first, torch.maximum(first, stop)


def _found(r: Request) -> Intervals:
    prefixes, cuts, band = _split(r)
    lo, hi = _of_cuts(r, band) if cuts else _of_band(r, band)
    for prefix in prefixes:
        length = prefix.length.view(-1, 1) if isinstance(prefix.length, Tensor) else prefix.length
        seen = (r.q_tokens() + 1).clamp(min=length) - r.k_order
        hi = torch.minimum(hi, seen.clamp(0, r.length).to(hi.dtype))
        lo, hi = torch.broadcast_tensors(torch.minimum(lo, hi), hi)
    return Intervals(lo.contiguous(), hi.contiguous())


def _of_cuts(r: Request, band: Reach) -> tuple[Tensor, Tensor]:
    """Interval ends lo and hi of a band within documents and between padding; the host reads no values."""
    runs, i = _runs_of(r), torch.arange(r.q_order, r.q_order + r.rows, device=r.q.device)
    lo, hi = (x.to(r.q.device) for x in (runs.lo, runs.hi))
    some = lo < hi
    lo, hi = _within(i, lo, hi, *band)
    hi = torch.where(some, hi, r.k_order).cummax(-1).values  # of queries whose document has no keys: an empty interval
    lo = torch.where(some, lo, hi)
    return (lo - r.k_order).to(torch.int32), (hi - r.k_order).to(torch.int32)


class Runs(NamedTuple):
    """Keys of each query's document without padding at its ends, lo .. hi-1, by order in the sequence.

    documents: whether the tokens of each document are adjacent. padding: whether there is no padding between visible keys.
    """

    lo: Int[Tensor, "B Lq"]
    hi: Int[Tensor, "B Lq"]
    documents: Tensor
    padding: Tensor


_RUNS: WeakKeyDictionary[AllowedPairs, Runs] = WeakKeyDictionary()


_WHOLE: WeakKeyDictionary[AllowedPairs, bool] = WeakKeyDictionary()
"""Whether documents and padding are in one piece; kept, so that only the first layer of a forward waits for the device."""


def _runs_of(r: Request) -> Runs:
    if (known := _RUNS.get(r.pairs)) is None:
        known = _RUNS[r.pairs] = _runs(r)
    return known


def _runs(r: Request) -> Runs:
    """Runs of a request, computed on the device of its masks if all are on one, else on the device of q."""
    _, cuts, _ = _split(r)
    columns = [x for part in cuts for x in vars(part).values() if isinstance(x, Tensor)]
    device = columns[0].device if len({x.device for x in columns}) == 1 else r.q.device
    documents = any(not isinstance(part, Padding) for part in cuts)  # without them, queries need not be among the keys
    stop = r.k_order + r.length
    first, stop = (min(r.k_order, r.q_order), max(stop, r.q_order + r.rows)) if documents else (r.k_order, stop)
    token = torch.arange(stop, device=device)
    visible = (token >= r.k_order) & (token < r.k_order + r.length)
    begins, label = token == first, torch.zeros_like(token)
    for part in cuts:
        if isinstance(part, Padding):
            visible = visible & part.valid[..., :stop].to(device).bool()
            continue
        assert isinstance(part, Documents | Chunks)
        ids = (part.ids if isinstance(part, Documents) else part.ids(token))[..., :stop].to(device)
        begins = begins | F.pad(ids[..., 1:] != ids[..., :-1], (1, 0), value=True)
        of_ids = torch.searchsorted(ids.sort(-1).values, ids.contiguous())
        label, of_ids = torch.broadcast_tensors(label, of_ids)
        label = label * stop + of_ids
        label = torch.searchsorted(label.sort(-1).values, label.contiguous())  # a small number again
    begins, label, visible, token = torch.broadcast_tensors(begins, label, visible, token)

    begin = torch.where(begins, token, 0).cummax(-1).values
    end = torch.where(F.pad(begins[..., 1:], (0, 1), value=True), token + 1, stop)
    end = end.flip(-1).cummin(-1).values.flip(-1)
    next_key = torch.where(visible, token, stop).flip(-1).cummin(-1).values.flip(-1)
    newest_key = torch.where(visible, token + 1, 0).cummax(-1).values
    lo = next_key.gather(-1, begin)
    hi = torch.maximum(lo, newest_key.gather(-1, end - 1))
    among = (token >= r.k_order) & (token < r.k_order + r.length)
    runs = begins[..., first + 1 :].sum(-1)
    distinct = label[..., first:].sort(-1).values.diff(dim=-1).ne(0).sum(-1)
    hole = among & ~visible & (token > lo) & (token < hi)
    queries = slice(r.q_order, r.q_order + r.rows) if documents else slice(0, 1)
    lo, hi = (x[..., queries].reshape(-1, x[..., queries].shape[-1]).expand(-1, r.rows) for x in (lo, hi))
    return Runs(lo, hi, (runs == distinct).all(), ~hole.any())
