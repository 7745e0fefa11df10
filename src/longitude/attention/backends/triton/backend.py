"""The backend of the Triton kernels: its conditions, and its gradients for torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce

import torch
from torch import Tensor

from longitude.attention.backends.base import Backend
from longitude.attention.backends.operators import TIED, Inputs, Operators, heads_last
from longitude.attention.backends.triton import launch
from longitude.attention.backends.triton.intervals import intervals_of, refusal
from longitude.attention.backends.triton.launch import Limits, Terms
from longitude.attention.pairs import AllowedPairs
from longitude.attention.request import Request
from longitude.attention.spans import steady
from longitude.attention.terms import drift_level
from longitude.native.derivatives import exporting
from longitude.native.gpu import why_no_triton, why_not_on
from longitude.native.tensors import needs_operator
from longitude.positions.bias import FixedBias, Lookup
from longitude.positions.coordinates import explicit
from longitude.positions.formulas import NormalizedOffset
from longitude.positions.terms import Drift, OffsetBias, PairBias

OLDEST = (8, 0)
"""Compute capability."""
WIDEST = 128
"""head_dim: above it the blocks of the backward kernels spill registers on every chip."""


def inputs_of(r: Request) -> Inputs:
    """Inputs of the kernels for a request."""
    terms, formula = Terms(), normalized(r)
    biases = [term for term in r.terms if isinstance(term, OffsetBias)]
    nearest = 0
    if formula is not None:
        places = explicit(r.q_positions, r.rows, r.q.device)
        distances = by_offset(r.pairs, formula.distances, gap_of(r), r.q.device).to(torch.float32)
        terms = terms._replace(
            table=distances.expand(r.heads, -1).contiguous(),
            curves=formula.curves().to(torch.float32),
            rates=(1 / formula.scale_of(places)).to(torch.float32).expand(len(r.q), -1)[:, None].contiguous(),
        )
        nearest = r.length - 1 - gap_of(r)
    elif biases:
        table = reduce(torch.add, [table_of(r, term) for term in biases])
        terms = terms._replace(table=table.expand(r.heads, -1).contiguous())
    if (level := drift_level(r)) is not None:
        rows, keys = (slice(start, start + n) for start, n in ((r.q_order, r.rows), (r.k_order, r.length)))
        # Only differences count, and near 0 they round less.
        level = level - level[..., keys].mean(-1, keepdim=True).detach()
        q_level, k_level = (level[..., part].to(torch.float32).contiguous() for part in (rows, keys))
        terms = terms._replace(q_level=q_level, k_level=k_level)
    return Inputs(r.q, r.k, r.v, terms, Limits(*intervals_of(r), nearest), r.scale)


def table_of(r: Request, term: OffsetBias) -> Tensor:
    """The bias by offset, [heads or 1, Lq + Lk - 1]. What no parameter decides is computed once for all layers of a forward."""
    where = gap_of(r), r.q.device
    match term.at:
        case Lookup(bucket):
            table = term.at.at(r.pairs.once(by_offset, bucket, *where))
        case FixedBias():
            table = r.pairs.once(by_offset, term.at, *where)
        case at:
            table = by_offset(r.pairs, at, *where)
    return table.to(torch.float32)


def by_offset(pairs: AllowedPairs, at: Callable[[Tensor], Tensor], gap: int, device: torch.device) -> Tensor:
    """`at` of the offsets in ascending order: from first query minus last key to last query minus first key."""
    return at(torch.arange(gap + 1 - pairs.keys, gap + pairs.rows, device=device))


def gap_of(r: Request) -> int:
    """Position of the first query minus position of the first key."""
    counting = steady(r)
    assert counting is not None
    return counting.position_gap


def normalized(r: Request) -> NormalizedOffset | None:
    """FIRE's formula, where nothing else is added."""
    functions = [term.at for term in r.terms if isinstance(term, PairBias)]
    return functions[0] if len(r.terms) == 1 and functions and isinstance(functions[0], NormalizedOffset) else None


def attention(r: Request) -> tuple[Tensor, Tensor]:
    """The output, and the logsumexp of the scores."""
    with torch.autocast(r.q.device.type, enabled=False):
        return OPERATORS.forward(*OPERATORS.flat(inputs_of(r)))


def like(x: Inputs) -> tuple[Tensor, Tensor]:
    """New tensors like the results of `launch.forward`."""
    return heads_last(x.q, x.v.shape[3]), x.q.new_empty(x.q.shape[:3], dtype=torch.float32)


OPERATORS = Operators(
    "longitude::triton_attention", launch.forward, launch.backward, like, results=2, terms=Terms, limits=Limits,
    of_limits="Tensor lo, Tensor hi, int nearest", device=None,
)  # fmt: skip


