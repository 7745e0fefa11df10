"""Retention as a layer."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.mixer import register_mixer
from longitude.positions.base import Encoding, check_positive, check_sizes, wide
from longitude.positions.rotation import RotaryTable, apply_rotary
from longitude.recurrent.base import RecurrentMixer, require_mode, state_dtype
from longitude.recurrent.ops.linear import retention


@register_mixer("retention")
class Retention(RecurrentMixer):
    """Multi-scale retention (RetNet, Sun et al. 2023, section 2.4):

        out = (swish(x W_G) * norm(retention(q, k, v))) W_O

    Queries and keys of head_dim are turned by their position, as the authors' code has it: neighbouring pairs, angles
    n 10000^(-i/(pairs - 1)), no magnitudes; keys are scaled by head_dim^-1/2. Values have expand_v as many dimensions. Each
    head's output is divided by its root mean square, without weights. gamma_h = 1 - 2^(-5-h). mode, chunk_size: as retention has
    them.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        expand_v: int = 2,
        norm_eps: float = 1e-6,
        bias: bool = False,
        mode: str = "chunked",
        chunk_size: int = 64,
    ):
        super().__init__()
        check_sizes("Retention", dim=dim, num_heads=num_heads, expand_v=expand_v)
        require_mode("Retention", mode, chunk_size)
        if head_dim is None and dim % num_heads:
            raise ValueError(f"expected num_heads to divide dim, got {num_heads} and {dim}; or say head_dim")
        head_dim = dim // num_heads if head_dim is None else head_dim
        check_sizes("Retention", head_dim=head_dim)
        if head_dim % 2:
            raise ValueError(f"Retention: expected an even head_dim, for it turns pairs, got {head_dim}")
        check_positive("Retention", norm_eps=norm_eps)
        self.dim, self.num_heads, self.head_dim, self.value_dim = dim, num_heads, head_dim, expand_v * head_dim
        self.norm_eps, self.mode, self.chunk_size = norm_eps, mode, chunk_size
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, num_heads * self.value_dim, bias=bias)
        self.g_proj = nn.Linear(dim, num_heads * self.value_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.value_dim, dim, bias=bias)

    def mix(
        self,
        x: Tensor,
        state: Any,
        reset: Tensor | None,
        valid: Tensor | None,
        positions: Tensor,
        encoding: Encoding,
        tables: Any,
    ) -> tuple[Tensor, tuple[Tensor]]:
        heads = *x.shape[:2], self.num_heads, -1
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        turn = turn_at(positions, self.head_dim, state_dtype(x))
        q, k = apply_rotary(q, turn, "interleaved"), apply_rotary(k * self.head_dim**-0.5, turn, "interleaved")
        out, after = retention(
            q,
            k,
            v,
            mode=self.mode,
            chunk_size=self.chunk_size,
            state=None if state is None else state[0],
            reset=reset,
            valid=valid,
        )
        out = F.rms_norm(out.to(state_dtype(out)), (self.value_dim,), eps=self.norm_eps).to(out.dtype)
        out = out.transpose(1, 2).flatten(2)
        return self.o_proj(F.silu(self.g_proj(x)) * out), (after,)


def turn_at(positions: Int[Tensor, "*B L"], head_dim: int, dtype: torch.dtype) -> RotaryTable:
    """N 10000^(-linspace(0, 1, pairs)): unlike rope's, the slowest pair reaches 1/10000 itself."""
    if positions.dim() > 2:
        raise ValueError(f"Retention measures one axis: expected positions [L] or [B, L], got {list(positions.shape)}")
    exact = wide(positions.device)
    slow = torch.linspace(0, 1, head_dim // 2, dtype=exact, device=positions.device)
    angles = positions.to(exact)[..., None] * 10_000.0**-slow
    angles = angles[:, None] if angles.dim() == 3 else angles
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))
