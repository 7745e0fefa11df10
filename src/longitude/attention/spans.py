"""Padding and documents are contiguous spans: fast routes run span by span instead of over a dense mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.pairs import band_of
from longitude.attention.request import Request
from longitude.native.derivatives import readable, with_zero_gradients

Cut = list[tuple[slice | list[int], slice, Request]]
"""Sequences of the batch, rows of their queries, and their request."""


def pieces(r: Request) -> Cut | str:
    """The request split into dense ones with bands only, (sequences, rows, request); or the reason why it cannot be."""
    if len(r.pairs.beyond_band) == 0:
        return [(slice(None), slice(0, r.rows), r)]
    spans = r.pairs.spans
    if isinstance(spans, str):
        return spans
    r = replace(r, mask=band_of(r.mask))
    cut = []
    for batch, row_spans in spans:
        together = batch[-1] - batch[0] == len(batch) - 1  # then a slice, which copies nothing
        which = slice(batch[0], batch[-1] + 1) if together else batch
        for q_from, q_to, k_from, k_to in row_spans:
            rows = slice(q_from - r.q_order, q_to - r.q_order)
            cut.append((which, rows, r.piece(rows, slice(k_from - r.k_order, k_to - r.k_order), which)))
    return cut


def by_spans(r: Request, run: Callable[[Request], Tensor]) -> Tensor:
    """Run a backend of bands only, once per group of sequences and span."""
    return partial_by_spans(r, lambda piece: (run(piece), None))[0]


def partial_by_spans(
    r: Request, run: Callable[[Request], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Run a backend span by span, if it returns the logsumexp of the scores on request."""
    if len(r.pairs.beyond_band) == 0:
        return run(r)
    cut = pieces(r)
    assert not isinstance(cut, str), cut
    return assembled(r, cut, run)


def assembled(
    r: Request, cut: Cut, run: Callable[[Request], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Run pieces of a request, and put the answers in their places: the last of a query's pieces counts; none means no keys."""
    out = r.q.new_zeros(*r.q.shape[:3], r.v.shape[3])
    if len(cut) == 0:
        columns = [x for term in r.terms for x in vars(term).values() if isinstance(x, Tensor)]
        out = with_zero_gradients(out, (r.q, r.k, r.v, *r.learned, *columns))  # gradients, as of any other answer
    lse = out.new_full(out.shape[:3], -math.inf, dtype=torch.promote_types(out.dtype, torch.float32)) if r.lse else None
    for which, rows, piece in cut:
        out[which, :, rows], piece_lse = run(piece)
        if lse is not None and piece_lse is not None:
            lse[which, :, rows] = piece_lse
    return out, lse


def with_wide_values(r: Request) -> Request:
    """Pad values with zeros to the width of keys, which fused kernels require; the result is unchanged."""
    return replace(r, v=F.pad(r.v, (0, r.k.shape[3] - r.v.shape[3])))


def steady(r: Request) -> Request | None:
    """The request with ints for positions, if they count up by one in every sequence, at one offset; None otherwise.

    For terms that read the offset alone.
    """
    if r.contiguous:
        return r
    if not readable(*(p for p in (r.q_positions, r.k_positions) if isinstance(p, Tensor))):
        return None
    q, k = (p if p.dim() == 2 else p[None] for p in r.places())
    counting = all(bool((p - p[:, :1] == torch.arange(p.shape[1], device=p.device)).all()) for p in (q, k))
    gaps = q[:, 0] - k[:, 0]
    if not counting or not bool((gaps == gaps[0]).all()):
        return None
    return replace(r, q_positions=int(q[0, 0]), k_positions=int(k[0, 0]))
