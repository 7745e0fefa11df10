"""Mamba-2: a matrix state that each head decays at a rate computed from the token (SSD), in its published block."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.heads import join_heads, split_heads
from longitude.attention.mixer import register_mixer
from longitude.attention.short_conv import convolved
from longitude.attention.state_mixer import StateInputs
from longitude.errors import Positive, UsageError
from longitude.recurrent.base import RecurrentMixer, WideRMSNorm, fill, fill_step_bias, softplus
from longitude.recurrent.ops.checks import Form, Running, require_tokens, state_dtype
from longitude.recurrent.ops.decayed import decayed


def ssd(
    x: Float[Tensor, "B H L P"],
    log_decay: Float[Tensor, "B H L"],
    B: Float[Tensor, "B G L N"],
    C: Float[Tensor, "B G L N"],
    *,
    state: Float[Tensor, "B H N P"] | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B H L P"], Float[Tensor, "B H N P"]]:
    """The state space dual of Mamba-2: linear attention with a decay per head and token.

        h_t = exp(log_decay_t) h_{t-1} + B_t^T x_t,    y_t = C_t h_t

    Args:
        x: the tokens times their step Delta, [B, H, L, P].
        log_decay: Delta A, at most 0, [B, H, L].
        B: [B, G, L, N]; each of the G groups serves H / G adjacent heads.
        C: [B, G, L, N].
        state: as in `retention`, [B, H, N, P].
        run: mode, chunk_size, reset and valid, as in `retention`.

    Returns:
        The outputs [B, H, L, P] in x's dtype, and the state after the last token [B, H, N, P], float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Dao and Gu 2024, sections 3 and 6, arXiv 2405.21060, https://arxiv.org/abs/2405.21060
    """
    require_tokens("ssd", x=(x, "B H L P"), log_decay=(log_decay, "B H L"), B=(B, "B G L N"), C=(C, "B G L N"))
    if x.shape[1] % B.shape[1]:
        raise UsageError("ssd", "the groups of B and C to divide the heads of x", f"{B.shape[1]} and {x.shape[1]}")
    return decayed("ssd", C, B, x, log_decay[..., None], state=state, **run)


@register_mixer("mamba2")
class Mamba2(RecurrentMixer):
    """Mamba-2, a decay per head: the block, with the parameter names of its checkpoints.

        z, xBC, dt = x W_in;   x, B, C = silu(conv(xBC));   Delta = softplus(dt + dt_bias)
        y = ssd(Delta x, -Delta exp(A_log), B, C) + D x;   out = rmsnorm(y * silu(z)) W_out

    The state is the last inputs of the convolution, and a matrix for each head.

    Args:
        dim: width of x and of the output.
        head_dim: width of a head; None: 64, or what a model passes.
        expand: the inner width is expand * dim.
        state_size: size N of B and C.
        groups: number of groups of heads; each has its own B, C and norm.
        conv_kernel: size of the depthwise causal convolution in tokens.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        norm_eps: epsilon of the norm.
        mode, chunk_size: as in `ssd`.

    Raises:
        ValueError: for sizes that do not fit.

    Source:
        Dao and Gu 2024, section 7, arXiv 2405.21060, https://arxiv.org/abs/2405.21060
    """

    source = "Dao and Gu 2024"
    any_length = True
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
        norm_eps: Positive = 1e-5,
        **form: Unpack[Form],
    ):
        super().__init__(**form)
        who, head_dim = "Mamba2", 64 if head_dim is None else head_dim
        inner = expand * dim
        if inner % head_dim or (inner // head_dim) % groups:
            expected = f"head_dim to divide expand dim = {inner} into heads, and groups to divide the heads"
            raise UsageError(who, expected, f"head_dim={head_dim} and groups={groups}")
        self.dim, self.inner, self.num_heads, self.head_dim = dim, inner, inner // head_dim, head_dim
        self.state_size, self.groups, self.norm_eps = state_size, groups, norm_eps
        mixed = inner + 2 * groups * state_size
        self.in_proj = nn.Linear(dim, inner + mixed + self.num_heads, bias=bias)
        self.conv1d = nn.Conv1d(mixed, mixed, conv_kernel, groups=mixed, bias=conv_bias)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(self.num_heads)) for _ in range(3))
        self.norm = WideRMSNorm(inner, norm_eps, groups)
        self.out_proj = nn.Linear(inner, dim, bias=bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as published: A in [1, 16], Delta log-uniform in [0.001, 0.1], D = 1."""
        fill(self.A_log, torch.empty_like(self.A_log, dtype=torch.float32).uniform_(1, 16).log())
        fill_step_bias(self.dt_bias)
        nn.init.ones_(self.D)
        self.conv1d.reset_parameters()

    def products(self, keys: float) -> float:
        return 2 * self.inner * self.state_size

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor, Any]]:
        tail, matrix = (None, None) if state is None else state
        of_groups = self.groups * self.state_size
        z, xbc, dt = self.in_proj(x).split([self.inner, self.inner + 2 * of_groups, self.num_heads], -1)
        xbc, tail = convolved(self.conv1d, xbc, tail, inputs.reset, inputs.valid)
        tokens, B, C = F.silu(xbc).split([self.inner, of_groups, of_groups], -1)
        tokens, B, C = split_heads(tokens, self.num_heads), split_heads(B, self.groups), split_heads(C, self.groups)
        exact = state_dtype(x)
        step = softplus(dt.to(exact) + self.dt_bias.to(exact)).transpose(1, 2)  # [B, H, L]
        log_decay = -step * self.A_log.to(exact).exp()[:, None]
        delta_x = (tokens * step[..., None]).to(x.dtype)
        y, matrix = ssd(delta_x, log_decay, B, C, state=matrix, **self.options(inputs))
        y = y.to(exact) + self.D.to(exact)[:, None, None] * tokens
        y = self.norm(join_heads(y) * F.silu(z.to(exact)))
        return self.out_proj(y.to(x.dtype)), (tail, matrix)
