"""Padding and documents are contiguous spans: fast routes run span by span instead of over a dense mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.attention.masks import AllOf, Documents, Padding
from longitude.attention.request import Request, is_band
from longitude.attention.zero_gradients import with_zero_gradients


class Span(NamedTuple):
    """Queries q_from .. q_to-1 see only keys k_from .. k_to-1; in order of the stream."""

    q_from: int
    q_to: int
    k_from: int
    k_to: int


def spans(r: Request) -> list[tuple[list[int], list[Span]]] | str:
    """Sequences of the batch that share their spans, with these spans; or why there are none. Found once per request."""
    if torch.compiler.is_compiling():
        return "where padding and documents begin is not known while compiling"
    if "spans" not in r.__dict__:
        r.__dict__["spans"] = _spans(r)
    return r.__dict__["spans"]


def _spans(r: Request) -> list[tuple[list[int], list[Span]]] | str:
    documents = [m.ids for m in r.beyond_band if isinstance(m, Documents)]
    valid = [m.valid for m in r.beyond_band if isinstance(m, Padding)]
    if len(documents) + len(valid) < len(r.beyond_band):
        return "the mask is more than causality, windows, padding and documents joined by &"
    alike = all(x.dim() == 1 or len(x) == 1 for x in (*documents, *valid))
    groups: dict[tuple[Span, ...], list[int]] = {}
    for b in range(1 if alike else r.q.shape[0]):
        own = _of_sequence(
            r, *([x if x.dim() == 1 else x[b if len(x) > 1 else 0] for x in xs] for xs in (documents, valid))
        )
        if isinstance(own, str):
            return own
        groups.setdefault(own, []).extend(range(r.q.shape[0]) if alike else [b])
    return [(batch, list(own)) for own, batch in groups.items()]


def _of_sequence(r: Request, documents: list[Tensor], valid: list[Tensor]) -> tuple[Span, ...] | str:
    """The spans of one sequence, ids and validity [stream]; or why there are none."""
    first, stop = r.k_order, r.k_order + r.length
    cuts = sorted({first, stop, *(cut for ids in documents for cut in _changes(ids) if first < cut < stop)})
    labels = list(zip(*(ids[cuts[:-1]].tolist() for ids in documents))) if documents else [()]
    if len(set(labels)) < len(labels):
        return "a document's tokens do not stand together"
    visible = torch.ones(stop, dtype=torch.bool, device=r.q.device)
    for x in valid:
        visible = visible & x[:stop].bool()
    edges = sorted({*cuts, *(cut for cut in _changes(visible) if first < cut < stop)}) if valid else cuts
    seen = [run for run, sees in zip(pairwise(edges), visible[edges[:-1]].tolist()) if sees]
    own, at = [], 0
    for start, end in pairwise(cuts):
        runs = 0
        while at < len(seen) and seen[at][0] < end:
            # Without documents every query of the stream looks at the one run of valid keys.
            q_range = (start, end) if documents else (r.q_order, r.q_order + r.rows)
            own.append(_trimmed(r, *q_range, *seen[at]))
            runs, at = runs + 1, at + 1
        if runs > 1:
            return "padding stands in the middle of a sequence"
    return tuple(s for s in own if s.q_from < s.q_to and s.k_from < s.k_to)


Cut = list[tuple[slice | list[int], slice, Request]]
"""Sequences of the batch, rows of their queries, and what is asked for these."""


def pieces(r: Request) -> Cut | str:
    """The request cut into dense ones that know bands only: (sequences, rows, piece); or why it cannot be."""
    if len(r.beyond_band) == 0:
        return [(slice(None), slice(0, r.rows), r)]
    found = spans(r)
    if isinstance(found, str):
        return found
    r = replace(r, mask=AllOf(tuple(m for m in r.mask.parts() if is_band(m))))
    cut = []
    for batch, own in found:
        together = batch[-1] - batch[0] == len(batch) - 1  # then a slice, which copies nothing
        which = slice(batch[0], batch[-1] + 1) if together else batch
        for q_from, q_to, k_from, k_to in own:
            rows = slice(q_from - r.q_order, q_to - r.q_order)
            cut.append((which, rows, r.piece(rows, slice(k_from - r.k_order, k_to - r.k_order), which)))
    return cut


def by_spans(r: Request, run: Callable[[Request], Tensor]) -> Tensor:
    """Run a backend that knows bands only, once per group of sequences and span."""
    return partial_by_spans(r, lambda piece: (run(piece), None))[0]


def partial_by_spans(
    r: Request, run: Callable[[Request], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """The same for a backend that tells the logsumexp of the scores, if the request asks for it."""
    if len(r.beyond_band) == 0:
        return run(r)
    cut = pieces(r)
    assert not isinstance(cut, str), cut
    return assembled(r, cut, run)


def assembled(
    r: Request, cut: Cut, run: Callable[[Request], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """The answers to pieces of a request in their places; a query in none of them sees nothing, of several the last counts."""
    out = r.q.new_zeros(*r.q.shape[:3], r.v.shape[3])
    if not cut:
        columns = [x for term in r.terms for x in vars(term).values() if isinstance(x, Tensor)]
        out = with_zero_gradients(out, (r.q, r.k, r.v, *r.learned, *columns))  # an answer like any other
    lse = out.new_full(out.shape[:3], -math.inf, dtype=torch.promote_types(out.dtype, torch.float32)) if r.lse else None
    for which, rows, piece in cut:
        out[which, :, rows], own = run(piece)
        if lse is not None and own is not None:
            lse[which, :, rows] = own
    return out, lse


def steady(r: Request) -> Request | None:
    """The request with ints for positions, if they count up by one in every sequence, at one offset; None otherwise.

    For terms that read the offset alone.
    """
    if r.contiguous:
        return r
    if torch.compiler.is_compiling():
        return None
    q, k = (p if p.dim() == 2 else p[None] for p in r.places())
    counting = all(bool((p - p[:, :1] == torch.arange(p.shape[1], device=p.device)).all()) for p in (q, k))
    gaps = q[:, 0] - k[:, 0]
    if not counting or not bool((gaps == gaps[0]).all()):
        return None
    return replace(r, q_positions=int(q[0, 0]), k_positions=int(k[0, 0]))


def _changes(x: Tensor) -> list[int]:
    return (torch.nonzero(x[1:] != x[:-1]).flatten() + 1).tolist()


def _trimmed(r: Request, q_from: int, q_to: int, k_from: int, k_to: int) -> Span:
    """Without the queries outside this call, and those whose band leaves them none of these keys."""
    low, high = r.band
    q_from, q_to = max(q_from, r.q_order), min(q_to, r.q_order + r.rows)
    if low is not None:
        q_from = max(q_from, k_from + low)
    if high is not None:
        q_to = min(q_to, k_to + high)
    return Span(q_from, q_to, k_from, k_to)
