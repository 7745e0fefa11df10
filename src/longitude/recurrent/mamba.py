"""Mamba as a layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.mixer import register_mixer
from longitude.positions.base import Encoding, check_sizes
from longitude.recurrent.base import RecurrentMixer, fill, require_mode
from longitude.recurrent.ops.selective_scan import selective_scan
from longitude.recurrent.ops.short_conv import causal_conv


@register_mixer("mamba")
class Mamba(RecurrentMixer):
    """The block of Mamba (Gu and Dao 2023, section 3.4), with the parameter names of its checkpoints:

        x, z = x W_in;   x = silu(conv(x));   dt, B, C = x W_x;   Delta = softplus(dt W_dt + b_dt)
        out = (selective_scan(x, Delta, -exp(A_log), B, C) + D x) * silu(z) W_out

    The inner width is expand dim. state_size N: the numbers that each channel carries; dt_rank: the width of dt, dim / 16 rounded
    up where not said; conv_kernel: the taps of the depthwise causal convolution; mode, chunk_size: as selective_scan has them.
    The state is the last tokens before the convolution, [B, conv_kernel - 1, expand dim], and [B, expand dim, N].
    """

    undecayed = ("A_log", "D", "dt_proj.bias")

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        state_size: int = 16,
        conv_kernel: int = 4,
        dt_rank: int | None = None,
        conv_bias: bool = True,
        bias: bool = False,
        mode: str = "chunked",
        chunk_size: int = 32,
    ):
        super().__init__()
        check_sizes("Mamba", dim=dim, expand=expand, state_size=state_size, conv_kernel=conv_kernel)
        require_mode("Mamba", mode, chunk_size)
        dt_rank = -(-dim // 16) if dt_rank is None else dt_rank
        check_sizes("Mamba", dt_rank=dt_rank)
        self.dim, self.inner, self.state_size, self.dt_rank = dim, expand * dim, state_size, dt_rank
        self.mode, self.chunk_size = mode, chunk_size
        self.in_proj = nn.Linear(dim, 2 * self.inner, bias=bias)
        self.conv1d = nn.Conv1d(self.inner, self.inner, conv_kernel, groups=self.inner, bias=conv_bias)
        self.x_proj = nn.Linear(self.inner, dt_rank + 2 * state_size, bias=False)
        self.dt_proj = nn.Linear(dt_rank, self.inner)
        self.A_log = nn.Parameter(torch.empty(self.inner, state_size))
        self.D = nn.Parameter(torch.empty(self.inner))
        self.out_proj = nn.Linear(self.inner, dim, bias=bias)
        self.mark_undecayed()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As published: A_n = -n, Delta log-uniform in [0.001, 0.1] whatever the token, D = 1."""
        self.conv1d.reset_parameters()
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        step = torch.empty_like(self.dt_proj.bias, dtype=torch.float32).uniform_(math.log(1e-3), math.log(0.1)).exp()
        step = step.clamp(min=1e-4)
        fill(self.dt_proj.bias, step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        n = torch.arange(1, self.state_size + 1, dtype=torch.float32, device=self.A_log.device)
        fill(self.A_log, n.log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    def mix(
        self,
        x: Tensor,
        state: Any,
        reset: Tensor | None,
        valid: Tensor | None,
        positions: Tensor,
        encoding: Encoding,
        tables: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tail, h = (None, None) if state is None else state
        tokens, z = self.in_proj(x).chunk(2, -1)
        tokens, tail = causal_conv(tokens, self.conv1d.weight.squeeze(1), self.conv1d.bias, tail, reset, valid)
        tokens = F.silu(tokens)
        dt, B, C = self.x_proj(tokens).split([self.dt_rank, self.state_size, self.state_size], -1)
        y, h = selective_scan(
            tokens.mT,
            F.linear(dt, self.dt_proj.weight).mT,
            -self.A_log.to(torch.promote_types(x.dtype, torch.float32)).exp(),
            B.mT,
            C.mT,
            self.D,
            z.mT,
            self.dt_proj.bias,
            delta_softplus=True,
            mode=self.mode,
            chunk_size=self.chunk_size,
            state=h,
            reset=reset,
            valid=valid,
        )
        return self.out_proj(y.mT), (tail, h)
