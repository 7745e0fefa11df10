"""CUDA kernels of flash-linear-attention, if that package is installed: equal results, faster.

It is optional (pip install flash-linear-attention; Yang and Zhang 2024). Its layout is [batch, length, heads, dim], its states
[batch, heads, K, V] in float32. It has a kernel for decays by head (with a special case for constant decays), kernels for
RWKV-6 and RWKV-7, and kernels for the delta rule with decays by head and by channel.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

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
    q: Float[Tensor, "B G L K"],
    k: Float[Tensor, "B G L K"],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B|1 H L|1 K|1"],
    bonus: Float[Tensor, "H K"] | None,
    state: Float[Tensor, "B H K V"] | None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """`decayed` without resets, by a kernel."""
    batch, heads, length, _ = v.shape
    q, k = (x.repeat_interleave(heads // x.shape[1], 1).to(v.dtype) for x in (q, k))
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    constant = log_decay.shape[0] == log_decay.shape[2] == log_decay.shape[3] == 1
    options = {
        "scale": 1.0,
        "initial_state": None if state is None else state.float().contiguous(),
        "output_final_state": True,
    }
    if bonus is not None:
        chunk_rwkv6 = import_module("fla.ops.rwkv6").chunk_rwkv6
        w = log_decay.expand(batch, heads, length, q.shape[-1]).transpose(1, 2).contiguous()
        out, state = chunk_rwkv6(q, k, v, w.float(), bonus.float().contiguous(), **options)
    else:
        chunk_simple_gla = import_module("fla.ops.simple_gla").chunk_simple_gla
        if constant:
            decay = {"g_gamma": log_decay.flatten().float()}
        else:
            decay = {"g": log_decay.expand(batch, -1, length, 1).squeeze(-1).transpose(1, 2).float().contiguous()}
        out, state = chunk_simple_gla(q, k, v, **decay, **options)
    assert state is not None
    return out.transpose(1, 2), state


def delta_by_kernel(
    q: Float[Tensor, "B G L K"],
    k: Float[Tensor, "B G L K"],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B H L K|1"],
    beta: Float[Tensor, "B H L"],
    state: Float[Tensor, "B H K V"] | None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """`gated_delta_rule` without resets, by Gated DeltaNet's kernel, or Kimi Delta Attention's for decays by channel."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1).to(v.dtype) for x in (q, k))
    q, k, v, beta = (x.transpose(1, 2).contiguous() for x in (q, k, v, beta.float()))
    by_channel = log_decay.shape[-1] > 1
    if by_channel:
        rule = import_module("fla.ops.kda").chunk_kda
    else:
        rule, log_decay = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule, log_decay.squeeze(-1)
    decay = log_decay.transpose(1, 2).float().contiguous()
    first = None if state is None else state.float().contiguous()
    scale = q.shape[-1] ** -0.5
    out, state = rule(q, k, v, g=decay, beta=beta, scale=scale, initial_state=first, output_final_state=True)
    assert state is not None
    return out.transpose(1, 2), state


def rwkv7_by_kernel(
    r: Float[Tensor, "B H L K"],
    log_w: Float[Tensor, "B H L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    kappa: Float[Tensor, "B H L K"],
    removed: Float[Tensor, "B H L K"],
    state: Float[Tensor, "B H K V"] | None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """`rwkv7` with removed = a kappa and without resets, by a kernel. Its chunks of 16 tokens support any decay."""
    chunk_rwkv7 = import_module("fla.ops.rwkv7").chunk_rwkv7
    r, k, v, read, removed = (x.transpose(1, 2).to(v.dtype).contiguous() for x in (r, k, v, -kappa, removed))
    w, first = log_w.transpose(1, 2).float().contiguous(), None if state is None else state.float().contiguous()
    out, state = chunk_rwkv7(r, w, k, v, read, removed, scale=1.0, initial_state=first, output_final_state=True)
    assert state is not None
    return out.transpose(1, 2), state
