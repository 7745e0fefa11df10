"""A mask as the interval of keys that each query attends to, where it is one and its ends never fall."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from longitude.attention.find_spans import Span
from longitude.attention.masks import AllOf, Documents, Padding
from longitude.attention.patterns import Chunks, Prefix
from longitude.attention.request import AllowedPairs, Request, is_band


class Intervals(NamedTuple):
    """Query i attends to the keys lo[i] .. hi[i]-1; both never fall. One row where all sequences are alike."""

    lo: Int[Tensor, "B Lq"]
    hi: Int[Tensor, "B Lq"]

    def first_queries(self, keys: int, block: int) -> Int[Tensor, "B 4 blocks"]:
        """Queries by block of keys: the first of some, the first of all, the first after these, the first after all of them.

        "Some" attend to one of its keys or more; "all" to every one.
        """
        start = torch.arange(0, keys, block, device=self.lo.device, dtype=self.lo.dtype).expand(len(self.lo), -1)
        start, stop = start.contiguous(), (start + block).clamp(max=keys)
        edges = (self.hi, start, True), (self.hi, stop, False), (self.lo, start, True), (self.lo, stop, False)
        return torch.stack([torch.searchsorted(*edge[:2], right=edge[2], out_int32=True) for edge in edges], 1)


_KNOWN: WeakKeyDictionary[AllowedPairs, Intervals] = WeakKeyDictionary()
"""Layers of one forward share their pairs."""


def intervals_of(r: Request) -> Intervals:
    """Of a request that `refusal` takes."""
    if not r.beyond_band:
        of_band = _of_band.__wrapped__ if torch.compiler.is_compiling() else _of_band  # compilers look into no cache
        return of_band(r.rows, r.length, r.order_gap, *r.band, r.q.device)
    if (known := _KNOWN.get(r.pairs)) is None:
        known = _KNOWN[r.pairs] = _found(r)
    return known


def refusal(r: Request) -> str | None:
    """Why its mask is no interval of keys for each query."""
    if not all(is_band(part) or isinstance(part, Prefix | Chunks | Documents | Padding) for part in r.mask.parts()):
        return "the mask is more than causality and windows in plain order, prefixes, chunks, padding and documents joined by &"
    spans = _without_prefixes(r).spans if r.beyond_band else []
    return f"it reads one interval of keys for each query, and {spans}" if isinstance(spans, str) else None


def _without_prefixes(r: Request) -> AllowedPairs:
    prefixes, others = _split(r)
    if not prefixes:
        return r.pairs
    return AllowedPairs(AllOf(others), r.q.shape[0], r.rows, r.length, r.q_order, r.k_order)


def _split(r: Request) -> tuple[list[Prefix], tuple]:
    parts = r.mask.parts()
    return [part for part in parts if isinstance(part, Prefix)], tuple(p for p in parts if not isinstance(p, Prefix))


@lru_cache(maxsize=64)
def _of_band(rows: int, keys: int, gap: int, low: int | None, high: int | None, device: torch.device) -> Intervals:
    return Intervals(*(x[None] for x in _within(Span(0, rows, 0, keys), gap, low, high, device)))


def _within(span: Span, gap: int, low: int | None, high: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ends of the intervals of the queries of a span, in rows of the request."""
    i = torch.arange(span.q_from, span.q_to, device=device, dtype=torch.int32) + gap
    lo = torch.full_like(i, span.k_from) if high is None else (i - high).clamp(span.k_from, span.k_to)
    hi = torch.full_like(i, span.k_to) if low is None else (i - low + 1).clamp(span.k_from, span.k_to)
    return lo, torch.maximum(lo, hi)


def _found(r: Request) -> Intervals:
    prefixes, _ = _split(r)
    pairs = _without_prefixes(r)
    if len(pairs.beyond_band) == 0:
        lo, hi = _of_band(r.rows, r.length, r.order_gap, *pairs.band, r.q.device)
    else:
        lo, hi = (x.to(r.q.device) for x in _of_spans(r, pairs))
    for prefix in prefixes:
        length = prefix.length.view(-1, 1) if isinstance(prefix.length, Tensor) else prefix.length
        seen = (r.q_tokens() + 1).clamp(min=length) - r.k_order
        hi = torch.minimum(hi, seen.clamp(0, r.length).to(hi.dtype))
        lo, hi = torch.broadcast_tensors(torch.minimum(lo, hi), hi)
    return Intervals(lo.contiguous(), hi.contiguous())


def _of_spans(r: Request, pairs: AllowedPairs) -> tuple[Tensor, Tensor]:
    """On the host, where spans are found; queries in none of them have an empty interval."""
    found = pairs.spans
    assert not isinstance(found, str), found
    lo, hi = (torch.zeros(sum(len(batch) for batch, _ in found), r.rows, dtype=torch.int32) for _ in range(2))
    for batch, own in found:
        for span in own:
            span = Span(*(at - r.q_order for at in span[:2]), *(at - r.k_order for at in span[2:]))
            row = _within(span, r.order_gap, *pairs.band, lo.device)
            for b in batch:
                lo[b, span.q_from : span.q_to], hi[b, span.q_from : span.q_to] = row
                lo[b, span.q_to :] = hi[b, span.q_to :] = span.k_to
    if len(found) == 1:
        return lo[:1], hi[:1]
    return lo, hi
