"""The backend of the Triton kernels: its conditions, and its gradients for torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends.base import TIED, Backend, no_second_derivatives
from longitude.attention.backends.triton import launch
from longitude.attention.backends.triton.intervals import intervals_of, refusal
from longitude.attention.backends.triton.launch import Inputs
from longitude.attention.request import Request
from longitude.attention.scores import drift_level, per_query_head
from longitude.attention.spans import steady
from longitude.native.derivatives import exporting
from longitude.native.gpu import why_no_triton, why_not_on
from longitude.native.tensors import needs_operator
from longitude.positions.base import Drift, OffsetBias, OffsetVectors, PairBias
from longitude.positions.coordinates import explicit
from longitude.positions.normalized import NormalizedOffset
from longitude.positions.terms import Softcap

OLDEST = (8, 0)
"""Compute capability."""
WIDEST = 128
"""head_dim: above it the blocks of the backward kernels spill registers on every chip."""


def inputs_of(r: Request) -> Inputs:
    """Inputs of the kernels for a request."""
    table = q_level = k_level = curves = rates = None
    biases, own = [term.at for term in r.terms if isinstance(term, OffsetBias)], normalized(r)
    nearest = 0
    if own is not None:
        offsets, places = offsets_of(r), explicit(r.q_positions, r.rows, r.q.device)
        table = own.distances(offsets).to(torch.float32).expand(r.heads, -1).contiguous()
        curves = own.curves().to(torch.float32)
        rates = (1 / own.scale_of(places)).to(torch.float32).expand(len(r.q), -1)[:, None].contiguous()
        nearest = r.length - 1 - gap_of(r)
    elif biases:
        offsets = offsets_of(r)
        table = torch.stack([at(offsets).to(torch.float32) for at in biases]).sum(0).contiguous()
    if (level := drift_level(r)) is not None:
        rows, keys = (slice(start, start + n) for start, n in ((r.q_order, r.rows), (r.k_order, r.length)))
        # Only differences count, and near 0 they round less.
        level = level - level[..., keys].mean(-1, keepdim=True).detach()
        q_level, k_level = (level[..., part].to(torch.float32).contiguous() for part in (rows, keys))
    mix, gap = mix_of(r), gap_of(r) if mixed(r) else 0
    added = table, q_level, k_level, curves, rates, mix
    return Inputs(r.q, r.k, r.v, *added, *intervals_of(r), nearest, r.scale, cap_of(r), gap)


def mixed(r: Request) -> OffsetVectors | None:
    """Profiles over offsets that queries mix, where nothing else is added."""
    own = [term for term in r.terms if isinstance(term, OffsetVectors) and term.mix is not None]
    return own[0] if len(r.terms) == 1 and own else None


def mix_of(r: Request) -> Tensor | None:
    """What each query adds to scores at offsets 0 .. reach, in the dtype of q."""
    if (term := mixed(r)) is None:
        return None
    assert term.mix is not None and term.reach is not None  # `limits` declines others
    profiles = term.keys(torch.arange(term.reach + 1, device=r.q.device))
    return (per_query_head(term.mix, r.heads).float() @ profiles.float().mT).to(r.q.dtype)


def cap_of(r: Request) -> float:
    """The cap of the products; 0 without one."""
    return next((term.cap for term in r.terms if isinstance(term, Softcap)), 0.0)


def gap_of(r: Request) -> int:
    """Position of the first query minus position of the first key."""
    counting = steady(r)
    assert counting is not None
    return counting.position_gap


def offsets_of(r: Request) -> Tensor:
    """Offsets in ascending order: from first query minus last key to last query minus first key."""
    gap = gap_of(r)
    return torch.arange(gap + 1 - r.length, gap + r.rows, device=r.q.device)


def normalized(r: Request) -> NormalizedOffset | None:
    """FIRE's formula, where nothing else is added."""
    own = [term.at for term in r.terms if isinstance(term, PairBias)]
    return own[0] if len(r.terms) == 1 and own and isinstance(own[0], NormalizedOffset) else None


def attention(r: Request) -> tuple[Tensor, Tensor]:
    """The output, and the logsumexp of the scores."""
    with torch.autocast(r.q.device.type, enabled=False):
        return _attention(*inputs_of(r))


# ---- the operators -------------------------------------------------------------------------------------------------------
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? q_level, Tensor? k_level, Tensor? curves, Tensor? rates, "
    "Tensor? mix, Tensor lo, Tensor hi, int nearest, float scale, float cap, int gap"
)

_attention = torch.library.custom_op(
    "longitude::triton_attention",
    lambda *inputs: launch.forward(Inputs(*inputs)),
    mutates_args=(),
    schema=f"({INPUTS}) -> (Tensor, Tensor)",
)


def _run_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, learned: bool, *inputs: Any
) -> list[Tensor]:
    """Gradients of the first nine inputs; empty ones where there is none."""
    found = launch.backward(Inputs(*inputs), grad, grad_lse, out, lse, learned)
    return [lse.new_empty(0) if x is None else x for x in found]


_attention_backward = torch.library.custom_op(
    "longitude::triton_attention_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, bool learned, {INPUTS}) -> Tensor[]",
)


@_attention.register_fake
def _(*inputs):
    x = Inputs(*inputs)
    return launch.heads_last(x.q, x.q.shape[1], x.v.shape[3]), x.q.new_empty(x.q.shape[:3], dtype=torch.float32)


