"""Attention whose scores depend on offsets and on one number per token, at about the price of plain causal attention.

A bias of head and offset is one table of Lq + Lk - 1 numbers per head, and causality or a sliding window is -inf entries of
it. With the queries reversed (i = Lq - 1 - a) query i and key b meet at diagonal i + b: their bias is a Hankel matrix, which
is a *strided view* of the table (strides 1 and 1). A vector per offset is read by a block of queries in one product whose
columns are diagonals, and its bias is a strided view of that (a row begins one further than the row above). A number per
token (a forget gate's level) is constant along a column. Nothing of Lq x Lk elements is ever allocated.

    bias        what is added, where the band ends, and what is too small to count
    tiles       a tile of scores
    forward     block by block of queries, tile by tile of keys; rows are lowered by a running maximum only where `Bound`
                cannot promise scores of ordinary size
    backward    tile by tile; a tile of weights is built once and serves every gradient, those of tables (anti-diagonal sums
                of the scores' gradient) and vectors (one product per tile) among them
    compiled    both, where nothing but a table is added and there is a compiler: band.c does the same in one pass

In all of these, i counts queries in reverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longitude.attention.backends.table import compiled
from longitude.attention.backends.table.backward import backward
from longitude.attention.backends.table.bias import Band, Inputs
from longitude.attention.backends.table.forward import forward
from longitude.attention.backends.table.tiles import heads_last

__all__ = ["toeplitz_attention"]


def toeplitz_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None = None,
    *,
    levels: tuple[Tensor, Tensor] | None = None,
    key_vectors: Tensor | None = None,
    value_vectors: Tensor | None = None,
    spans: Tensor | None = None,
    near: int = 0,
    low: int | None = None,
    high: int | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Out [B, H, Lq, D] = weights v, and lse [B, H, Lq], the logsumexp of each row's scores, in O(Lq + Lk) memory.

        scores[h, a, b] = scale q_a . k_b + table[h, n] + q_level[a] - k_level[b] + scale q_a . key_vectors[h, n]
        out[h, a]       = sum over b of weights[h, a, b] (v_b + value_vectors[h, n]),          n = (Lq - 1 - a) + b

    q [B, H, Lq, D]; k, v [B, Hkv, Lk, D], Hkv divides H; on the CPU. In float32 or wider: table [H, Lq + Lk - 1], finite;
    levels [B, H, Lq] and [B, H, Lk]; vectors [H or 1, N, D], those of the diagonals from `near` on, up to the end of the band
    or further. Before `near` vectors and table are zero, and these keys cost what plain attention costs.
    Query row a has order Lk - Lq + a and key b has order b; the pair is allowed when low <= order_q - order_k <= high (None:
    unbounded): causal is low=0, a window of w keys is low=0, high=w-1. spans, int64 [n, 5]: (row of the batch, first and last
    + 1 of its queries, first and last + 1 of the keys that these attend to); no query and no key is in two of them; only where
    `compiled.functions` are, and nothing but a table is added. A query without keys gives zeros, and an lse of -inf.
    Everything gets gradients, through both results; double backward raises.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    assert q.dim() == 4 and k.dim() == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype, (q, k, v)
    assert q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    assert table is None or (table.shape == (q.shape[1], q.shape[2] + k.shape[2] - 1) and table.dtype == wide), table
    stop = Band.of(q.shape[2], k.shape[2], low, None).last + 1  # one past the last diagonal of the band
    vectors = [None if x is None else x[:, : max(0, stop - near)] for x in (key_vectors, value_vectors)]
    inputs: Any = q, k, v, table, *(levels or (None, None)), *vectors, spans, near, low, high, scale
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or _needs_operator(q, k, v, table):
        return _attention(*inputs)[:2]
    return _run(*inputs)[:2]  # decoding: the dispatcher would take a fifth of a short step


def _needs_operator(*tensors: Tensor | None) -> bool:
    """Whether a mode, a transform or a subclass of tensors need the operator: they have no plain memory."""
    modes = torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()
    return modes or any(x is not None and (type(x) not in (Tensor, nn.Parameter) or x.is_neg()) for x in tensors)


# ---- the operators: compiled graphs hold these two, whatever the length ----------------------------------------------
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? q_level, Tensor? k_level, Tensor? key_vectors, "
    "Tensor? value_vectors, Tensor? spans, SymInt near, SymInt? low, SymInt? high, float scale"
)
_operator = {"mutates_args": (), "device_types": "cpu"}


def _run(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and what the loop in C keeps for its backward."""
    x = Inputs(*inputs)
    if (done := compiled.forward(x)) is not None:
        return done
    assert x.spans is None
    out, lse = forward(x)
    return out, lse, lse.new_zeros(2, *lse.shape)


_attention = torch.library.custom_op(
    "longitude::toeplitz_attention", _run, schema=f"({INPUTS}) -> (Tensor, Tensor, Tensor)", **_operator
)


def _run_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, ends: Tensor, learned: bool, *inputs: Any
) -> list[Tensor]:
    """Gradients of the first eight inputs; empty ones where there is nothing to learn."""
    x = Inputs(*inputs)
    minus_delta = -(grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        minus_delta += grad_lse
    grads = compiled.backward(x, grad, minus_delta, ends, learned)
    if grads is None:
        assert x.spans is None
        grads = backward(x, grad, minus_delta, lse, learned)
    return [x.q.new_empty(0) if grad is None else grad for grad in (*grads, *[None] * (8 - len(grads)))]


_attention_backward = torch.library.custom_op(
    "longitude::toeplitz_attention_backward",
    _run_backward,
    schema=f"(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor ends, bool learned, {INPUTS}) -> Tensor[]",
    **_operator,
)


@_attention.register_fake
def _(*inputs):
    x = Inputs(*inputs)
    lse = x.q.new_empty(x.q.shape[:3], dtype=x.wide)
    return heads_last(x.q), lse, lse.new_empty(2, *lse.shape)


@_attention_backward.register_fake
def _(grad, grad_lse, out, lse, ends, learned, *inputs):
    q, k, v, table, *others = inputs[:8]
    rest = (torch.empty_like(x, memory_format=torch.contiguous_format) if x is not None else None
            for x in (table if learned else None, *others))  # fmt: skip
    return [heads_last(q), heads_last(k), heads_last(v), *(q.new_empty(0) if x is None else x for x in rest)]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, grad, grad_lse, _):
    *tensors, out, lse, ends = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    learned = tensors[3] is not None and ctx.needs_input_grad[3]
    found = _attention_backward(grad, grad_lse, out, lse, ends, learned, *tensors, *ctx.options)
    wanted = True, True, True, learned, *(x is not None for x in tensors[4:8])
    return *(x if wants else None for x, wants in zip(found, wanted, strict=True)), *[None] * 5


_attention.register_autograd(_autograd_backward, setup_context=_setup_context)
