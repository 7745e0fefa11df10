"""A mask as the interval of keys that each query attends to, if it is one and its ends never decrease."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

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


def intervals_of(r: Request) -> Intervals:
    """Intervals of a request that `refusal` accepts."""
    return r.pairs.once(_in_cuts, r.q.device) if r.pairs.beyond_band else _of_band(r.pairs, r.pairs.band, r.q.device)


def refusal(r: Request) -> str | None:
    """Why its mask is no interval of keys for each query."""
    if not all(is_band(part) or isinstance(part, Prefix | Chunks | Documents | Padding) for part in r.mask.parts()):
        return "it supports causality and windows in token order, prefixes, chunks, padding and documents, joined by & only"
    _, cuts, _ = _split(r.pairs)
    if cuts and torch.compiler.is_compiling():
        return "it needs one interval of keys per query, and padding and documents are unknown while compiling"
    if all(isinstance(part, Chunks) for part in cuts):
        return None
    if r.pairs.once(_in_one_piece, r.q.device):
        return None
    documents = bool(r.pairs.once(_runs, r.q.device).documents)
    what = "padding is in the middle of a sequence" if documents else "a document's tokens are not contiguous"
    return f"it needs one interval of keys per query, and {what}"


def _in_one_piece(pairs: AllowedPairs, device: torch.device) -> bool:
    """Whether documents and padding are: the one number that the host waits for, in the first layer of a forward."""
    runs = pairs.once(_runs, device)
    return bool(runs.documents & runs.padding)


def _split(pairs: AllowedPairs) -> tuple[list[Prefix], list[Mask], Reach]:
    """Prefixes; documents, chunks and padding; and the reach of the others."""
    parts = pairs.mask.parts()
    prefixes = [part for part in parts if isinstance(part, Prefix)]
    cuts = [part for part in parts if not is_band(part) and not isinstance(part, Prefix)]
    return prefixes, cuts, AllOf(tuple(part for part in parts if is_band(part))).reach


def _of_band(pairs: AllowedPairs, band: Reach, device: torch.device) -> Intervals:
    """Intervals of a band, cached for later calls on the same CUDA stream: on another they may not be computed yet.

    In a CUDA graph tensors exist only once it is replayed, so intervals are computed inside the graph.
    """
    numbers = pairs.rows, pairs.keys, pairs.q_order - pairs.k_order, *band, device
    if needs_operator() or captured(device):
        return _made(*numbers)
    return _kept(*numbers, stream_of(device))


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


def _in_cuts(pairs: AllowedPairs, device: torch.device) -> Intervals:
    prefixes, cuts, band = _split(pairs)
    lo, hi = _of_cuts(pairs, band, device) if cuts else _of_band(pairs, band, device)
    order = torch.arange(pairs.q_order, pairs.q_order + pairs.rows, device=device)
    for prefix in prefixes:
        length = prefix.length.view(-1, 1) if isinstance(prefix.length, Tensor) else prefix.length
        seen = (order + 1).clamp(min=length) - pairs.k_order
        hi = torch.minimum(hi, seen.clamp(0, pairs.keys).to(hi.dtype))
        lo, hi = torch.broadcast_tensors(torch.minimum(lo, hi), hi)
    return Intervals(lo.contiguous(), hi.contiguous())


def _of_cuts(pairs: AllowedPairs, band: Reach, device: torch.device) -> tuple[Tensor, Tensor]:
    """Interval ends lo and hi of a band within documents and between padding; the host reads no values."""
    runs, i = pairs.once(_runs, device), torch.arange(pairs.q_order, pairs.q_order + pairs.rows, device=device)
    lo, hi = (x.to(device) for x in (runs.lo, runs.hi))
    some = lo < hi
    lo, hi = _within(i, lo, hi, *band)
    # Queries whose document has no keys have an empty interval.
    hi = torch.where(some, hi, pairs.k_order).cummax(-1).values
    lo = torch.where(some, lo, hi)
    return (lo - pairs.k_order).to(torch.int32), (hi - pairs.k_order).to(torch.int32)


class Runs(NamedTuple):
    """Keys of each query's document without padding at its ends, lo .. hi-1, by order in the sequence.

    documents: whether the tokens of each document are adjacent. padding: whether there is no padding between visible keys.
    """

    lo: Int[Tensor, "B Lq"]
    hi: Int[Tensor, "B Lq"]
    documents: Tensor
    padding: Tensor


def _runs(pairs: AllowedPairs, device: torch.device) -> Runs:
    """Runs of a request, computed on the device of its masks if all are on one, else on the device of q."""
    _, cuts, _ = _split(pairs)
    columns = [x for part in cuts for x in vars(part).values() if isinstance(x, Tensor)]
    device = columns[0].device if len({x.device for x in columns}) == 1 else device
    documents = any(not isinstance(part, Padding) for part in cuts)  # without them, queries need not be among the keys
    first, stop = pairs.k_order, pairs.k_order + pairs.keys
    if documents:
        first, stop = min(first, pairs.q_order), max(stop, pairs.q_order + pairs.rows)
    token = torch.arange(stop, device=device)
    visible = (token >= pairs.k_order) & (token < pairs.k_order + pairs.keys)
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
    among = (token >= pairs.k_order) & (token < pairs.k_order + pairs.keys)
    runs = begins[..., first + 1 :].sum(-1)
    distinct = label[..., first:].sort(-1).values.diff(dim=-1).ne(0).sum(-1)
    hole = among & ~visible & (token > lo) & (token < hi)
    queries = slice(pairs.q_order, pairs.q_order + pairs.rows) if documents else slice(0, 1)
    lo, hi = (x[..., queries].reshape(-1, x[..., queries].shape[-1]).expand(-1, pairs.rows) for x in (lo, hi))
    return Runs(lo, hi, (runs == distinct).all(), ~hole.any())
