"""Products of reflections between queries and keys, in memory linear in the length."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import FLOATS, Backend, wide_item
from longitude.attention.backends.transport_product import transport_attention, transport_window
from longitude.attention.reference import per_query_head
from longitude.attention.request import Request
from longitude.attention.spans import by_spans
from longitude.positions.base import Drift, Transport


def transport(r: Request) -> Tensor:
    def run(r: Request) -> Tensor:
        (term,) = (term for term in r.terms if isinstance(term, Transport))
        k, v = (per_query_head(x, r.heads) for x in (r.k, r.v))
        hidden = max(0, r.order_gap + r.rows - r.length)
        k, w, b = transport_window(term, k, r)
        v = F.pad(v[:, :, : k.shape[2]], (0, 0, 0, hidden))
        level = None
        for drift in r.terms:
            if isinstance(drift, Drift):
                own = per_query_head(drift.level[:, :, r.k_order : r.k_order + k.shape[2]], r.heads)
                own = r.scale * own if drift.scaled else own
                level = own if level is None else level + own
        return transport_attention(r.q, k, v, w, b, r.scale, level, r.band[1], term.chunk, hidden)

    return by_spans(r, run)


def transport_limits(r: Request) -> str | None:
    if not any(isinstance(term, Transport) for term in r.terms):
        return "there is no transport to follow"
    if r.band[0] != 0:
        return "it follows plain order: it needs Causal() or Window(size)"
    return None


def transport_memory(r: Request) -> int:
    """Keys, w, b, their products and queries in wide copies; the scores of one chunk of queries, and their weights."""
    chunk = max((term.chunk for term in r.terms if isinstance(term, Transport)), default=1)
    per_token = 6 * r.q.shape[3] + 2 * chunk
    return r.q.shape[0] * r.heads * (r.length * per_token + 4 * min(chunk, r.rows) * r.length) * wide_item(r)


TRANSPORT = Backend(
    "transport",
    run=transport,
    terms=(Transport, Drift),
    any_mask=False,
    dtypes=FLOATS,
    devices=None,
    table_gradients=True,
    dropout=False,
    weights=False,
    limits=transport_limits,
    memory=transport_memory,
    price=lambda r: 4.0,
)
