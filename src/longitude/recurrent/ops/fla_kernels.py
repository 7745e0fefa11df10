"""CUDA kernels of flash-linear-attention, if that package is installed: equal results, faster.

It is optional (pip install flash-linear-attention; Yang and Zhang 2024). Its layout is [batch, length, heads, dim], its states
[batch, heads, K, V] in float32. It has a kernel for decays by head (with a special case for constant decays), kernels for
RWKV-6 and RWKV-7, and kernels for the delta rule with decays by head and by channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.native.not_finite import of_tokens

MAX_KEY_DIM = 256


@lru_cache(maxsize=1)
def installed() -> bool:
    """Whether the package and Triton, which it needs, are installed."""
    return find_spec("fla") is not None and find_spec("triton") is not None


def serve(q: Tensor, v: Tensor, mode: str, reset: Tensor | None) -> bool:
    """Whether a kernel replaces the chunked form for queries q and values v.

    It does not if tokens begin documents (a decay of 0 has no logarithm), or for odd dimensions or key dimensions above 256.
    Nor does it with torch.use_deterministic_algorithms, which the kernels do not guarantee for gradients, or for float64. It
    does for float32 only if torch's products may be TF32 too (torch.set_float32_matmul_precision), because the kernels use
    TF32.
    """
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if not v.is_cuda or mode != "chunked" or reset is not None or v.shape[2] == 1 or not installed():
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    if key_dim > MAX_KEY_DIM or key_dim % 2 or value_dim % 2:
        return False
    narrow = v.dtype in (torch.bfloat16, torch.float16)
    return narrow or (v.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest")


def decayed_by_kernel(
    bonus: Float[Tensor, "H K"] | None,
    queries: Sequence[Float[Tensor, "B G L K"]],
    keys: Sequence[Float[Tensor, "B G L K"]],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B|1 H L|1 K|1"],
    state: Float[Tensor, "B H K V"] | None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """`decayed` without resets, by a kernel."""
    (q,), (k,), (batch, heads, length, _) = queries, keys, v.shape
    q, k = (x.repeat_interleave(heads // x.shape[1], 1).to(v.dtype) for x in (q, k))
    if bonus is not None:
        rwkv6, w = import_module("fla.ops.rwkv6").chunk_rwkv6, log_decay.expand(batch, heads, length, q.shape[-1])
        return _called(rwkv6, state, 1.0, q, k, v, w.float(), u=bonus.float().contiguous())
    if log_decay.shape[0] == log_decay.shape[2] == log_decay.shape[3] == 1:
        decay = {"g_gamma": log_decay.flatten().float()}
    else:
        decay = {"g": log_decay.expand(batch, -1, length, 1).squeeze(-1).transpose(1, 2).float().contiguous()}
    return _called(import_module("fla.ops.simple_gla").chunk_simple_gla, state, 1.0, q, k, v, **decay)


def delta_by_kernel(
    tokens: Sequence[Tensor],
    valid: Bool[Tensor, "B L"] | None,
    _queries: Sequence[Tensor],
    _keys: Sequence[Tensor],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B H L K|1"],
    state: Float[Tensor, "B H K V"] | None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """`gated_delta_rule` without resets, by Gated DeltaNet's kernel, or Kimi Delta Attention's for decays by channel.

    tokens: q, k [B, G, L, K] and beta [B, H, L], which the kernels multiply themselves.
    """
    q, k, beta = (x if valid is None else x.where(of_tokens(valid, x, 2), 0) for x in tokens)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1).to(v.dtype) for x in (q, k))
    if log_decay.shape[-1] > 1:
        rule = import_module("fla.ops.kda").chunk_kda
    else:
        rule, log_decay = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule, log_decay.squeeze(-1)
    g, beta = (x.transpose(1, 2).float().contiguous() for x in (log_decay, beta))
    return _called(rule, state, q.shape[-1] ** -0.5, q, k, v, g=g, beta=beta)


def rwkv7_by_kernel(
    queries: Sequence[Float[Tensor, "B H L K"]],
    keys: Sequence[Float[Tensor, "B H L K"]],
    v: Float[Tensor, "B H L V"],
    log_w: Float[Tensor, "B H L K"],
    state: Float[Tensor, "B H K V"] | None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """`rwkv7` without resets, by a kernel. Its chunks of 16 tokens support any decay.

    queries: r and kappa. keys: k, and a kappa, by which keys are removed.
    """
    (r, kappa), (k, removed) = queries, keys
    r, k, read, removed = (x.to(v.dtype) for x in (r, k, -kappa, removed))
    rwkv7 = import_module("fla.ops.rwkv7").chunk_rwkv7
    return _called(rwkv7, state, 1.0, r, log_w.float(), k, v, read, removed)


def _called(
    kernel: Callable[..., Any], state: Tensor | None, scale: float, *tokens: Tensor, **options: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and the state after, of tokens [B, H, L, dim] in the kernel's layout."""
    laid = (x.transpose(1, 2).contiguous() for x in tokens)
    first = None if state is None else state.float().contiguous()
    out, after = kernel(*laid, scale=scale, initial_state=first, output_final_state=True, **options)
    return out.transpose(1, 2), after
