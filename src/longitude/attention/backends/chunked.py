"""`reference`, the specification, and `chunked`, the same over blocks of queries: everything, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import Backend, dense_bytes
from longitude.attention.backends.transport.backend import transport_window, transported_scores
from longitude.attention.reference import added, reference
from longitude.attention.request import Request
from longitude.native.derivatives import exporting, in_forward_mode, recomputed
from longitude.native.tensors import in_memory
from longitude.positions.base import Drift, OffsetBias, PairBias, Transport
from longitude.positions.terms import Softcap, Term

BLOCK_BYTES = 2**26
CACHED_ROWS = 64
"""Queries of a block under a softcap, or without a softmax. Scores stay in a processor's cache between the passes over them."""


def block_rows(r: Request) -> int:
    """Queries of a block; 32 or more are rounded down to a multiple of 32, so that products have whole vectors."""
    rows = max(1, min(r.rows, BLOCK_BYTES // max(1, dense_bytes(r) // r.rows)))
    if caps(r):
        return min(rows, CACHED_ROWS)
    return rows if rows < 32 else rows // 32 * 32


def chunked(
    r: Request, of_block: Callable[[Request], tuple[Tensor, Tensor]] | None = None, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Query blocks against the keys in their reach, recomputed in backward: memory stays at a few blocks of [rows, Lk].

    The second result is the logsumexp of the scores where it is requested, and empty otherwise. of_block: another function of
    a block's queries, with two results. rows: the most queries of a block.
    """
    rows = min(block_rows(r), rows or r.rows)
    outs = []
    for start in range(0, r.rows, rows):
        stop = min(start + rows, r.rows)
        outs.append(recomputed(of_block or one_block, r.piece(slice(start, stop), r.reachable(start, stop))))
    out, lse = zip(*outs, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def one_block(block: Request) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of a block of queries; the logsumexp is empty unless requested."""
    if caps(block) and (done := capped(block)) is not None:
        return done
    out, second = reference(block, by_chunks)
    return out, second if block.lse else out.new_empty(0, 0, 0)


def caps(r: Request) -> bool:
    """Whether `capped` supports a request: a softcap, alone or with biases and drifts; on the CPU, outside of tracers."""
    kinds = {type(term) for term in r.terms}
    if Softcap not in kinds or not kinds <= {Softcap, OffsetBias, PairBias, Drift}:
        return False
    return not r.dropout and not r.weights and not in_forward_mode() and in_memory(r.q, r.k, r.v)


def capped(r: Request) -> tuple[Tensor, Tensor] | None:
    """`reference` of a block under a softcap: in place if no derivative needs the scores, and without repeated keys.

    None if a query has no key.
    """
    allowed = None if r.sees_all else r.allowed()
    if allowed is not None and not allowed.any(-1).all():
        return None
    dtype = torch.promote_types(r.q.dtype, torch.float32)
    with torch.autocast(r.q.device.type, enabled=False):
        q, k, v = (x.to(dtype) for x in (r.q, r.k, r.v))
        shared = q.shape[0], k.shape[1], -1  # rows of all queries that read a head of keys
        scores = (r.scale * q).reshape(*shared, q.shape[3]) @ k.mT
        kept = scores.requires_grad
        for term in r.terms:
            if isinstance(term, Softcap):
                scores = term.cap * (scores / term.cap).tanh() if kept else scores.div_(term.cap).tanh_().mul_(term.cap)
        scores = scores.view(*q.shape[:3], r.length)
        for term in r.terms:
            if not isinstance(term, Softcap):
                every = r.allowed() if allowed is None else allowed
                scores = scores + added(term, q, scores, every, r).to(dtype)
        if allowed is not None:
            fill = Tensor.masked_fill if scores.requires_grad else Tensor.masked_fill_
            scores = fill(scores, ~allowed, -math.inf)
        weights = scores.softmax(-1)
        out = (weights.view(*shared, r.length) @ v).view(*q.shape[:3], -1).to(r.q.dtype)
        if not r.lse:
            return out, out.new_empty(0, 0, 0)
        return out, scores.logsumexp(-1) + 0 * weights.sum(-1)  # NaN where the output is NaN


def by_chunks(terms: list[Transport], q: Tensor, k: Tensor, r: Request) -> Tensor:
    """The scores of a transport, its tokens a chunk at a time; zero for keys after the query."""
    scores = transported_scores(q, *transport_window(terms[0], k, r), terms[0].chunk)
    return F.pad(scores, (0, r.length - scores.shape[3]))  # crops, too, where there are more queries than keys


def reference_price(r: Request) -> float:
    """Relative time of `reference`: all scores at once take a CPU longer than blocks; two blocks take a third of its time.

    Exported graphs use it for everything, because the number of blocks depends on the length.
    """
    most = BLOCK_BYTES if r.q.device.type == "cpu" else 2**28
    return 6.0 if exporting() or dense_bytes(r) <= most else math.inf


# ---- the backends ---------------------------------------------------------------------------------------------------------
REFERENCE = Backend(
    "reference",
    run=lambda r: reference(r)[0],
    partial=reference,
    terms=(Term,),
    any_mask=True,
    dropout=True,
    weights=True,
    sinks=True,
    memory=dense_bytes,
    price=reference_price,
)
CHUNKED = Backend(
    "chunked",
    run=lambda r: chunked(r)[0],
    partial=chunked,
    terms=(Term,),
    any_mask=True,
    dropout=True,
    memory=lambda r: dense_bytes(r) * block_rows(r) // r.rows,
    price=lambda r: 2.5 if caps(r) else 8.0,
)
