"""RWKV-7 (Goose): a matrix state in which each token decays channels, removes the value of one key, and writes another's."""

from __future__ import annotations

import math
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
from longitude.recurrent.ops.delta import delta


def rwkv7(
    r: Float[Tensor, "B H L K"],
    log_w: Float[Tensor, "B H L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    kappa: Float[Tensor, "B H L K"],
    a: Float[Tensor, "B H L K"],
    *,
    state: Float[Tensor, "B H K V"] | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """The time mixing of RWKV-7: a delta rule with separate keys for removal and writing, and a removal rate per channel.

        S_t = (diag(exp(log_w_t)) - (a_t kappa_t)^T kappa_t) S_{t-1} + k_t^T v_t,    y_t = r_t S_t

    Args:
        r: [B, H, L, K].
        log_w: logarithm of each channel's decay at each token, at most 0, [B, H, L, K].
        k: keys for writing, [B, H, L, K].
        v: [B, H, L, V].
        kappa: keys for removal, used as given; the layer divides them by their norm, [B, H, L, K].
        a: the share of each channel that is removed, in [0, 1], [B, H, L, K].
        state: as in `retention`.
        run: mode, chunk_size, reset and valid, as in `retention`.

    Returns:
        The outputs [B, H, L, V] in v's dtype, and the state after the last token [B, H, K, V], float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Peng et al. 2025, section 4, arXiv 2503.14456, https://arxiv.org/abs/2503.14456
    """
    tokens = {"r": r, "log_w": log_w, "k": k, "kappa": kappa, "a": a}
    require_tokens("rwkv7", **{name: (x, "B H L K") for name, x in tokens.items()}, v=(v, "B H L V"))
    return delta("rwkv7", r, kappa, k, v, log_w, b=a * kappa, early=True, state=state, **run)


MIXED = "rwkvag"
"""Letters of the token-shift mixes, in the authors' parameter names: receptance, decay, key, value, rate and gate."""


@register_mixer("rwkv7")
class RWKV7(RecurrentMixer):
    """RWKV-7's time mixing, as in the first layer of the authors' code.

        d_t = x_{t-1} - x_t;   x_j = x + d * mu_j                                 j = r, w, k, v, a, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v;   a = sigmoid(a_0 + x_a A_1 A_2);   g = sigmoid(x_g G_1) G_2
        log w = -e^{-1/2} sigmoid(w_0 + tanh(x_w D_1) D_2);   kappa = k * xi, of norm 1;   k = k * (1 + (a - 1) * alpha)
        out = (g * (groupnorm(rwkv7(r, log w, k, v, kappa, a)) + (r . (rho * k)) v)) W_o

    Later layers of the authors' model blend their values with the first layer's. This is not done here, because a mixer sees
    only its layer. The state is the last token and a matrix for each head. Initial values that depend on the layer's depth in
    the authors' code are those of the middle layer.

    Args:
        dim: width of x and of the output.
        num_heads: heads.
        head_dim: width of a head; None: dim / num_heads.
        decay_rank: inner size of D_1 D_2.
        rate_rank: inner size of A_1 A_2.
        gate_rank: inner size of G_1 G_2.
        norm_eps: epsilon of the norm.
        mode, chunk_size: as in `rwkv7`.

    Raises:
        ValueError: for sizes that do not fit.

    Source:
        Peng et al. 2025, section 4, arXiv 2503.14456, https://arxiv.org/abs/2503.14456
    """

    source = "Peng et al. 2025"
    undecayed = (*(f"x_{name}" for name in MIXED), "w0", "a0", "r_k", "k_k", "k_a")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        decay_rank: int = 64,
        rate_rank: int = 64,
        gate_rank: int = 128,
        norm_eps: Positive = 64e-5,
        **form: Unpack[Form],
    ):
        super().__init__(**form)
        _, head_dim = head_sizes("RWKV7", dim, num_heads, head_dim=head_dim)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        wide = num_heads * head_dim
        for name in MIXED:  # all names and shapes are those of the authors' checkpoints
            setattr(self, f"x_{name}", nn.Parameter(torch.empty(1, 1, dim)))
        self.w0, self.a0, self.k_k, self.k_a = (nn.Parameter(torch.empty(1, 1, wide)) for _ in range(4))
        self.r_k = nn.Parameter(torch.empty(num_heads, head_dim))
        ranks = decay_rank, rate_rank, gate_rank
        self.w1, self.a1, self.g1 = (nn.Parameter(torch.empty(dim, rank)) for rank in ranks)
        self.w2, self.a2, self.g2 = (nn.Parameter(torch.empty(rank, wide)) for rank in ranks)
        self.receptance, self.key, self.value = (nn.Linear(dim, wide, bias=False) for _ in range(3))
        self.ln_x = nn.GroupNorm(num_heads, wide, eps=norm_eps)
        self.output = nn.Linear(wide, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' initial values: slow and fast channels from the first to the last, no dependence on the data."""
        depth, exact, device = 0.5, torch.float32, self.w0.device
        channel = torch.arange(self.dim, dtype=exact, device=device) / self.dim
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        for name, power in powers.items():
            fill(self.get_parameter(f"x_{name}"), 1 - channel ** (power * (1 - depth)))
        place = torch.linspace(0, 1, self.w0.numel(), dtype=exact, device=device)
        within = torch.linspace(-1, 1, self.head_dim, dtype=exact, device=device)  # of each head
        zigzag = (within * within.abs()).repeat(self.num_heads)
        fill(self.w0, -6 + 6 * place ** (1 + depth**0.3) + 0.5 + 2.5 * zigzag)
        fill(self.a0, -0.19 + 0.3 * zigzag + 0.4 * (place - 0.5))
        fill(self.k_k, 0.71 - 0.1 * (place - 0.5))
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)
        for down, up in ((self.w1, self.w2), (self.a1, self.a2), (self.g1, self.g2)):
            nn.init.zeros_(down)
            nn.init.orthogonal_(up, 0.1 * math.sqrt(max(1, up.shape[0] / up.shape[1])))
        self.ln_x.reset_parameters()

    def products(self, keys: float) -> float:
        low = sum(p.numel() for p in (self.w1, self.w2, self.a1, self.a2, self.g1, self.g2))
        return 4 * self.num_heads * self.head_dim**2 + low

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        last, matrix = (None, None) if state is None else state
        before, last = previous(x, last, inputs.reset, inputs.valid)
        to_r, to_w, to_k, to_v, to_a, to_g = (x + (before - x) * getattr(self, f"x_{name}") for name in MIXED)

        exact = state_dtype(x)
        step = torch.tanh(to_w @ self.w1) @ self.w2
        log_w = -math.exp(-0.5) * (self.w0.to(exact) + step.to(exact)).sigmoid()
        a = (self.a0 + to_a @ self.a1 @ self.a2).sigmoid()
        gate = (to_g @ self.g1).sigmoid() @ self.g2
        r, k, v = self.receptance(to_r), self.key(to_k), self.value(to_v)
        removed, k = k * self.k_k, k * (1 + (a - 1) * self.k_a)
        r, log_w, k, v, removed, a = (split_heads(y, self.num_heads) for y in (r, log_w, k, v, removed, a))
        kappa = F.normalize(removed.to(exact), dim=-1)
        out, matrix = rwkv7(r, log_w, k, v, kappa, a.to(exact), state=matrix, **self.options(inputs))
        out = group_norm(self.ln_x, join_heads(out).flatten(0, 1)).view(*x.shape[:2], -1)
        bonus = (r * k * self.r_k[:, None]).sum(-1, keepdim=True) * v
        return self.output((out + join_heads(bonus)) * gate), (last, matrix)
