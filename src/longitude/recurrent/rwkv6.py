"""RWKV-6 (Finch): a matrix state with a decay per channel and token."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.heads import head_sizes, join_heads, split_heads
from longitude.attention.mixer import register_mixer
from longitude.attention.short_conv import previous
from longitude.attention.state_mixer import StateInputs
from longitude.errors import Positive
from longitude.recurrent.base import RecurrentMixer, fill, group_norm
from longitude.recurrent.ops.checks import Form, Running, require_tokens, state_dtype
from longitude.recurrent.ops.decayed import decayed


def rwkv6(
    r: Float[Tensor, "B H L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    log_w: Float[Tensor, "B H L K"],
    u: Float[Tensor, "H K"],
    *,
    state: Float[Tensor, "B H K V"] | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """The time mixing of RWKV-6: linear attention with a decay per channel and token.

        y_t = r_t (S_{t-1} + diag(u) k_t^T v_t),    S_t = diag(exp(log_w_t)) S_{t-1} + k_t^T v_t

    Args:
        r: [B, H, L, K].
        k: [B, H, L, K].
        v: [B, H, L, V].
        log_w: logarithm of each channel's decay at each token, at most 0, [B, H, L, K].
        u: weight of a token's own key, by channel, [H, K].
        state: as in `retention`.
        run: mode, chunk_size, reset and valid, as in `retention`.

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
    return decayed("rwkv6", r, k, v, log_w, bonus=u, state=state, **run)


MIXED = "wkvrg"
"""Letters of the token-shift mixes, in the authors' parameter names: decay, key, value, receptance and gate."""


@register_mixer("rwkv6")
class RWKV6(RecurrentMixer):
    """RWKV-6's time mixing: the layer, with the parameter names of its checkpoints.

        d_t = x_{t-1} - x_t
        x_j = x + d * (mu_j + tanh((x + d * mu_x) A_j) B_j)                       j = w, k, v, r, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v;   log w = -exp(w_0 + tanh(x_w A) B);   g = silu(x_g W_g)
        out = (g * groupnorm(rwkv6(r, k, v, log w, u))) W_o

    The state is the last token and a matrix for each head. Initial values that depend on the layer's depth in the authors' code
    are those of the middle layer.

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
    undecayed = ("time_maa_x", *(f"time_maa_{name}" for name in MIXED), "time_decay", "time_faaaa")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        mix_rank: int = 32,
        decay_rank: int = 64,
        norm_eps: Positive = 64e-5,
        **form: Unpack[Form],
    ):
        super().__init__(**form)
        _, head_dim = head_sizes("RWKV6", dim, num_heads, head_dim=head_dim)
        self.dim, self.num_heads, self.head_dim, self.mix_rank = dim, num_heads, head_dim, mix_rank
        wide = num_heads * head_dim
        # All names and shapes are those of the authors' checkpoints.
        self.time_maa_x = nn.Parameter(torch.empty(1, 1, dim))
        for name in MIXED:
            setattr(self, f"time_maa_{name}", nn.Parameter(torch.empty(1, 1, dim)))
        self.time_maa_w1 = nn.Parameter(torch.empty(dim, 5 * mix_rank))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, mix_rank, dim))
        self.time_decay = nn.Parameter(torch.empty(1, 1, wide))
        self.time_decay_w1 = nn.Parameter(torch.empty(dim, decay_rank))
        self.time_decay_w2 = nn.Parameter(torch.empty(decay_rank, wide))
        self.time_faaaa = nn.Parameter(torch.empty(num_heads, head_dim))
        self.receptance, self.key, self.value, self.gate = (nn.Linear(dim, wide, bias=False) for _ in range(4))
        self.ln_x = nn.GroupNorm(num_heads, wide, eps=norm_eps)
        self.output = nn.Linear(wide, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as the authors do: decay increases from the first channel to the last, and does not depend on tokens."""
        depth, exact, device = 0.5, torch.float32, self.time_decay.device
        channel = torch.arange(self.dim, dtype=exact, device=device) / self.dim
        mix = 1 - channel ** (1 - depth)
        half = 1 - channel ** (0.5 * (1 - depth))
        values = {"x": mix, "w": mix, "k": mix, "v": mix - 0.3 * depth, "r": half, "g": half}
        for name, value in values.items():
            fill(self.get_parameter(f"time_maa_{name}"), value)
        nn.init.zeros_(self.time_maa_w1)
        nn.init.uniform_(self.time_maa_w2, -0.01, 0.01)
        place = torch.linspace(0, 1, self.time_decay.numel(), dtype=exact, device=device)
        fill(self.time_decay, -6 + 5 * place ** (0.7 + 1.3 * depth))
        nn.init.zeros_(self.time_decay_w1)
        nn.init.uniform_(self.time_decay_w2, -0.01, 0.01)
        zigzag = 0.1 * ((torch.arange(len(place), device=device) + 1) % 3 - 1)
        fill(self.time_faaaa, (depth * (1 - place) + zigzag).view_as(self.time_faaaa))
        self.ln_x.reset_parameters()

    def products(self, keys: float) -> float:
        return 2 * self.num_heads * self.head_dim**2 + sum(
            p.numel() for p in (self.time_maa_w1, self.time_maa_w2, self.time_decay_w1, self.time_decay_w2)
        )

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        last, matrix = (None, None) if state is None else state
        before, last = previous(x, last, inputs.reset, inputs.valid)
        shift = before - x
        inner = torch.tanh((x + shift * self.time_maa_x) @ self.time_maa_w1).unflatten(-1, (5, self.mix_rank))
        by = torch.cat([getattr(self, f"time_maa_{name}") for name in MIXED], 1)
        by = by + torch.einsum("bljr,jrd->bljd", inner, self.time_maa_w2)
        to_w, to_k, to_v, to_r, to_g = (x[:, :, None] + shift[:, :, None] * by).unbind(2)

        exact = state_dtype(x)
        change = torch.tanh(to_w @ self.time_decay_w1) @ self.time_decay_w2
        log_w = -(self.time_decay.to(exact) + change.to(exact)).exp()
        projected = self.receptance(to_r), self.key(to_k), self.value(to_v), log_w
        r, k, v, log_w = (split_heads(y, self.num_heads) for y in projected)
        out, matrix = rwkv6(r, k, v, log_w, self.time_faaaa, state=matrix, **self.options(inputs))
        out = group_norm(self.ln_x, join_heads(out).flatten(0, 1)).view(*x.shape[:2], -1)
        return self.output(F.silu(self.gate(to_g)) * out), (last, matrix)
