"""Gated delta rules, as mixers: a state that decays, and in which a key replaces what it held instead of adding to it."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.heads import head_sizes, join_heads, split_heads
from longitude.attention.mixer import register_mixer
from longitude.attention.short_conv import convolved
from longitude.attention.state_mixer import StateInputs
from longitude.errors import Positive, UsageError
from longitude.recurrent.base import RecurrentMixer, WideRMSNorm, fill, fill_step_bias, softplus
from longitude.recurrent.ops.checks import Form, Running, require_tokens, state_dtype
from longitude.recurrent.ops.delta import delta


def gated_delta_rule(
    q: Float[Tensor, "B G L K"],
    k: Float[Tensor, "B G L K"],
    v: Float[Tensor, "B H L V"],
    g: Float[Tensor, "B H L"] | Float[Tensor, "B H L K"],
    beta: Float[Tensor, "B H L"],
    *,
    state: Float[Tensor, "B H K V"] | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B H L V"], Float[Tensor, "B H K V"]]:
    """The gated delta rule: what the state stores under a key decays, and moves to the value by a share beta.

        S_t = (I - beta_t k_t^T k_t) diag(e^{g_t}) S_{t-1} + beta_t k_t^T v_t,    o_t = K^{-1/2} q_t S_t

    Args:
        q: [B, G, L, K], used as given; published layers divide q and k by their norms.
        k: [B, G, L, K]; each of the G heads serves H / G adjacent heads of values. If beta |k|^2 is above 2, S grows.
        v: [B, H, L, V].
        g: log of the decay, at most 0: by head [B, H, L] (Gated DeltaNet), or by channel [B, H, L, K] (Kimi Delta Attention).
        beta: write strength in [0, 1], or up to 2, [B, H, L].
        state: as in `retention`.
        run: mode, chunk_size, reset and valid, as in `retention`.

    Returns:
        The outputs [B, H, L, V] in v's dtype, and the state after the last token [B, H, K, V], float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Yang et al. 2024, arXiv 2412.06464, https://arxiv.org/abs/2412.06464; by channel: Kimi Team 2025, arXiv 2510.26692,
        https://arxiv.org/abs/2510.26692
    """
    shape = "B H L K" if isinstance(g, Tensor) and g.dim() == 4 else "B H L"
    tokens = {"q": (q, "B G L K"), "k": (k, "B G L K"), "v": (v, "B H L V"), "g": (g, shape), "beta": (beta, "B H L")}
    require_tokens("gated_delta_rule", **tokens)
    if v.shape[1] % q.shape[1]:
        got = f"{q.shape[1]} and {v.shape[1]}"
        raise UsageError("gated_delta_rule", "the heads of q and k to divide those of v", got)
    exact = state_dtype(v)
    writes = beta.to(exact)[..., None] * k.to(exact).repeat_interleave(v.shape[1] // k.shape[1], 1)
    decay = g if g.dim() == 4 else g[..., None]
    scaled = q.to(exact) * q.shape[-1] ** -0.5
    return delta("gated_delta_rule", scaled, k, writes, v, decay, state=state, **run)


class DeltaMixer(RecurrentMixer):
    """out = W_o (norm(gated_delta_rule(q, k, v, g, beta)) * gate), q, k, v from short convolutions. A subclass adds its gates.

    The state is the last inputs of the convolution, and a matrix for each head.
    """

    undecayed = ("dt_bias", "A_log")
    decays: ClassVar[str]
    """"head" or "channel": whether decays are per head or per channel."""
    lower_bound: float | None = None
    """The smallest logarithm of a decay; None: it has no bound."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: int = 2,
        conv_kernel: int = 4,
        norm_eps: Positive = 1e-6,
        **form: Unpack[Form],
    ):
        super().__init__(**form)
        who, keys = type(self).__name__, num_heads if num_key_heads is None else num_key_heads
        _, head_dim = head_sizes(who, dim, num_heads, head_dim=head_dim)
        if num_heads % keys:
            raise UsageError(who, f"num_key_heads to divide num_heads={num_heads}", keys)
        self.dim, self.num_heads, self.num_key_heads, self.head_dim = dim, num_heads, keys, head_dim
        self.value_dim, self.norm_eps = expand_v * head_dim, norm_eps
        self.q_proj, self.k_proj = (nn.Linear(dim, keys * head_dim, bias=False) for _ in range(2))
        self.v_proj = nn.Linear(dim, num_heads * self.value_dim, bias=False)
        mixed = 2 * keys * head_dim + num_heads * self.value_dim
        self.conv1d = nn.Conv1d(mixed, mixed, conv_kernel, groups=mixed, bias=False)
        self.b_proj = nn.Linear(dim, num_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(num_heads * (1 if self.decays == "head" else head_dim)))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.o_norm = WideRMSNorm(self.value_dim, norm_eps)
        self.o_proj = nn.Linear(num_heads * self.value_dim, dim, bias=False)
        self.add_gates()
        self.reset_parameters()

    def add_gates(self) -> None:
        """Make the layers of `step` and `gate`."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as Mamba-2: A in [1, 16], steps log-uniform in [0.001, 0.1]. With a bound A is 1."""
        # With a bound, A multiplies the bias too: a sigmoid of 16 times it is nearly 0, without decay and gradient.
        of_a = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(1, 16 if self.lower_bound is None else 1)
        fill(self.A_log, of_a.log())
        fill_step_bias(self.dt_bias)
        self.conv1d.reset_parameters()

    def products(self, keys: float) -> float:
        return 3 * self.num_heads * self.head_dim * self.value_dim

    def step(self, x: Tensor) -> Tensor:
        """Raw step size, to which dt_bias is added, [B, L, heads] or [B, L, heads head_dim]."""
        raise NotImplementedError

    def gate(self, x: Tensor) -> Tensor:
        """Gate that multiplies the normalized output, [B, L, heads value_dim]."""
        raise NotImplementedError

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tail, matrix = (None, None) if state is None else state
        qkv = torch.cat([project(x) for project in (self.q_proj, self.k_proj, self.v_proj)], -1)
        qkv, tail = convolved(self.conv1d, qkv, tail, inputs.reset, inputs.valid)
        of_keys, exact = self.num_key_heads * self.head_dim, state_dtype(x)
        q, k, v = F.silu(qkv).split([of_keys, of_keys, self.num_heads * self.value_dim], -1)
        q, k = (unit(split_heads(y, self.num_key_heads).to(exact)) for y in (q, k))
        step = split_heads(self.step(x).to(exact) + self.dt_bias.to(exact), self.num_heads)
        rate, bound = self.A_log.to(exact).exp()[:, None, None], self.lower_bound
        g = -rate * softplus(step) if bound is None else bound * (rate * step).sigmoid()
        beta = self.b_proj(x).to(exact).sigmoid().transpose(1, 2)
        v = split_heads(v, self.num_heads)
        g = g.squeeze(-1) if self.decays == "head" else g
        y, matrix = gated_delta_rule(q, k, v, g, beta, state=matrix, **self.options(inputs))
        y = self.o_norm(y.to(exact))
        return self.o_proj((join_heads(y) * self.gate(x).to(exact)).to(x.dtype)), (tail, matrix)


