"""Attention whose scores depend on offsets and on one number per token, at about the price of plain causal attention.

A bias of head and offset is one table of Lq + Lk - 1 numbers per head, and causality or a sliding window is -inf entries of
it. With the queries reversed (i = Lq - 1 - a) query i and key b meet at diagonal i + b: their bias is a Hankel matrix, which
is a *strided view* of the table (strides 1 and 1). A vector per offset is read by a block of queries in one product whose
columns are diagonals, and its bias is a strided view of that (a row begins one further than the row above). A number per
token (a forget gate's level) is constant along a column. Nothing of Lq x Lk elements is ever allocated.

    forward     block by block of queries, tile by tile of keys; rows are lowered by a running maximum only where `Bound`
                cannot promise scores of ordinary size
    backward    tile by tile; a tile of weights is built once and serves every gradient, those of tables (anti-diagonal sums
                of the scores' gradient) and vectors (one product per tile) among them
    compiled    both, where nothing but a table is added and there is a compiler: band.c does the same in one pass

Below this function, i always counts queries in reverse. band.py has the geometry, bias.py what is added, bound.py what cannot
count and is left out, tiles.py a tile of scores; then come forward.py and backward.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longitude.attention.backends.table import compiled
from longitude.attention.backends.table.backward import backward
from longitude.attention.backends.table.band import Band, heads_last
from longitude.attention.backends.table.bias import Bias
from longitude.attention.backends.table.forward import forward

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
    pieces: Tensor | None = None,
    near: int = 0,
    low: int | None = None,
    high: int | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Out [B, H, Lq, D] = weights v, and lse [B, H, Lq], the logsumexp of each row's scores, in O(Lq + Lk) memory:

        scores[h, a, b] = scale q_a . k_b + table[h, n] + q_level[a] - k_level[b] + scale q_a . key_vectors[h, n]
        out[h, a]       = sum over b of weights[h, a, b] (v_b + value_vectors[h, n]),          n = (Lq - 1 - a) + b

    q [B, H, Lq, D]; k, v [B, Hkv, Lk, D], Hkv divides H; on the CPU. In float32 or wider: table [H, Lq + Lk - 1], finite;
    levels [B, H, Lq] and [B, H, Lk]; vectors [H or 1, N, D], those of the diagonals from `near` on, as far as the band goes or
    further. Before `near` vectors and table are zero, and these keys cost what plain attention costs.
    Query row a has order Lk - Lq + a and key b has order b; the pair is allowed when low <= order_q - order_k <= high (None:
    unbounded): causal is low=0, a window of w keys is low=0, high=w-1. pieces, int64 [n, 5]: (row of the batch, first and last
    + 1 of its queries, first and last + 1 of the keys that these may see); no query and no key is in two of them; only where
    `compiled.functions` are, and nothing but a table is added. A query with nothing to look at gives zeros, and an
    lse of -inf. Everything gets gradients, through both results; double backward raises.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    assert q.dim() == 4 and k.dim() == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype, (q, k, v)
    assert q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    assert table is None or (table.shape == (q.shape[1], q.shape[2] + k.shape[2] - 1) and table.dtype == wide), table
    q_level, k_level = (None, None) if levels is None else levels
    vectors = [None if x is None else x[:, : max(0, _room(q, k, low) - near)] for x in (key_vectors, value_vectors)]
    inputs: Any = q, k, v, table, q_level, k_level, *vectors, pieces, near, low, high, scale
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or _watched(q, k, v, table):
        return _attention(*inputs)[:2]
    return _run(*inputs)[
        :2
    ]  # decoding: nobody watches, and the way through the dispatcher costs a fifth of a short step


def _watched(*tensors: Tensor | None) -> bool:
    """Whether a mode, a transform or a kind of tensor must see the operator: their memory is not what it seems."""
    modes = torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()
    return modes or any(x is not None and (type(x) not in (Tensor, nn.Parameter) or x.is_neg()) for x in tensors)


def _room(q: Tensor, k: Tensor, low: int | None) -> int:
    """One past the last diagonal of the band."""
    return Band.of(q.shape[2], k.shape[2], low, None).last + 1


# ---- the operators: compiled graphs hold these two, whatever the length ----------------------------------------------
def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    q_level: Tensor | None,
    k_level: Tensor | None,
    key_vectors: Tensor | None,
    value_vectors: Tensor | None,
    pieces: Tensor | None,
    near: int,
    low: int | None,
    high: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and what the loop in C keeps for its backward."""
    band = Band.of(q.shape[2], k.shape[2], low, high)
    if q_level is key_vectors is value_vectors is None:
        done = compiled.forward(q, k, v, table, pieces, band, scale)
        if done is not None:
            return done
    assert pieces is None
    bias = _bias(q, band, table, q_level, k_level, key_vectors, value_vectors, near)
    out, lse = forward(q, k, v, bias, scale)
    return out, lse, lse.new_zeros(2, *lse.shape)


