"""Number of visible keys of each query under a mask."""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.masks import Documents, Padding
from longitude.attention.patterns import Chunks
from longitude.attention.request import AllowedPairs
from longitude.native.derivatives import exporting

FEW = 16
"""Number of queries up to which a dense mask costs no more than sorting the documents of the keys."""
BLOCK = 2**24
"""Pairs of a dense mask that are counted at once."""


def visible_keys(pairs: AllowedPairs, device: torch.device) -> Tensor:
    """Number of visible keys of each query, int64 [1 or B, Lq]; pairs: those of a whole call, with key orders from 0 on.

    O(L) for causality, windows and padding, O(L log L) with documents. Any other mask is summed in blocks of queries. Layers of
    a forward share the result.
    """
    if pairs.visible is not None:
        return pairs.visible.to(device)
    stream = torch.arange(pairs.keys, device=device)
    ids = [
        m.ids if isinstance(m, Documents) else m.ids(stream)
        for m in pairs.beyond_band
        if isinstance(m, Documents | Chunks)
    ]
    valid = [m.valid for m in pairs.beyond_band if isinstance(m, Padding)]
    ranges = len(ids) + len(valid) == len(pairs.beyond_band) and len(ids) < 2
    few = len(pairs.beyond_band) > 0 and not torch.compiler.is_compiling() and pairs.rows <= FEW
    queries = torch.arange(pairs.q_order, pairs.q_order + pairs.rows, device=device)
    counts = _in_ranges(pairs, queries, ids, valid) if ranges and not few else _summed(pairs, queries)
    if not torch.compiler.is_compiling():
        pairs.visible = counts
    return counts


def _summed(pairs: AllowedPairs, queries: Tensor) -> Tensor:
    keys = torch.arange(pairs.keys, device=queries.device)
    blocks = [queries] if exporting() else queries.split(max(1, BLOCK // (pairs.batch * pairs.keys)))
    counts = torch.cat([pairs.mask.allowed(block, keys).sum(-1) for block in blocks], -1)  # [Lq] or [B, 1, Lq]
    return counts.view(-1, pairs.rows)


def _in_ranges(pairs: AllowedPairs, queries: Tensor, ids: list[Tensor], valid: list[Tensor]) -> Tensor:
    """Sort keys by document: those in the band of a query are then adjacent, and a running sum counts the valid ones."""
    (low, high), keys, device = pairs.band, pairs.keys, queries.device
    begin = torch.zeros_like(queries) if high is None else (queries - high).clamp(0, keys)
    end = torch.full_like(queries, keys) if low is None else (queries - low + 1).clamp(0, keys)
    begin, end = begin[None], end[None]
    order = torch.arange(keys, device=device)[None]
    if ids:
        sorted_ids, order = ids[0].to(device).reshape(-1, keys).sort(stable=True)
        rank = F.pad((sorted_ids[:, 1:] != sorted_ids[:, :-1]).cumsum(1), (1, 0)) * keys
        query_rank = torch.empty_like(rank).scatter(1, order, rank)[:, queries]
        begin, end = (torch.searchsorted(rank + order, query_rank + place) for place in (begin, end))
    if valid:
        real = reduce(torch.logical_and, (x.to(device).reshape(-1, keys).bool() for x in valid))
        rows = max(len(real), len(order))
        real = real.expand(rows, -1).gather(1, order.expand(rows, -1))
        total = F.pad(real.cumsum(1), (1, 0))
        begin, end = (total.gather(1, place.expand(rows, -1)) for place in (begin, end))
    return (end - begin).clamp(min=0)
