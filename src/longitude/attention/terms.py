"""The terms of one call: whether they fit, those around a backend (factors of queries, and sinks), and what backends read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longitude.attention.merge import with_logit
from longitude.attention.pairs import visible_keys
from longitude.attention.request import Request
from longitude.errors import UsageError
from longitude.positions.base import Columns
from longitude.positions.bias import FixedBias
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, single_axis
from longitude.positions.terms import (
    Drift,
    OffsetBias,
    OffsetVectors,
    SinkLogits,
    Temperature,
    Term,
    Transport,
    require_shape,
)


# ---- whether they fit ------------------------------------------------------------------------------------------------
def learned_of(encoding: Composed, terms: tuple[Term, ...]) -> list[Tensor]:
    """The encoding's parameters that require a gradient and may get one through terms that are added to scores."""
    # Member by member: torch.compile does not look into a module that the call has built, such as the Composed of a list.
    parameters = {id(p): p for member in encoding.each for p in member.parameters() if p.requires_grad}
    if not parameters:
        return []
    around: set[int] = set()
    for term in terms:
        if isinstance(term, Temperature):
            around |= {id(p) for p in (term.module.parameters() if term.module is not None else ())}
        elif isinstance(term, SinkLogits):
            around.add(id(term.logits))
    return [p for key, p in parameters.items() if key not in around]


def require_columns(context: Columns | None, encoding: Composed, q: Tensor, k: Tensor) -> None:
    """ValueError unless the context has the columns that the encoding reads, of all keys, and no others."""
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    if context is not None and (
        not isinstance(context, dict) or any(not isinstance(x, Tensor) or x.dim() < 3 for x in context.values())
    ):
        raise UsageError("context", "the columns of encoding.context(x)[0], name -> [B, heads, Lk, ...]", repr(context))
    if not encoding.reads_tokens:
        raise ValueError(f"context: the encoding reads no columns, got {sorted(context or ())}; leave context out")
    for name, column in (context or {}).items():
        new_only = name in encoding.passing_columns or name in encoding.query_columns
        tokens = column.shape[2] if new_only and rows <= column.shape[2] <= keys else keys
        if (
            column.shape[0] != q.shape[0]
            or (column.shape[1] != k.shape[1] and column.shape[1] != heads)
            or column.shape[2] != tokens
        ):
            expected = f"[{q.shape[0]}, heads, {keys}, ...] with {heads} heads, or {k.shape[1]} as the keys have"
            raise UsageError(f"context[{name!r}]", expected, list(column.shape))


def require_terms(terms: tuple[Term, ...], q: Tensor, k: Tensor, v: Tensor) -> None:
    """UsageError for terms that do not fit queries, keys and values, or each other; no kernel reads a tensor before this."""
    for term in terms:
        term.require(q, k, v)
    if sum(isinstance(term, Transport) for term in terms) > 1:
        raise ValueError("two composed encodings both transport keys; use one of them")


def of_one_axis(
    q_positions: Positions, k_positions: Positions, terms: tuple[Term, ...], gap: int
) -> tuple[Positions, Positions]:
    """Positions without a dimension for axes, if terms of one axis read them; ValueError if each token has several numbers."""
    readers = [term for term in terms if term.reads_positions]
    several = any(isinstance(p, Tensor) and p.dim() == 3 for p in (q_positions, k_positions))
    if not several or readers and all(term.reads_axes for term in readers):
        return q_positions, k_positions
    if not readers:
        return max(gap, 0), max(-gap, 0)  # unread
    q_positions, k_positions = (single_axis("the encoding's terms", p) for p in (q_positions, k_positions))
    return q_positions, k_positions


# ---- around a backend --------------------------------------------------------------------------------------------------
def with_terms_around(r: Request, terms: tuple[Term, ...]) -> Request:
    """The request of a whole call with the factors of its queries and the logits of its sinks."""
    factors, sinks = r.factors, r.sinks
    for term in terms:
        if isinstance(term, Temperature):
            numbers = r.pairs.once(visible_keys, r.q.device).clamp(min=1) if term.of == "visible" else r.places()[0]
            factor = term.at(numbers := numbers.view(-1, 1, r.rows))
            require_shape("Temperature", factor, r.q, *[(len(numbers), heads, r.rows) for heads in (1, r.heads)])
            factors = factor[..., None] if factors is None else factors * factor[..., None]
        elif isinstance(term, SinkLogits):
            sinks = term.logits if sinks is None else torch.logaddexp(sinks, term.logits)
    return replace(r, factors=factors, sinks=sinks)


def mixed(r: Request) -> Request:
    """The request with each mix in front of the queries, and zeros in front of the keys: queries then read its vectors.

    A backend that supports vectors of offsets so supports a mix of them, in the same memory. Factors of queries apply after it.
    """
    for n, term in enumerate(r.terms):
        if not isinstance(term, OffsetVectors) or term.mix is None:
            continue
        if not r.scale:
            raise UsageError("scale", "a number other than 0 with this encoding", r.scale)
        width, dim = term.mix.shape[3], r.q.shape[3]
        unmixed = replace(term, mix=None, keys=partial(_in_front, term.keys, r.scale, dim))
        others = [other.behind_zeros(width) for other in r.terms]
        q = torch.cat([per_query_head(term.mix, r.heads).to(r.q.dtype), r.q], -1)
        return mixed(replace(r, q=q, k=F.pad(r.k, (width, 0)), terms=(*others[:n], unmixed, *others[n + 1 :])))
    return r


