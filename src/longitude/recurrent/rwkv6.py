"""RWKV-6 as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.mixer import register_mixer
from longitude.attention.zero_gradients import with_zero_gradients
from longitude.positions.base import Encoding, check_positive, check_sizes
from longitude.recurrent.base import RecurrentMixer, fill, require_mode, state_dtype
from longitude.recurrent.ops.linear import rwkv6
from longitude.recurrent.ops.short_conv import previous


@register_mixer("rwkv6")
class RWKV6(RecurrentMixer):
    """The time mixing of RWKV-6 (Finch, Peng et al. 2024, section 4), as in the authors' code:

        d_t = x_{t-1} - x_t
        x_j = x + d * (mu_j + tanh((x + d * mu_x) A_j) B_j)                       j = w, k, v, r, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v;   log w = -exp(w_0 + tanh(x_w A) B);   g = silu(x_g W_g)
        out = (g * groupnorm(rwkv6(r, k, v, log w, u))) W_o

    mix_rank, decay_rank: the inner sizes of A_j B_j and A B. mode, chunk_size: as rwkv6 has
    them. The state is the last token and a matrix for each head. What
    follows the layer's depth at the start of training in the authors' code is that of the middle layer here.
    """

    undecayed = ("mix_x", "mix_by", "decay", "bonus")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        mix_rank: int = 32,
        decay_rank: int = 64,
        norm_eps: float = 64e-5,
        mode: str = "chunked",
        chunk_size: int = 64,
    ):
        super().__init__()
        check_sizes("RWKV6", dim=dim, num_heads=num_heads, mix_rank=mix_rank, decay_rank=decay_rank)
        require_mode("RWKV6", mode, chunk_size)
        if head_dim is None and dim % num_heads:
            raise ValueError(f"expected num_heads to divide dim, got {num_heads} and {dim}; or say head_dim")
        head_dim = dim // num_heads if head_dim is None else head_dim
        check_sizes("RWKV6", head_dim=head_dim)
        check_positive("RWKV6", norm_eps=norm_eps)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        self.mix_rank, self.mode, self.chunk_size = mix_rank, mode, chunk_size
        wide = num_heads * head_dim
        self.mix_x = nn.Parameter(torch.empty(dim))
        self.mix_by = nn.Parameter(torch.empty(5, dim))  # w, k, v, r, g
        self.mix_down = nn.Parameter(torch.empty(dim, 5 * mix_rank))
        self.mix_up = nn.Parameter(torch.empty(5, mix_rank, dim))
        self.decay = nn.Parameter(torch.empty(wide))
        self.decay_down = nn.Parameter(torch.empty(dim, decay_rank))
        self.decay_up = nn.Parameter(torch.empty(decay_rank, wide))
        self.bonus = nn.Parameter(torch.empty(num_heads, head_dim))
        self.r_proj = nn.Linear(dim, wide, bias=False)
        self.k_proj = nn.Linear(dim, wide, bias=False)
        self.v_proj = nn.Linear(dim, wide, bias=False)
        self.g_proj = nn.Linear(dim, wide, bias=False)
        self.norm = nn.GroupNorm(num_heads, wide, eps=norm_eps)
        self.o_proj = nn.Linear(wide, dim, bias=False)
        self.mark_undecayed()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' initial values: slow and fast channels from the first to the last, no dependence on the data."""
        depth = 0.5
        device, exact = self.decay.device, torch.float32
        channel = torch.arange(self.dim, dtype=exact, device=device) / self.dim
        mix = 1 - channel ** (1 - depth)
        fill(self.mix_x, mix)
        fill(self.mix_by, torch.stack([mix, mix, mix - 0.3 * depth, *[1 - channel ** (0.5 * (1 - depth))] * 2]))
        nn.init.zeros_(self.mix_down)
        nn.init.uniform_(self.mix_up, -0.01, 0.01)
        place = torch.linspace(0, 1, self.decay.numel(), dtype=exact, device=device)
        fill(self.decay, -6 + 5 * place ** (0.7 + 1.3 * depth))
        nn.init.zeros_(self.decay_down)
        nn.init.uniform_(self.decay_up, -0.01, 0.01)
        zigzag = 0.1 * ((torch.arange(self.decay.numel(), device=device) + 1) % 3 - 1)
        fill(self.bonus, (depth * (1 - place) + zigzag).view_as(self.bonus))
        self.norm.reset_parameters()

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
        before, tail = previous(x, tail, reset, valid)
        shift = before - x
        inner = torch.tanh((x + shift * self.mix_x) @ self.mix_down).unflatten(-1, (5, self.mix_rank))
        by = self.mix_by + torch.einsum("bljr,jrd->bljd", inner, self.mix_up)
        to_w, to_k, to_v, to_r, to_g = (x[:, :, None] + shift[:, :, None] * by).unbind(2)

        exact = state_dtype(x)
        moved = torch.tanh(to_w @ self.decay_down) @ self.decay_up
        log_w = -(self.decay.to(exact) + moved.to(exact)).exp()
        r, k, v = self.r_proj(to_r), self.k_proj(to_k), self.v_proj(to_v)
        heads = *x.shape[:2], self.num_heads, self.head_dim
        r, k, v, log_w = (y.view(heads).transpose(1, 2) for y in (r, k, v, log_w))
        out, matrix = rwkv6(
            r,
            k,
            v,
            log_w,
            self.bonus,
            mode=self.mode,
            chunk_size=self.chunk_size,
            state=matrix,
            reset=reset,
            valid=valid,
        )
        # One token has nothing behind it to decay.
        out = with_zero_gradients(out, (self.decay, self.decay_down, self.decay_up))
        out = self.norm(out.transpose(1, 2).flatten(2).flatten(0, 1)).view(*x.shape[:2], -1)
        return self.o_proj(F.silu(self.g_proj(to_g)) * out), (tail, matrix)
