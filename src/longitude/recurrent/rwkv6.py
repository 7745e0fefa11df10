"""RWKV-6 (Finch): a matrix state that each token decays, each channel at a rate of its own."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.heads import head_sizes, join_heads, split_heads
from longitude.attention.mixer import register_mixer
from longitude.attention.state_mixer import StateInputs
from longitude.attention.zero_gradients import with_zero_gradients
from longitude.errors import check_positive, check_sizes
from longitude.recurrent.base import RecurrentMixer, fill, group_norm
from longitude.recurrent.ops.checks import require_tokens, state_dtype
from longitude.recurrent.ops.decayed import decayed
from longitude.recurrent.ops.short_conv import previous


def rwkv6(
    r: Float[Tensor, "B H L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    log_w: Float[Tensor, "B H L K"],
    u: Float[Tensor, "H K"],
    *,
    mode: str = "chunked",
    chunk_size: int = 64,
    state: Float[Tensor, "B H K V"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """The time mixing of RWKV-6: linear attention whose state decays per channel and token.

        y_t = r_t (S_{t-1} + diag(u) k_t^T v_t),    S_t = diag(exp(log_w_t)) S_{t-1} + k_t^T v_t

    Args:
        r: [B, H, L, K].
        k: [B, H, L, K].
        v: [B, H, L, V].
        log_w: logarithm of each channel's decay at each token, at most 0, [B, H, L, K].
        u: weight of a token's own key, by channel, [H, K].
        mode: as in `retention`.
        chunk_size: as in `retention`.
        state: as in `retention`.
        reset: as in `retention`.
        valid: as in `retention`.

    Returns:
        The outputs [B, H, L, V] in v's dtype, and the state after the last token [B, H, K, V], float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Peng et al. 2024, section 4, arXiv 2404.05892, https://arxiv.org/abs/2404.05892
    """
    require_tokens(
        "rwkv6", r=(r, "B H L K"), k=(k, "B H L K"), v=(v, "B H L V"), log_w=(log_w, "B H L K"), u=(u, "H K")
    )
    return decayed(
        "rwkv6", r, k, v, log_w, bonus=u, mode=mode, chunk_size=chunk_size, state=state, reset=reset, valid=valid
    )


@register_mixer("rwkv6")
class RWKV6(RecurrentMixer):
    """The time mixing of RWKV-6, as in the authors' code.

        d_t = x_{t-1} - x_t
        x_j = x + d * (mu_j + tanh((x + d * mu_x) A_j) B_j)                       j = w, k, v, r, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v;   log w = -exp(w_0 + tanh(x_w A) B);   g = silu(x_g W_g)
        out = (g * groupnorm(rwkv6(r, k, v, log w, u))) W_o

    The state is the last token and a matrix for each head. Where the authors' initial values depend on the layer's depth,
    those of the middle layer are used.

    Args:
        dim: width of x and of the output.
        num_heads: heads.
        head_dim: width of a head; None: dim / num_heads.
        mix_rank: inner size of A_j B_j.
        decay_rank: inner size of A B.
        norm_eps: epsilon of the norm.
        mode, chunk_size: as in `rwkv6`.

    Raises:
        ValueError: for sizes that do not fit.

    Source:
        Peng et al. 2024, section 4, arXiv 2404.05892, https://arxiv.org/abs/2404.05892
    """

    source = "Peng et al. 2024"
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
        _, head_dim = head_sizes("RWKV6", dim, num_heads, head_dim=head_dim)
        check_sizes("RWKV6", mix_rank=mix_rank, decay_rank=decay_rank)
        check_positive("RWKV6", norm_eps=norm_eps)
        self.set_mode(mode, chunk_size)
        self.dim, self.num_heads, self.head_dim, self.mix_rank = dim, num_heads, head_dim, mix_rank
        wide = num_heads * head_dim
        self.mix_x = nn.Parameter(torch.empty(dim))
        self.mix_by = nn.Parameter(torch.empty(5, dim))  # w, k, v, r, g
        self.mix_down = nn.Parameter(torch.empty(dim, 5 * mix_rank))
        self.mix_up = nn.Parameter(torch.empty(5, mix_rank, dim))
        self.decay = nn.Parameter(torch.empty(wide))
        self.decay_down = nn.Parameter(torch.empty(dim, decay_rank))
        self.decay_up = nn.Parameter(torch.empty(decay_rank, wide))
        self.bonus = nn.Parameter(torch.empty(num_heads, head_dim))
        self.r_proj, self.k_proj, self.v_proj, self.g_proj = (nn.Linear(dim, wide, bias=False) for _ in range(4))
        self.norm = nn.GroupNorm(num_heads, wide, eps=norm_eps)
        self.o_proj = nn.Linear(wide, dim, bias=False)
        self.mark_undecayed()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' initial values: slow and fast channels from the first to the last, no dependence on the data."""
        depth, exact, device = 0.5, torch.float32, self.decay.device
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

    def products(self, keys: float) -> float:
        return 2 * self.num_heads * self.head_dim**2 + sum(
            p.numel() for p in (self.mix_down, self.mix_up, self.decay_down, self.decay_up)
        )

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        last, matrix = (None, None) if state is None else state
        before, last = previous(x, last, inputs.reset, inputs.valid)
        shift = before - x
        inner = torch.tanh((x + shift * self.mix_x) @ self.mix_down).unflatten(-1, (5, self.mix_rank))
        by = self.mix_by + torch.einsum("bljr,jrd->bljd", inner, self.mix_up)
        to_w, to_k, to_v, to_r, to_g = (x[:, :, None] + shift[:, :, None] * by).unbind(2)

        exact = state_dtype(x)
        change = torch.tanh(to_w @ self.decay_down) @ self.decay_up
        log_w = -(self.decay.to(exact) + change.to(exact)).exp()
        projected = self.r_proj(to_r), self.k_proj(to_k), self.v_proj(to_v), log_w
        r, k, v, log_w = (split_heads(y, self.num_heads) for y in projected)
        out, matrix = rwkv6(r, k, v, log_w, self.bonus, state=matrix, **self.options(inputs))
        # A single token decays nothing.
        out = with_zero_gradients(out, (self.decay, self.decay_down, self.decay_up))
        out = group_norm(self.norm, join_heads(out).flatten(0, 1)).view(*x.shape[:2], -1)
        return self.o_proj(F.silu(self.g_proj(to_g)) * out), (last, matrix)
