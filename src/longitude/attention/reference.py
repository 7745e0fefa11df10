"""The specification: dense, readable, in float32 or wider, on any device. Every other backend must equal it."""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from longitude.attention.request import Request
from longitude.positions.base import Drift, OffsetBias, OffsetVectors, PairBias, RowBias, Term, Transport


def reference(r: Request) -> tuple[Tensor, Tensor]:
    """-> output [B, H, Lq, Dv] and the weights that made it, after dropout, [B, H, Lq, Lk]."""
    dtype = torch.promote_types(r.q.dtype, torch.float32)
    with torch.autocast(r.q.device.type, enabled=False):
        q = r.q.to(dtype)
        k, v = (per_query_head(x.to(dtype), r.heads) for x in (r.k, r.v))
        allowed = r.allowed()
        transports = [term for term in r.terms if isinstance(term, Transport)]
        scores = raw = r.scale * (transported(transports, q, k, r) if transports else q @ k.mT)
        for term in r.terms:
            if not isinstance(term, Transport):
                scores = scores + added(term, q, raw, allowed, r).to(dtype)
        # The lowest finite number, not -inf: a query with nothing to look at then has zeros, in its gradients too.
        weights = scores.masked_fill(~allowed, torch.finfo(dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        if r.dropout:
            weights = torch.nn.functional.dropout(weights, r.dropout)
        out = weights @ v
        for term in r.terms:
            if isinstance(term, OffsetVectors) and term.values is not None:
                out = out + against(weights, term.values, r, "ij,ijd->id")
    return out.to(r.q.dtype), weights.to(r.q.dtype)


def added(term: Term, q: Tensor, raw: Tensor, allowed: Tensor, r: Request) -> Tensor:
    """What a term adds to the scores, [..., heads, Lq, Lk]."""
    match term:
        case OffsetBias(at):
            bias = at(offsets(r))
            return bias if bias.dim() == 3 else bias.movedim(0, 1)
        case PairBias(at):
            i, j = r.places()
            return at(i[..., :, None], j[..., None, :])
        case Drift(level, scaled):
            drift = level[..., r.q_tokens(), None] - level[..., None, r.k_tokens()]
            return r.scale * drift if scaled else drift
        case OffsetVectors(keys, _, shift):
            return r.scale * against(q + shift, keys, r, "id,ijd->ij")
        case RowBias(of):
            return of(q, raw, allowed)
    raise AssertionError(f"no rule for {term!r}")


def transported(terms: list[Transport], q: Tensor, k: Tensor, r: Request) -> Tensor:
    """q_i . H_i ... H_(j+1) k_j, one token t at a time: every key before t is reflected by it, [B, H, Lq, Lk]."""
    if len(terms) > 1:
        raise ValueError("two composed encodings both transport keys; use one of them")
    w, b = (per_query_head(x.to(q.dtype), r.heads) for x in (terms[0].w, terms[0].b))
    first = terms[0].first  # keys before it are carried to it already
    scores: list[Tensor] = []
    moved = k[:, :, :0]
    for t in range(r.length):
        token = r.k_order + t - first
        if token >= 0:
            reflector, strength = w[:, :, token, None], b[:, :, token, None, None]
            moved = moved - strength * (moved * reflector).sum(-1, keepdim=True) * reflector
        moved = torch.cat([moved, k[:, :, t, None]], 2)
        if 0 <= t - r.order_gap < r.rows:
            row = (moved @ q[:, :, t - r.order_gap, :, None]).squeeze(-1)
            scores.append(torch.nn.functional.pad(row, (0, r.length - t - 1)))
    return torch.stack(scores, 2)


def offsets(r: Request) -> Tensor:
    """Query position - key position, [..., Lq, Lk]."""
    i, j = r.places()
    return i[..., :, None] - j[..., None, :]


def against(x: Tensor, at: Callable[[Tensor], Tensor], r: Request, rule: str) -> Tensor:
    """x [B, H, Lq, .] times the vectors `at` every offset, by an einsum rule without the axes of batch and heads."""
    offset = offsets(r)
    vectors = at(offset).to(x.dtype)  # offset.shape + [D], perhaps with heads in front
    lead = ("h" if vectors.dim() > offset.dim() + 1 else "") + ("b" if offset.dim() == 3 else "")
    one, pairs, out = re.split(",|->", rule)
    return torch.einsum(f"bh{one},{lead}{pairs}->bh{out}", x, vectors)


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """[B, Hkv, ...] -> [B, heads, ...]: each head of the keys serves a group of queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
