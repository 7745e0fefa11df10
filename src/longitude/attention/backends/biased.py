"""Attention of a block of queries with a dense bias: torch's fused function forward, five products backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends.base import terms_bytes
from longitude.attention.request import Request
from longitude.attention.scores import per_query_head
from longitude.native.derivatives import in_forward_mode
from longitude.native.tensors import in_memory
from longitude.positions.base import OffsetBias, PairBias, RowBias

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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
