"""Products of Householder reflections by the kernels of flash-linear-attention (Yang and Zhang 2024), if it is installed.

    pip install flash-linear-attention

It multiplies reflections in float16 whatever its inputs, and adds gradients atomically: they differ in the last bits from run to
run. Its layout is [B, L, heads, width]; its gates are multiplied by the scale of the scores, as q.k is.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends.base import Backend
from longitude.attention.request import Request
from longitude.attention.scores import drift_level, per_query_head
from longitude.attention.spans import by_spans
from longitude.positions.base import Drift, Transport

WIDTHS = (16, 32, 64, 128)


class Attention(torch.autograd.Function):
    """Attention of flash-linear-attention. Double backward raises, because its gradient would count as a constant."""

    @staticmethod
    def forward(ctx: Any, scale: float, *inputs: Tensor | None) -> Tensor:
        parallel_path_attn = import_module("fla.ops.path_attn").parallel_path_attn
        with torch.enable_grad():
            ctx.inputs = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
            ctx.out, _ = parallel_path_attn(*ctx.inputs, scale=scale)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise RuntimeError("backend 'fla' has no second derivatives; backend='transport' has them")
        wanted = [x for x in ctx.inputs if x is not None and x.requires_grad]
        gradients = iter(torch.autograd.grad(ctx.out, wanted, grad))
        return None, *(next(gradients) if x is not None and x.requires_grad else None for x in ctx.inputs)


def run(r: Request) -> Tensor:
    """Output [B, H, Lq, Dv], one call for each span of padding and documents."""

    def of_span(r: Request) -> Tensor:
        (term,) = (term for term in r.terms if isinstance(term, Transport))
        tokens = slice(r.k_order - term.first, r.k_order - term.first + r.length)
        w, b = (x[:, :, tokens].float() for x in (term.w, term.b))
        shared = max(r.k.shape[1], w.shape[1])  # heads that keys and their reflections have in common
        k, v, w, b = (per_query_head(x, shared) for x in (r.k, r.v, w, b))
        level = drift_level(r)
        if level is not None:  # a level is the sum of the log gates up to a token, and the kernel takes the gates
            level = level[:, :, r.k_order : r.k_order + r.length].float() / r.scale
            level = torch.diff(level, dim=2, prepend=level[:, :, :1])
        inputs = (r.q, k, v, w, b, level)
        laid = [None if x is None else x.transpose(1, 2).contiguous() for x in inputs]
        return Attention.apply(r.scale, *laid).transpose(1, 2)

    return by_spans(r, run=of_span)


def limits(r: Request) -> str | None:
    """Reasons that `Backend` cannot express."""
    if find_spec("fla") is None or find_spec("triton") is None:
        return "it needs the package fla: pip install flash-linear-attention"
    transports = [term for term in r.terms if isinstance(term, Transport)]
    if not transports:
        return "the encoding has no transport"
    widths = r.q.shape[3], r.v.shape[3]
    if not {*widths} <= {*WIDTHS}:
        return f"it supports head_dim {', '.join(map(str, WIDTHS))}, not {' and '.join(map(str, {*widths}))}"
    if r.band != (0, None):
        return "it supports only the mask Causal(), in token order"
    if r.order_gap != 0 or r.rows != r.length or transports[0].w.shape[2] != r.length:
        return "it needs as many queries as keys, so it supports no cache"
    spans = r.pairs.spans if r.beyond_band else []
    assert not isinstance(spans, str), spans
    if any(span[:2] != span[2:] for _, corners in spans for span in corners):
        return "it needs as many queries as keys, and padding after a document has queries only"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients are not deterministic, and torch.use_deterministic_algorithms is on"
    return None


def memory(r: Request) -> int:
    """Bytes of transformed queries and keys, w and b in float32, and of a [D, D] product for each 64 tokens."""
    return 4 * r.q.shape[0] * r.heads * r.length * (4 * r.q.shape[3] + r.q.shape[3] ** 2 // 64)


FLA = Backend(
    "fla",
    run=run,
    terms=(Transport, Drift),
    dtypes=(torch.bfloat16, torch.float16),
    devices=("cuda",),
    transforms=False,
    limits=limits,
    memory=memory,
    price=lambda r: 2.0,  # not measured; below that of `transport`, which runs torch's operators
)