@_attention_backward.register_fake
def _(grad, grad_lse, out, lse, learned, *inputs):
    x = Inputs(*inputs)
    own = [launch.heads_last(y, *y.shape[1::2]) for y in x[:3]]
    wanted = learned, True, True, learned, learned, True
    rest = [y if y is not None and wants else None for y, wants in zip(x[3:9], wanted, strict=True)]
    return [*own, *(lse.new_empty(0) if y is None else torch.empty_like(y) for y in rest)]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:11], *output)
    ctx.numbers = inputs[11:]
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, grad, grad_lse):
    *tensors, out, lse = ctx.saved_tensors
    learned = any(tensors[n] is not None and ctx.needs_input_grad[n] for n in (3, 6, 7))
    grad = torch.zeros_like(out) if grad is None else grad
    found = _attention_backward(grad, grad_lse, out, lse, learned, *tensors, *ctx.numbers)
    levels, curved = tensors[4] is not None, learned and tensors[6] is not None
    wanted = True, True, True, learned, levels, levels, curved, curved, tensors[8] is not None
    return *(x if wants else None for x, wants in zip(found, wanted, strict=True)), *(None,) * 6


_attention.register_autograd(_autograd_backward, setup_context=_setup_context)
_attention_backward.register_autograd(no_second_derivatives)


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
    if any(isinstance(term, OffsetVectors) for term in r.terms):
        if (own := mixed(r)) is None or own.reach is None or own.values is not None:
            return "it supports no vectors of offsets but mixed profiles of limited reach, without another term"
        if (low := r.band[0]) is None or low < 0 or steady(r) is None or gap_of(r) != r.order_gap:
            return "mixed profiles need causality, and positions in the order of the tokens"
    if cap_of(r) and len(r.terms) > 1:
        return "with a softcap it supports no other term"
    if any(isinstance(term, OffsetBias | PairBias) for term in r.terms) and steady(r) is None:
        return "it needs positions that count up by one; pass one int p for p, p+1, p+2, ..."
    if (why := refusal(r)) is not None:
        return why
    return None if torch.compiler.is_compiling() else of_chip(r)


def of_chip(r: Request) -> str | None:
    """Why this GPU does not run a request; None if it does, or if there is no GPU to ask."""
    if not r.q.is_cuda or needs_operator(r.q, r.k, r.v):  # traced, or without memory: there is no chip to ask
        return None
    device = r.q.device
    if torch.version.hip is not None:
        return "it is written for CUDA, and was never tried on ROCm"
    if (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        need, got = (".".join(map(str, of)) for of in (OLDEST, capability))
        return f"it needs compute capability {need}, this GPU has {got}"
    kinds = {type(term) for term in r.terms}
    own = normalized(r)
    pieces = 0 if own is None else len(own.b1) + 1
    widths = r.q.shape[3], r.v.shape[3]
    added = OffsetBias in kinds, Drift in kinds, pieces, len(r.learned) > 0, cap_of(r) > 0, mixed(r) is not None
    return _not_compiled(device, r.q.dtype, *widths, *added)


@lru_cache
def _not_compiled(
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    dv: int,
    table: bool,
    levels: bool,
    pieces: int,
    learned: bool,
    capped: bool,
    mixed: bool,
) -> str | None:
    """Why the kernels of a call do not run here, tried on one block."""
    q, v = (torch.zeros(1, 1, 1, width, dtype=dtype, device=device) for width in (d, dv))
    level = torch.zeros(1, 1, 1, device=device) if levels else None
    lo, hi = (torch.full((1, 1), end, dtype=torch.int32, device=device) for end in (0, 1))
    distances = torch.zeros(1, 1, device=device) if table or pieces else None
    rates = torch.zeros(1, 1, 1, device=device) if pieces else None
    curves = torch.zeros(1, 3, pieces, device=device) if pieces else None
    mix = torch.zeros(1, 1, 1, 2, dtype=dtype, device=device) if mixed else None
    x = Inputs(q, q, v, distances, level, level, curves, rates, mix, lo, hi, 0, 1.0, float(capped))

    def small_call() -> None:
        out, lse = launch.forward(x)
        launch.backward(x, out, None, out, lse, learned)

    return why_not_on(device, "backend 'triton'", small_call)


def memory(r: Request) -> int:
    """Bytes of logsumexp and delta of each query; of the table and, for each program, a row of its gradient; of levels."""
    per_query = 2 * r.q.shape[0] * r.heads * r.rows
    table = (r.heads + (launch.table_rows(r.q.device, r.heads) * r.heads if r.learned else 0)) * (r.rows + r.length)
    levels = 4 * r.q.shape[0] * r.heads * (r.rows + r.length)
    kinds = {type(term) for term in r.terms}
    own = normalized(r)
    curves = 0 if own is None else r.q.shape[0] * (r.heads + 1) * r.rows
    if own is not None and r.learned:  # sums of each program, by piece and by query of a block
        curves += launch.table_rows(r.q.device, r.heads) * r.heads * (len(own.b1) + 1) * 2 * 128
    profiles = mixed(r)
    mix = 0 if profiles is None else 4 * r.q.shape[0] * r.heads * r.rows * (profiles.reach or 0)
    return mix + 4 * (per_query + table * bool(kinds & {OffsetBias, PairBias}) + curves + levels * (Drift in kinds))


def price(r: Request) -> float:
    """Relative time, not measured yet: above torch's attention if that supports the call, below all other biased backends."""
    return 1.2 if r.terms else 1.05 if r.beyond_band else 1.1


TRITON = Backend(
    "triton",
    run=lambda r: attention(r)[0],
    partial=attention,
    terms=(OffsetBias, OffsetVectors, PairBias, Drift, Softcap),
    mixes=True,
    any_mask=True,  # `refusal` says which
    dtypes=(torch.bfloat16, torch.float16),
    devices=("cuda",),
    transforms=False,
    limits=limits,
    memory=memory,
    price=price,
)