# ---- what it supports ----------------------------------------------------------------------------------------------------
def limits(r: Request) -> str | None:
    """Why it does not support a request, besides what `Backend` declares."""
    if (why := why_no_triton()) is not None:
        return why
    if exporting():
        return TIED
    widths = r.q.shape[3], r.v.shape[3]
    if max(widths) > WIDEST:
        return f"it supports head_dim up to {WIDEST}, not {max(widths)}"
    if any(isinstance(term, PairBias) for term in r.terms) and normalized(r) is None:
        return "it supports no bias of pairs but FIRE's, without another term"
    if any(isinstance(term, OffsetBias | PairBias) for term in r.terms) and steady(r) is None:
        return "it needs positions that count up by one; pass one int p for p, p+1, p+2, ..."
    if (why := refusal(r)) is not None:
        return why
    return of_chip(r)


def of_chip(r: Request) -> str | None:
    """Why this GPU does not run a request; None if it does, or if there is no GPU to ask. A compiled call tries no kernel."""
    compiling = torch.compiler.is_compiling()
    device, without_memory = r.q.device, needs_operator(r.q, r.k, r.v) and not compiling
    if not r.q.is_cuda or without_memory:  # there is no chip to ask
        return None
    if (why := of_device(device)) is not None or compiling:
        return why
    kinds = {type(term) for term in r.terms}
    function = normalized(r)
    pieces = 0 if function is None else len(function.b1) + 1
    widths = r.q.shape[3], r.v.shape[3]
    added = OffsetBias in kinds, Drift in kinds, pieces, len(r.learned) > 0
    return _not_compiled(device, r.q.dtype, widths, added)


@torch.compiler.assume_constant_result  # a graph is compiled for one device, and no version of dynamo need trace the query
def of_device(device: torch.device) -> str | None:
    """Why the kernels are not written for a GPU."""
    if torch.version.hip is not None:
        return "it is written for CUDA, and was never tried on ROCm"
    if (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        need, got = (".".join(map(str, of)) for of in (OLDEST, capability))
        return f"it needs compute capability {need}, this GPU has {got}"
    return None


@lru_cache
def _not_compiled(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], added: tuple[bool, bool, int, bool]
) -> str | None:
    """Why the kernels of a call do not run here, tried on one block. added: a table, levels, pieces of curves, learned."""
    table, levels, pieces, learned = added
    q, v = (torch.zeros(1, 1, 1, width, dtype=dtype, device=device) for width in widths)
    level = torch.zeros(1, 1, 1, device=device) if levels else None
    lo, hi = (torch.full((1, 1), end, dtype=torch.int32, device=device) for end in (0, 1))
    distances = torch.zeros(1, 1, device=device) if table or pieces else None
    rates = torch.zeros(1, 1, 1, device=device) if pieces else None
    curves = torch.zeros(1, 3, pieces, device=device) if pieces else None
    x = Inputs(q, q, v, Terms(distances, level, level, curves, rates), Limits(lo, hi), 1.0)

    def small_call() -> None:
        out, lse = launch.forward(x)
        launch.backward(x, out, None, out, lse, learned)

    return why_not_on(device, "backend 'triton'", small_call)


def memory(r: Request) -> int:
    """Bytes of logsumexp and delta of each query; of the table, and of its gradient in each program; of levels."""
    per_query = 2 * r.q.shape[0] * r.heads * r.rows
    programs = launch.table_rows(r.q.device, r.heads)
    table = r.heads * ((7 * (r.rows + r.length) + 256 * programs) if r.learned else r.rows + r.length)
    levels = 4 * r.q.shape[0] * r.heads * (r.rows + r.length)
    kinds = {type(term) for term in r.terms}
    function = normalized(r)
    curves = 0 if function is None else r.q.shape[0] * (r.heads + 1) * r.rows
    if function is not None and r.learned:  # sums of each block of queries, by piece
        curves += r.q.shape[0] * r.heads * (r.rows // 32 + 1) * 4 * 2 ** (len(function.b1) - 1).bit_length()
    return 4 * (per_query + table * bool(kinds & {OffsetBias, PairBias}) + curves + levels * (Drift in kinds))


def price(r: Request) -> float:
    """Relative time, not measured yet: above torch's attention if that supports the call, below all other biased backends."""
    return 1.2 if r.terms else 1.05 if r.pairs.beyond_band else 1.1


TRITON = Backend(
    "triton",
    run=lambda r: attention(r)[0],
    partial=attention,
    terms=(OffsetBias, PairBias, Drift),
    any_mask=True,  # `refusal` says which
    dtypes=(torch.bfloat16, torch.float16),
    devices=("cuda",),
    transforms=False,
    limits=limits,
    memory=memory,
    price=price,
)
