"""`reference`, the specification, and `chunked`, the same over blocks of queries: everything, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import Backend, dense_bytes
from longitude.attention.backends.transport.backend import transport_window, transported_scores
from longitude.attention.reference import reference
from longitude.attention.request import Request
from longitude.native.derivatives import exporting, recomputed
from longitude.positions.terms import Term, Transport

BLOCK_BYTES = 2**26


def block_rows(r: Request) -> int:
    """Queries of a block; 32 or more are rounded down to a multiple of 32, so that products have whole vectors."""
    rows = max(1, min(r.rows, BLOCK_BYTES // max(1, dense_bytes(r) // r.rows)))
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
    out, second = reference(block, by_chunks)
    return out, second if block.lse else out.new_empty(0, 0, 0)


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
    memory=lambda r: dense_bytes(r.piece(slice(0, block_rows(r)), slice(0, r.length))),
    price=lambda r: 8.0,
)
