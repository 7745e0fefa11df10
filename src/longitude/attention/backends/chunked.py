"""`reference`, the specification, and `chunked`, the same over blocks of queries: everything, in bounded memory."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longitude.attention.backends.base import ALL_TERMS, FLOATS, Backend, wide_item
from longitude.attention.backends.transport_product import transport_window, transported_scores
from longitude.attention.reference import reference
from longitude.attention.request import Request
from longitude.positions.base import OffsetVectors, PairBias, RowBias, Transport

PAIR_NUMBERS = 64  # what a learned function of two positions holds per pair: a layer of 32, before and after its ReLU


def dense_bytes(r: Request) -> int:
    """Scores, bias, weights, mask: four [B, H, Lq, Lk] at once; and what the terms hold on the way to their bias."""
    return 4 * r.q.shape[0] * r.heads * r.rows * r.length * wide_item(r) + terms_bytes(r)


def terms_bytes(r: Request) -> int:
    """What the hungriest term holds while it makes its bias, beyond some [B, H, Lq, Lk]."""
    pairs = r.rows * r.length * (1 if r.contiguous else r.q.shape[0])
    numbers = 0
    for term in r.terms:
        match term:
            case PairBias():
                numbers = max(numbers, PAIR_NUMBERS * pairs)
            case OffsetVectors():  # a column per offset, before it moves to its key; or a vector per pair and head
                columns = 2 * r.q.shape[0] * r.heads * r.rows * (r.rows + r.length)
                numbers = max(numbers, columns if r.contiguous else r.heads * r.q.shape[3] * pairs)
            case RowBias():  # gates, their sum, two neighbours of a table, as numbers and as indices
                numbers = max(numbers, 5 * r.q.shape[0] * r.heads * r.rows * r.length)
    return numbers * wide_item(r)


REFERENCE = Backend(
    "reference",
    run=lambda r: reference(r)[0],
    partial=reference,
    terms=ALL_TERMS,
    any_mask=True,
    dtypes=FLOATS,
    devices=None,
    table_gradients=True,
    dropout=True,
    weights=True,
    limits=lambda r: None,
    memory=dense_bytes,
    price=lambda r: 6.0 if dense_bytes(r) <= 2**28 else math.inf,
)


# ---- chunked: blocks are forgotten after each and made again in backward - - - - - - - - - - - - - - - - - - - -
BLOCK_BYTES = 2**25


def block_rows(r: Request) -> int:
    return max(1, min(r.rows, BLOCK_BYTES // max(1, dense_bytes(r) // r.rows)))


def chunked(r: Request) -> tuple[Tensor, Tensor]:
    """Query blocks against the keys in their reach. Memory stays at a few blocks of [rows, Lk], in backward too.

    -> output, and what `reference` gives beside it, where the request asks for the logsumexp.
    """
    rows = block_rows(r)
    outs = []
    for start in range(0, r.rows, rows):
        stop = min(start + rows, r.rows)
        block = r.piece(slice(start, stop), r.reachable(start, stop))
        if torch.is_grad_enabled():
            outs.append(checkpoint(lambda b=block: answer(b), use_reentrant=False))
        else:
            outs.append(answer(block))
    out, lse = zip(*outs, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def answer(block: Request) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp, an empty one where nobody asks."""
    out, second = reference(block, by_chunks)
    return out, second if block.lse else out.new_empty(0, 0, 0)


def by_chunks(terms: list[Transport], q: Tensor, k: Tensor, r: Request) -> Tensor:
    """The scores of a transport, its tokens a chunk at a time; zero for keys after the query."""
    scores = transported_scores(q, *transport_window(terms[0], k, r), terms[0].chunk)
    return F.pad(scores, (0, r.length - scores.shape[3]))  # crops, too, where queries outlast the keys


CHUNKED = Backend(
    "chunked",
    run=lambda r: chunked(r)[0],
    partial=chunked,
    terms=ALL_TERMS,
    any_mask=True,
    dtypes=FLOATS,
    devices=None,
    table_gradients=True,
    dropout=True,
    weights=False,
    limits=lambda r: None,
    memory=lambda r: dense_bytes(r) * block_rows(r) // r.rows,
    price=lambda r: 8.0,
)