_attention = torch.library.custom_op("longitude::toeplitz_attention", _run, mutates_args=(), device_types="cpu")


@torch.library.custom_op("longitude::toeplitz_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    q_level: Tensor | None,
    k_level: Tensor | None,
    key_vectors: Tensor | None,
    value_vectors: Tensor | None,
    pieces: Tensor | None,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    near: int,
    low: int | None,
    high: int | None,
    scale: float,
    learned: bool,
) -> list[Tensor]:
    """Gradients of q, k, v, table, q_level, k_level, key_vectors, value_vectors; empty ones where there is nothing to learn."""
    band = Band.of(q.shape[2], k.shape[2], low, high)
    minus_delta = -(grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        minus_delta += grad_lse
    grads = None
    if q_level is key_vectors is value_vectors is None:
        grads = compiled.backward(grad, minus_delta, q, k, v, table, pieces, ends, band, scale, learned)
    if grads is None:
        assert pieces is None
        bias = _bias(q, band, table, q_level, k_level, key_vectors, value_vectors, near)
        grads = backward(grad, minus_delta, q, k, v, lse, bias, scale, learned)
    grads = [*grads, *[None] * (8 - len(grads))]
    return [q.new_empty(0) if x is None else x for x in grads]


def _bias(q, band, table, q_level, k_level, key_vectors, value_vectors, near) -> Bias:
    like = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
    return Bias.of(band, near, like, table, (q_level, k_level), (key_vectors, value_vectors))


@_attention.register_fake
def _(q, k, v, table, q_level, k_level, key_vectors, value_vectors, pieces, near, low, high, scale):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return heads_last(q), lse, lse.new_empty(2, *lse.shape)


@_attention_backward.register_fake
def _(
    grad, grad_lse, q, k, v, table, q_level, k_level, key_vectors, value_vectors, pieces, out, lse, ends, near, low,
    high, scale, learned,
):  # fmt: skip
    others = table if learned else None, q_level, k_level, key_vectors, value_vectors
    rest = [q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in others]
    return [heads_last(q), heads_last(k), heads_last(v), *rest]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.near, ctx.low, ctx.high, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, grad, grad_lse, _):
    q, k, v, table, q_level, k_level, key_vectors, value_vectors, pieces, out, lse, ends = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(out)
    learned = table is not None and ctx.needs_input_grad[3]
    options = ctx.near, ctx.low, ctx.high, ctx.scale, learned
    inputs = q, k, v, table, q_level, k_level, key_vectors, value_vectors, pieces
    dq, dk, dv, *others = _attention_backward(grad, grad_lse, *inputs, out, lse, ends, *options)
    wanted = learned, q_level is not None, k_level is not None, key_vectors is not None, value_vectors is not None
    others = [x if wants else None for x, wants in zip(others, wanted, strict=True)]
    return dq, dk, dv, *others, None, None, None, None, None


_attention.register_autograd(_autograd_backward, setup_context=_setup_context)
