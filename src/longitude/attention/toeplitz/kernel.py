"""The fused CPU kernel of torch, which is private: called here and nowhere else, and looked at before it is trusted."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from longitude.attention.toeplitz.band import hankel

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, H, rows, D] and logsumexp [B, H, rows] of q [B, H, rows, D] against k, v [B, Hkv, keys, D].

    bias [..., H, rows, keys], any strided view, in float32 or wider; a row of nothing but -inf gives zeros, logsumexp too."""
    if q.shape[1] != k.shape[1] and not takes_grouped_heads():
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)


def highest(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The highest score of each query, [B, H, rows], in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * (q.to(wide) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
    return (scores if bias is None else scores + bias).amax(-1)


@functools.cache
def dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes in which this torch has the fused CPU kernel and it computes what we need: a strided view as bias, rows
    whose first keys are all forbidden. Looked at once, on first use, in milliseconds."""
    return tuple(dtype for dtype in DTYPES if is_there(dtype))


def is_there(dtype: torch.dtype) -> bool:
    try:
        return is_right(heads=2, kv_heads=2, dtype=dtype)
    except (AttributeError, RuntimeError, TypeError):
        return False


@functools.cache
def takes_grouped_heads() -> bool:
    """The kernel learned grouped heads in 2025 (pytorch#157893); before, it read past the end of k and v."""
    return is_right(heads=2, kv_heads=1, dtype=torch.float32)


def is_right(heads: int, kv_heads: int, dtype: torch.dtype) -> bool:
    rows, keys, dim = 3, 600, 4  # the kernel walks the keys 512 at a time: here row 0 sees nothing in its first walk
    wide = torch.promote_types(dtype, torch.float32)
    with torch.no_grad():
        x = torch.linspace(-2, 2, (keys + rows) * heads * dim, dtype=wide, device="cpu").sin().view(1, heads, -1, dim)
        x = x.to(dtype)
        q, kv = x[:, :, :rows], x[:, :kv_heads, rows:]  # slices of one tensor: a read past the end stays inside it
        n = torch.arange(rows + keys - 1, device="cpu")
        table = torch.where(n < 520, -math.inf, (n * 0.1).sin()).to(wide).expand(heads, -1).contiguous()
        bias = hankel(table, 0, rows, 0, keys)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, kv, kv, 0.0, False, attn_mask=bias[None], scale=0.5
        )
        q, kv = q.to(wide), kv.to(wide)
        scores = q @ kv.mT * 0.5 + bias
        near = 1e-5 if dtype == wide else 2e-2
        right = torch.allclose(out.to(wide), scores.softmax(-1) @ kv, rtol=near, atol=near)
        return right and torch.allclose(lse.to(wide), scores.logsumexp(-1), rtol=near, atol=near)
