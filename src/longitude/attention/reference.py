"""Reference attention, the specification of all backends: dense, readable, in float32 or wider, on any device."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.merge import with_logit
from longitude.attention.request import Request
from longitude.attention.terms import offsets, per_query_head
from longitude.positions.terms import OffsetVectors, Softcap, Term, Transport

Transporter = Callable[[list[Transport], Tensor, Tensor, Request], Tensor]


def reference(r: Request, transport: Transporter | None = None) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and its weights, after dropout, [B, H, Lq, Lk]; with r.lse the logsumexp of the scores instead.

    The logsumexp [B, H, Lq] is in float32 or wider, -inf for a query without keys. transport: computes the scores of
    `transported` faster.
    """
    dtype = torch.promote_types(r.q.dtype, torch.float32)
    with torch.autocast(r.q.device.type, enabled=False):
        q = r.q.to(dtype)
        k, v = (per_query_head(x.to(dtype), r.heads) for x in (r.k, r.v))
        allowed = r.allowed()
        transports = [term for term in r.terms if isinstance(term, Transport)]
        scores = raw = r.scale * ((transport or transported)(transports, q, k, r) if transports else q @ k.mT)
        for term in r.terms:
            if isinstance(term, Softcap):  # of products alone: a bias must still hide distant keys
                scores = term.cap * (scores / term.cap).tanh()
        for term in r.terms:
            if not isinstance(term, Transport | Softcap):
                scores = scores + added(term, q, raw, allowed, r).to(dtype)
        # A finite number for a query without keys: it then has zeros, in its gradients too. Anywhere else -inf:
        # among scores that are all -inf, a finite one would get all the weight, and zeros would hide them.
        hidden = torch.where(allowed.any(-1, keepdim=True), -math.inf, 0.0)
        scores = torch.where(allowed, scores, hidden.to(dtype))
        weights = with_sink_column(scores, r).softmax(-1)[..., : r.length].masked_fill(~allowed, 0.0)
        if r.dropout:
            weights = F.dropout(weights, r.dropout)
        out = weights @ v
        for term in r.terms:
            if isinstance(term, OffsetVectors) and term.values is not None:
                out = out + relative_value_sum(weights, term.values, r)
        if r.lse:
            lse = scores.logsumexp(-1) + 0 * weights.sum(-1)  # NaN where the output is NaN
            lse = lse.masked_fill(~allowed.any(-1), -math.inf)
            return out.to(r.q.dtype), lse if r.sinks is None else with_logit(lse, r.sinks.to(dtype)[:, None])
    return out.to(r.q.dtype), weights.to(r.q.dtype)


def with_sink_column(scores: Tensor, r: Request) -> Tensor:
    """Append the column of sinks to scores [B, H, Lq, n]: a logit per head. Unchanged without sinks."""
    if r.sinks is None:
        return scores
    column = r.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1)


def added(term: Term, q: Tensor, raw: Tensor, allowed: Tensor, r: Request) -> Tensor:
    """Additive bias of a term for the scores, [..., heads, Lq, Lk]."""
    if isinstance(term, OffsetVectors):
        return r.scale * relative_key_scores(q + term.shift, term.keys, r)
    return term.dense(r, q, raw, allowed)


def transported(terms: list[Transport], q: Tensor, k: Tensor, r: Request) -> Tensor:
    """Scores q_i . H_i ... H_(j+1) k_j [B, H, Lq, Lk], token by token: token t reflects all earlier keys."""
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
            scores.append(F.pad(row, (0, r.length - t - 1)))
    return torch.stack(scores, 2)


def relative_key_scores(q: Tensor, keys: Callable[[Tensor], Tensor], r: Request) -> Tensor:
    """Products of queries and vectors of offsets, [B, H, Lq, Lk]."""
    if not r.contiguous:
        vectors = keys(offsets(r)).to(q.dtype)
        return torch.einsum(f"bhid,{_lead(vectors, r)}ijd->bhij", q, vectors)
    every = q @ keys(descending(r)).to(q.dtype).mT  # [B, H, Lq, Lq + Lk]; row a has its own offsets from Lq - 1 - a on
    rows, width = every.shape[2:]
    return every.flatten(2)[..., rows - 1 : rows * width - 1].unflatten(-1, (rows, width - 1))[..., : r.length]


def relative_value_sum(weights: Tensor, values: Callable[[Tensor], Tensor], r: Request) -> Tensor:
    """Sums of the vectors of offsets, weighted by attention, [B, H, Lq, D]."""
    if not r.contiguous:
        vectors = values(offsets(r)).to(weights.dtype)
        return torch.einsum(f"bhij,{_lead(vectors, r)}ijd->bhid", weights, vectors)
    rows, width = r.rows, r.rows + r.length  # back to one column per offset, as relative_key_scores in reverse
    flat = F.pad(F.pad(weights, (0, width - 1 - r.length)).flatten(2), (rows - 1, 1))
    return flat.unflatten(-1, (rows, width)) @ values(descending(r)).to(weights.dtype)


def descending(r: Request) -> Tensor:
    """Offsets of contiguous positions, once each, [Lq + Lk]: from last query minus first key down to one below the lowest."""
    assert isinstance(r.q_positions, int) and isinstance(r.k_positions, int)
    top = r.q_positions + r.rows - 1 - r.k_positions
    return top - torch.arange(r.rows + r.length, device=r.q.device)


def _lead(vectors: Tensor, r: Request) -> str:
    """Leading axes of vectors before [Lq, Lk, D], as einsum letters: heads, and batch if positions have one."""
    i, j = r.places()
    batch = "b" if max(i.dim(), j.dim()) == 2 else ""
    return ("h" if vectors.dim() > 3 + len(batch) else "") + batch