def unit(x: Tensor) -> Tensor:
    """Divide x by sqrt(|x|^2 + 1e-6), as in the authors' code."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@register_mixer("gated_deltanet")
class GatedDeltaNet(DeltaMixer):
    """Gated DeltaNet, a delta rule with decay: the delta rule with a decay for each head.

        q, k, v = silu(conv(x W_q, x W_k, x W_v)), q and k of norm 1;   beta = sigmoid(x W_b)
        g = -exp(A_log) softplus(x W_a + dt_bias);   out = W_o (rmsnorm(gated_delta_rule(q, k, v, g, beta)) * silu(x W_g))

    Args:
        dim: width of x and of the output.
        num_heads: heads of values.
        num_key_heads: heads of queries and keys, each shared by adjacent heads of values; None: num_heads.
        head_dim: width of a head of queries and keys; None: dim / num_heads.
        expand_v: a head of values has expand_v * head_dim dimensions.
        conv_kernel: size of the depthwise causal convolution in tokens.
        norm_eps: epsilon of the norm.
        mode, chunk_size: as in `gated_delta_rule`.

    Raises:
        ValueError: for sizes that do not fit.

    Source:
        Yang et al. 2024, arXiv 2412.06464, https://arxiv.org/abs/2412.06464
    """

    source = "Yang et al. 2024"
    any_length = True
    decays = "head"

    def add_gates(self) -> None:
        self.a_proj = nn.Linear(self.dim, self.num_heads, bias=False)
        self.g_proj = nn.Linear(self.dim, self.num_heads * self.value_dim, bias=False)

    def step(self, x: Tensor) -> Tensor:
        return self.a_proj(x)

    def gate(self, x: Tensor) -> Tensor:
        return F.silu(self.g_proj(x))


@register_mixer("kda")
class KimiDeltaAttention(DeltaMixer):
    """Kimi Delta Attention, decay by channel: the delta rule with a decay for each channel of the keys.

        q, k, v, beta as in Gated DeltaNet;   g = -exp(A_log) softplus(x W_fa W_fb + dt_bias)
        out = W_o (rmsnorm(gated_delta_rule(q, k, v, g, beta)) * sigmoid(x W_ga W_gb))

    W_fa and W_ga have head_dim columns. With a lower_bound L the gate is

        g = L sigmoid(exp(A_log) (x W_fa W_fb + dt_bias))

    Then a channel keeps e^L of its state or more at each token, and A_log starts at 0. Use a lower_bound if decays should stay
    within what a chunk can multiply.

    Args:
        dim: width of x and of the output.
        num_heads: heads.
        head_dim: width of a head; None: dim / num_heads.
        conv_kernel: size of the depthwise causal convolution in tokens.
        norm_eps: epsilon of the norm.
        lower_bound: L, below 0, such as -5 in flash-linear-attention; None: the unbounded gate.
        mode, chunk_size: as in `gated_delta_rule`.

    Raises:
        ValueError: for sizes that do not fit, and a lower_bound that is not below 0.

    Source:
        Kimi Team 2025, arXiv 2510.26692, https://arxiv.org/abs/2510.26692
    """

    source = "Kimi Team 2025"
    decays = "channel"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        conv_kernel: int = 4,
        norm_eps: Positive = 1e-5,
        lower_bound: float | None = None,
        **form: Unpack[Form],
    ):
        if lower_bound is not None and not (isinstance(lower_bound, int | float) and -math.inf < lower_bound < 0):
            raise UsageError("KimiDeltaAttention", "a finite lower_bound below 0", repr(lower_bound))
        self.lower_bound = lower_bound  # decides the first decays
        super().__init__(
            dim, num_heads, head_dim=head_dim, expand_v=1, conv_kernel=conv_kernel, norm_eps=norm_eps, **form
        )

    def add_gates(self) -> None:
        wide = self.num_heads * self.head_dim
        self.f_a_proj, self.g_a_proj = (nn.Linear(self.dim, self.head_dim, bias=False) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (nn.Linear(self.head_dim, wide, bias=False) for _ in range(2))

    def step(self, x: Tensor) -> Tensor:
        return self.f_b_proj(self.f_a_proj(x))

    def gate(self, x: Tensor) -> Tensor:
        return self.g_b_proj(self.g_a_proj(x)).sigmoid()
