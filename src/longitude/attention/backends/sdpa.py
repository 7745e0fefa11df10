"""torch's fused attention where it applies as it is, or with a short dense bias."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import FLOATS, Backend
from longitude.attention.backends.dense import terms_bytes
from longitude.attention.reference import added
from longitude.attention.request import Request
from longitude.attention.spans import by_spans, pieces, spans
from longitude.positions.base import Drift, OffsetBias, PairBias

SHORT_BYTES = 2**26


def sdpa_is_plain(r: Request) -> bool:
    """Nothing but causality that torch's own flag states (a query sees keys up to its own index), or no mask."""
    low, high = r.band
    all_seen = (low is None or r.order_gap - low >= r.length - 1) and high is None
    return len(r.terms) == len(r.beyond_band) == 0 and (all_seen or ((low, high) == (0, None) and r.order_gap == 0))


def sdpa(r: Request) -> Tensor:
    def run(r: Request) -> Tensor:
        grouped = r.k.shape[1] != r.heads
        if sdpa_is_plain(r):
            causal = r.band == (0, None) and r.order_gap == 0
            return F.scaled_dot_product_attention(
                r.q,
                r.k,
                r.v,
                dropout_p=r.dropout,
                is_causal=True if causal else False,  # noqa: SIM210 (a compiler's symbolic bool is no bool)
                scale=r.scale,
                enable_gqa=grouped,
            )
        allowed = r.allowed()
        some = allowed.any(-1, keepdim=True)  # a query with nothing to look at looks at all, and is then set to zero
        bias = torch.zeros_like(allowed, dtype=r.q.dtype).masked_fill(~(allowed | ~some), -math.inf)
        for term in r.terms:
            bias = bias + added(term, r.q, r.q, allowed, r).to(r.q.dtype)
        out = F.scaled_dot_product_attention(
            r.q, r.k, r.v, attn_mask=bias, dropout_p=r.dropout, scale=r.scale, enable_gqa=grouped
        )
        return out.masked_fill(~some, 0.0)

    with torch.autocast(r.q.device.type, enabled=False):  # the dtype of q is the dtype of the answer, as everywhere
        return by_spans(r, run) if sdpa_by_spans(r) else run(r)


def sdpa_by_spans(r: Request) -> bool:
    """Whether padding and documents are cut away first. A dense row is no larger than the keys: decoding needs no spans."""
    return r.rows > 1 and len(r.beyond_band) > 0 and not isinstance(spans(r), str)


def sdpa_dense(r: Request) -> list[Request]:
    """The parts of it that need a dense bias."""
    cut = pieces(r) if sdpa_by_spans(r) else [(slice(None), slice(0, r.rows), r)]
    assert not isinstance(cut, str), cut
    return [piece for _, _, piece in cut if not sdpa_is_plain(piece)]


def sdpa_bias_bytes(r: Request) -> int:
    heads = r.heads if r.terms else 1
    per_row = r.beyond_band or not r.contiguous
    return (r.q.shape[0] if per_row else 1) * heads * r.rows * r.length * r.q.element_size()


def sdpa_memory(r: Request) -> int:
    """A term's bias is made in float64, offsets and product, before it is added up in the dtype of q."""
    times = 2 + 2 * 8 // r.q.element_size() if r.terms else 1
    return max([0, *(sdpa_bias_bytes(part) * times + terms_bytes(part) for part in sdpa_dense(r))])


def sdpa_limits(r: Request) -> str | None:
    for part in sdpa_dense(r):
        if r.terms and r.q.dtype in (torch.bfloat16, torch.float16):
            return f"its dense bias would be rounded to {r.q.dtype}"
        if (size := sdpa_bias_bytes(part)) > SHORT_BYTES:
            return f"its dense bias would take {size / 2**20:.0f} MiB, above {SHORT_BYTES // 2**20}"
    return None


SDPA = Backend(
    "sdpa",
    run=sdpa,
    terms=(OffsetBias, PairBias, Drift),
    any_mask=True,
    dtypes=FLOATS,
    devices=None,
    table_gradients=False,
    dropout=True,
    weights=False,
    limits=sdpa_limits,
    memory=sdpa_memory,
    price=lambda r: 1.0 if sdpa_is_plain(r) else 4.0,
)