def _in_front(keys: Callable[[Tensor], Tensor], scale: float, dim: int, offset: Tensor) -> Tensor:
    return F.pad(keys(offset) / scale, (0, dim))


def multiplied(r: Request) -> Request:
    """The request with its queries multiplied by their factors, rounded once."""
    assert r.factors is not None
    wider = torch.promote_types(r.q.dtype, torch.float32)
    done = replace(r, q=(r.q.to(wider) * r.factors.to(wider)).to(r.q.dtype), factors=None)
    done.step = r.step
    return done


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and logsumexp [B, H, Lq] of attention without sinks -> those with sinks [H] or [B, H, Lq].

    Autograd through it gives a backend's backward exactly the gradients of a softmax with one more column: of its scores
    P_ij sigmoid_i (dout_i . v_j - dout_i . out'_i), and of a logit -sum_i sigmoid(logit - lse_i) dout_i . out_i sigmoid_i.
    """
    logits = sinks.to(lse.dtype)
    logits = logits[:, None] if logits.dim() == 1 else logits
    weight = torch.sigmoid(lse.masked_fill(lse == -math.inf, 0.0) - logits)  # no logit is -inf - -inf
    out_ = out.to(lse.dtype) * weight[..., None]
    return out_.to(out.dtype), with_logit(lse, logits)


# ---- what several backends read of them ----------------------------------------------------------------------------------
def per_query_head(x: Tensor, heads: int) -> Tensor:
    """[B, Hkv, ...] -> [B, heads, ...]: each head of the keys serves a group of queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def offsets(r: Request) -> Tensor:
    """Query position - key position, [..., Lq, Lk]."""
    i, j = r.places()
    return i[..., :, None] - j[..., None, :]


def drift_level(r: Request) -> Tensor | None:
    """The sum of the levels of all drifts, [B, H, stream]: level_i - level_j is added to the scores. None without drifts."""
    level = None
    for term in r.terms:
        if isinstance(term, Drift):
            levels = per_query_head(r.scale * term.level if term.scaled else term.level, r.heads)
            level = levels if level is None else level + levels
    return level


# ---- the bias of contiguous positions --------------------------------------------------------------------------------
LONGEST = 2**18  # most offsets of a call for which a table is cached


def bias_of(term: OffsetBias, first: int, last: int, q: Tensor, dtype: torch.dtype) -> Float[Tensor, "heads offsets"]:
    """The bias at the offsets first, first - 1, ..., last of contiguous positions, on the device of q; do not write to it.

    A fixed bias is read from a cached table: computed again for each token, it could take longer than the attention. So is a
    learned one if it needs no gradient. Beyond its reach a bias is one number per head.
    """
    count = first - last + 1
    if torch.compiler.is_compiling():
        return _made(term, first, count, q, dtype)
    # No cache for fake tensors, nor on a GPU, where a table made on one stream may not be ready on another.
    plain = type(q) is Tensor and q.is_cpu and torch._C._len_torch_dispatch_stack() == 0 and count <= LONGEST
    fixed = isinstance(term.at, FixedBias)
    # Only modules without layers: hooks and adapters may change what a layer computes from its parameters.
    learned = term.of is not None and not term.of._modules
    if plain and (fixed or (learned and not torch.is_grad_enabled())):
        size = 1 << (count - 1).bit_length()  # a power of two, so that a growing sequence makes few tables
        lowest = last // size * size
        start = lowest + 2 * size - 1 - first
        table = _table(term.at, lowest, size, dtype) if fixed else _learned(term, lowest, size, dtype)
        if table.shape not in ((q.shape[1], 2 * size), (1, 2 * size)):
            require_shape("OffsetBias", table, q, (q.shape[1], 2 * size))
        return table[:, start : start + count]
    if term.reach is not None and first > term.reach:
        near = _made(term, term.reach, max(1, term.reach - last + 1), q, dtype)
        far = near[:, :1].expand(-1, min(count, first - term.reach))
        return torch.cat([far, near], 1) if last <= term.reach else far
    return _made(term, first, count, q, dtype)


def _made(term: OffsetBias, first: int, count: int, q: Tensor, dtype: torch.dtype) -> Tensor:
    bias = term.at(first - torch.arange(count, device=q.device))
    require_shape("OffsetBias", bias, q, (q.shape[1], count), (1, count))
    return bias.to(dtype)


@lru_cache(maxsize=32)  # by the numbers of the bias: equal ones are the same function
@torch.inference_mode(False)
@torch.no_grad()
def _table(at: Callable[[Tensor], Tensor], lowest: int, size: int, dtype: torch.dtype) -> Tensor:
    """The bias at 2 size offsets, descending to the lowest."""
    return at(lowest + 2 * size - 1 - torch.arange(2 * size, device="cpu")).to(dtype).contiguous()


_of_modules: WeakKeyDictionary[nn.Module, tuple[tuple[bytes, int, int, torch.dtype], Tensor]] = WeakKeyDictionary()


@torch.inference_mode(False)
@torch.no_grad()
def _learned(term: OffsetBias, lowest: int, size: int, dtype: torch.dtype) -> Tensor:
    """Table of a learned bias, cached while the parameters of its module are unchanged."""
    assert term.of is not None
    numbers = b"".join(p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for p in term.of.parameters())
    key = numbers, lowest, size, dtype
    known, table = _of_modules.get(term.of, (None, None))
    if known != key or table is None:
        offsets = lowest + 2 * size - 1 - torch.arange(2 * size, device="cpu")
        _of_modules[term.of] = key, table = key, term.at(offsets).to(dtype).contiguous()
    return table
