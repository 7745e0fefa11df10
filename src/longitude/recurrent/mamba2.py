"""Mamba-2 as a layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.mixer import register_mixer
from longitude.positions.base import Encoding, check_positive, check_sizes
from longitude.recurrent.base import RecurrentMixer, fill, require_mode, softplus, state_dtype
from longitude.recurrent.ops.linear import ssd
from longitude.recurrent.ops.short_conv import causal_conv


@register_mixer("mamba2")
class Mamba2(RecurrentMixer):
    """The block of Mamba-2 (Dao and Gu 2024, section 7), with the parameter names of its checkpoints:

        z, xBC, dt = x W_in;   x, B, C = silu(conv(xBC));   Delta = softplus(dt + dt_bias)
        y = ssd(Delta x, -Delta exp(A_log), B, C) + D x;   out = rmsnorm(y * silu(z)) W_out

    The inner width is expand dim, in heads of head_dim (64 where neither it nor a model says). state_size N: the size of B and
    C, which each of the groups has its own; norms are by group. conv_kernel: the taps of the depthwise causal convolution.
    mode, chunk_size: as ssd has them. The state is the last tokens before the convolution, and a matrix for each head.
    """

    undecayed = ("dt_bias", "A_log", "D")

    def __init__(
        self,
        dim: int,
        *,
        head_dim: int | None = None,
        expand: int = 2,
        state_size: int = 128,
        groups: int = 1,
        conv_kernel: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        mode: str = "chunked",
        chunk_size: int = 64,
    ):
        super().__init__()
        head_dim = 64 if head_dim is None else head_dim
        check_sizes("Mamba2", dim=dim, head_dim=head_dim, expand=expand, state_size=state_size, groups=groups)
        check_sizes("Mamba2", conv_kernel=conv_kernel)
        require_mode("Mamba2", mode, chunk_size)
        check_positive("Mamba2", norm_eps=norm_eps)
        inner = expand * dim
        if inner % head_dim or (inner // head_dim) % groups:
            raise ValueError(
                f"Mamba2: expected head_dim to divide expand dim = {inner} into heads, and groups to divide the heads, got "
                f"head_dim={head_dim} and groups={groups}"
            )
        self.dim, self.inner, self.num_heads, self.head_dim = dim, inner, inner // head_dim, head_dim
        self.state_size, self.groups, self.norm_eps = state_size, groups, norm_eps
        self.mode, self.chunk_size = mode, chunk_size
        mixed = inner + 2 * groups * state_size
        self.in_proj = nn.Linear(dim, inner + mixed + self.num_heads, bias=bias)
        self.conv1d = nn.Conv1d(mixed, mixed, conv_kernel, groups=mixed, bias=conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.norm = nn.RMSNorm(inner, eps=norm_eps)
        self.out_proj = nn.Linear(inner, dim, bias=bias)
        self.mark_undecayed()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As published: A in [1, 16], Delta log-uniform in [0.001, 0.1], D = 1."""
        fill(self.A_log, torch.empty_like(self.A_log, dtype=torch.float32).uniform_(1, 16).log())
        step = torch.empty_like(self.dt_bias, dtype=torch.float32).uniform_(math.log(1e-3), math.log(0.1)).exp()
        step = step.clamp(min=1e-4)
        fill(self.dt_bias, step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        nn.init.ones_(self.D)
        self.conv1d.reset_parameters()

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
        tail, matrix = (None, None) if state is None else state
        mixed = self.inner + 2 * self.groups * self.state_size
        z, xbc, dt = self.in_proj(x).split([self.inner, mixed, self.num_heads], -1)
        xbc, tail = causal_conv(xbc, self.conv1d.weight.squeeze(1), self.conv1d.bias, tail, reset, valid)
        tokens, B, C = F.silu(xbc).split([self.inner, *[self.groups * self.state_size] * 2], -1)
        exact = state_dtype(x)
        tokens, B, C = (
            y.unflatten(-1, (n, -1)).transpose(1, 2)
            for y, n in ((tokens, self.num_heads), (B, self.groups), (C, self.groups))
        )
        step = softplus(dt.to(exact) + self.dt_bias.to(exact)).transpose(1, 2)  # [B, H, L]
        log_decay = -step * self.A_log.to(exact).exp()[:, None]
        y, matrix = ssd(
            (tokens * step[..., None]).to(x.dtype),
            log_decay,
            B,
            C,
            mode=self.mode,
            chunk_size=self.chunk_size,
            state=matrix,
            reset=reset,
            valid=valid,
        )
        y = y.to(exact) + self.D.to(exact)[:, None, None] * tokens
        return self.out_proj(self.gated_norm(y.transpose(1, 2).flatten(2), z).to(x.dtype)), (tail, matrix)

    def gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        """rmsnorm(y * silu(z)), each group alone."""
        y = (y * F.silu(z.to(y.dtype))).unflatten(-1, (self.groups, -1))
        y = F.rms_norm(y, (y.shape[-1],), eps=self.norm_eps).flatten(-2)
        return y * self.norm.weight.to(y.dtype)
