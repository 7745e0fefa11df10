"""`reference`, the specification, and `chunked`, the same over blocks of queries: everything, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import Backend, dense_bytes, terms_bytes
from longitude.attention.backends.transport.backend import transport_window, transported_scores
from longitude.attention.reference import added, reference
from longitude.attention.request import Request
from longitude.attention.scores import per_query_head
from longitude.native.derivatives import exporting, in_forward_mode, recomputed
from longitude.native.tensors import in_memory
from longitude.positions.base import Drift, OffsetBias, PairBias, RowBias, Transport
from longitude.positions.terms import Softcap, Term

BLOCK_BYTES = 2**26
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CACHED_ROWS = 64
"""Queries of a block under a softcap, or without a softmax. Scores stay in a processor's cache between the passes over them."""


def block_rows(r: Request) -> int:
    """Queries of a block; 32 or more are rounded down to a multiple of 32, which torch's function processes at once."""
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
    if takes(block) and (done := biased(block)) is not None:
        out, lse = done
        return out, lse if block.lse else out.new_empty(0, 0, 0)
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


# ---- a block with a dense bias: torch's fused function forward, five products backward -------------------------------------
def takes(r: Request) -> bool:
    """Whether `biased` supports a request: it has a PairBias or RowBias, and its tensors are in the CPU's memory."""
    if r.q.dtype not in (torch.float32, torch.float64) or r.v.shape[3] != r.q.shape[3]:
        return False
    if r.dropout or r.weights or in_forward_mode() or not in_memory(r.q, r.k, r.v):
        return False
    kinds = {type(term) for term in r.terms}
    return bool(kinds & {PairBias, RowBias}) and kinds <= {OffsetBias, PairBias, RowBias}


def biased_bytes(r: Request) -> int:
    """Bytes of the bias: as its terms return it, summed, and masked with -inf."""
    reads_scores = any(isinstance(term, RowBias) for term in r.terms)  # `terms_bytes` counts their bias
    batch = 1 if r.contiguous and not r.beyond_band and not reads_scores else r.q.shape[0]
    return (2 if reads_scores else 3) * batch * r.heads * r.rows * r.length * r.q.element_size() + terms_bytes(r)


def biased(r: Request) -> tuple[Tensor, Tensor] | None:
    """Output and logsumexp of the scores of a block. None if a query has no key, or may have no finite score.

    torch's function returns zeros for scores that are all -inf, or all NaN.
    """
    allowed = r.allowed()
    if not allowed.any(-1).all():
        return None
    k, v = (per_query_head(x, r.heads) for x in (r.k, r.v))
    raw = (r.scale * r.q) @ k.mT if any(isinstance(term, RowBias) for term in r.terms) else None
    terms = [term.dense(r, r.q, raw, allowed).to(r.q.dtype) for term in r.terms]  # type: ignore[arg-type]  (raw)
    terms = [bias if bias.dim() == 4 else bias[None] for bias in terms]
    bias = torch.where(allowed, sum(terms[1:], terms[0]), -math.inf)
    out, lse = Biased.apply(r.q, k, v, bias, r.scale)
    return (out, lse) if lse.isfinite().all() and out.detach().select(3, 0).all() else None


class Biased(torch.autograd.Function):
    """softmax(scale q k' + bias) v and the logsumexp of its rows, [B, H, Lq]; of bias [B or 1, H or 1, Lq, Lk]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = FUSED(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        lse = lse.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, of_out: Tensor, of_lse: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Differentiable: no tensor that the second derivative reads is overwritten."""
        q, k, v, bias, out, lse = ctx.saved_tensors
        (batch, heads, rows, _), keys = q.shape, k.shape[2]
        q, k, v, of_out = (x.flatten(0, 1) for x in (q, k, v, of_out))
        minus_delta = (of_lse.flatten(0, 1) - (of_out * out.flatten(0, 1)).sum(-1))[..., None]
        weights = (
            torch.baddbmm(bias.expand(batch, heads, rows, keys).flatten(0, 1), q, k.mT, alpha=ctx.scale)
            .sub_(lse.flatten(0, 1)[..., None])
            .exp_()
        )
        of_v = weights.mT @ of_out
        scores = torch.baddbmm(minus_delta.expand(-1, -1, keys), of_out, v.mT)
        scores = scores * weights if torch.is_grad_enabled() else scores.mul_(weights)
        del weights
        of_q, of_k = ctx.scale * (scores @ k), ctx.scale * (scores.mT @ q)
        of_bias = scores.view(batch, heads, rows, keys).sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None
        return *(x.view(batch, heads, -1, x.shape[-1]) for x in (of_q, of_k, of_v)), of_bias, None


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
    memory=lambda r: (biased_bytes(r) if takes(r) else dense_bytes(r)) * block_rows(r) // r.rows,
    price=lambda r: 2.5 if caps(r) else 3.0 if takes(r) and r.rows > 1 else 8.0,
)
