"""Masking of NaN and infinity: a token that is not finite reaches only the queries that attend to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor

from longitude.attention.request import Request
from longitude.native.derivatives import in_forward_mode, recorded
from longitude.native.not_finite import all_finite, filled, gradients_apart, not_finite
from longitude.native.tensors import in_memory

if TYPE_CHECKING:
    from longitude.attention.backends.base import Backend

PAIRS = 2**22
"""Pairs of queries and keys in a block of the mask; bounds its memory."""
Answer = tuple[Tensor, Any]


def nan_where_attended(backend: Backend, r: Request, run: Callable[[Request], Answer]) -> Answer:
    """Return the output of `run`, with NaN exactly for queries that attend to a token that is not finite.

    Backends that leave hidden keys out run unchanged. If values can be read and all are finite, nothing else is computed.
    Without derivatives the output is checked instead of the keys, because it is smaller.

    Args:
        backend: The backend that computes.
        r: The request.
        run: Computes a request with this backend: out [B, H, Lq, Dv], and the logsumexp or weights, if any.
    """
    if not hides_by_weight(backend, r):
        return run(r)
    columns = [getattr(term, name) for term in r.terms for name in term.of_tokens]
    if in_memory(r.q, r.k, r.v):
        tensors = r.q, r.k, r.v, *columns
        if in_forward_mode() or recorded(*tensors, *r.learned):
            if all_finite(*tensors):
                return outputs_apart(r, run(r))
        elif all_finite((answer := run(r))[0]):
            return answer
    bad_keys, bad_queries, terms = not_finite([r.k, r.v], 2), not_finite([r.q], 2), []
    for term in r.terms:
        if term.of_tokens:
            by_name = {name: getattr(term, name) for name in term.of_tokens}
            bad, first = not_finite([*by_name.values()], 2), getattr(term, "first", 0)
            bad_keys = bad_keys | in_order(bad, r.k_tokens() - first)
            bad_queries = bad_queries | in_order(bad, r.q_tokens() - first)
            term = replace(term, **{name: filled(x, bad, 2, 0.0) for name, x in by_name.items()})  # type: ignore[type-var]
        terms.append(term)
    q = filled(r.q, bad_queries, 2, 0.0)
    k, v = (filled(x, bad_keys, 2, 0.0) for x in (r.k, r.v))
    clean = replace(r, q=q, k=k, v=v, terms=tuple(terms))
    lost = bad_queries | attending(r, bad_keys)
    answer = outputs_apart(r, run(clean))
    return tuple(x if x is None else filled(x, lost, 2, math.nan) for x in answer)  # type: ignore[return-value]


def outputs_apart(r: Request, answer: Answer) -> Answer:
    """Apply `gradients_apart` to an answer except its weights, whose hidden pairs pass no gradient on."""
    if not r.weights:
        return gradients_apart(answer, r.q, 2)
    return (*gradients_apart(answer[:1], r.q, 2), answer[1])


def hides_by_weight(backend: Backend, r: Request) -> bool:
    """Whether a backend multiplies hidden keys by 0, other than those that causality and windows hide."""
    return len(r.pairs.beyond_band) > 0 and backend.any_mask and backend.by_weight(r)


def attending(r: Request, keys: Bool[Tensor, "B Lk"]) -> Bool[Tensor, "B Lq"]:
    """Which queries attend to any of these keys."""
    queries, every = r.q_tokens(), r.k_tokens()
    # The number of blocks would be a guard on the length in a graph.
    blocks = [queries] if torch.compiler.is_compiling() else queries.split(max(1, PAIRS // keys.numel()))
    return torch.cat([(r.mask.allowed(block, every) & keys[:, None, None]).any(-1) for block in blocks], -1)[:, 0]


def in_order(flags: Bool[Tensor, "B T"], place: Tensor) -> Bool[Tensor, "B n"]:
    """The flags at these places; False before the first."""
    return flags[:, place.clamp(min=0)] & (place >= 0)
