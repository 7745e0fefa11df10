"""Every bias of the offset is one table of Lq + Lk - 1 numbers per head."""

from __future__ import annotations

import torch
from torch import Tensor

from longitude.attention import toeplitz
from longitude.attention.backends.base import Backend
from longitude.attention.request import Request
from longitude.attention.spans import by_spans, pieces, steady
from longitude.positions.base import OffsetBias

TABLE_KERNEL = toeplitz.available()  # probed here, about a millisecond, because a compiler may not look later


def table(r: Request) -> Tensor:
    def run(r: Request) -> Tensor:
        r = steady(r) or r
        assert isinstance(r.q_positions, int) and isinstance(r.k_positions, int)
        diagonal = torch.arange(r.rows + r.length - 1, device=r.q.device)
        offset = r.q_positions - r.k_positions + r.rows - 1 - diagonal
        bias = torch.zeros(r.heads, offset.shape[0], dtype=r.q.dtype, device=r.q.device)
        for term in r.terms:
            assert isinstance(term, OffsetBias)
            bias = bias + term.at(offset).to(r.q.dtype)
        # The kernel counts orders so that the last query meets the last key.
        late = r.order_gap + r.rows - r.length
        low, high = (None if bound is None else bound - late for bound in r.band)
        return toeplitz.toeplitz_attention(r.q, r.k, r.v, bias, low=low, high=high, scale=r.scale)

    return by_spans(r, run)


def table_limits(r: Request) -> str | None:
    if not TABLE_KERNEL:
        return "this build of torch lacks the fused CPU kernel it reads its table through"
    cut = pieces(r)
    assert not isinstance(cut, str), cut
    if any(steady(piece) is None for _, _, piece in cut):
        return "positions do not count up by one, as far as it may look; say one int p for p, p+1, p+2, ..."
    if r.v.shape[3] != r.k.shape[3]:
        return f"it needs values as wide as keys, not {r.v.shape[3]} and {r.k.shape[3]}"
    return None


TABLE = Backend(
    "table",
    run=table,
    terms=(OffsetBias,),
    any_mask=False,
    dtypes=(torch.float64, torch.float32),
    devices=("cpu",),
    table_gradients=True,
    dropout=False,
    weights=False,
    limits=table_limits,
    # the queries in reverse, and the table: its offsets, its bias, its band
    memory=lambda r: (r.q.numel() + 6 * r.heads * (r.rows + r.length)) * r.q.element_size(),
    price=lambda r: 2.0 if r.learned else 1.2,
)
