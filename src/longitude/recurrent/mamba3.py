"""Mamba-3 with one input and one output: a matrix state, a trapezoid rule over two tokens, rotations computed from tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.heads import join_heads, split_heads
from longitude.attention.mixer import register_mixer
from longitude.attention.short_conv import previous
from longitude.attention.state_mixer import StateInputs
from longitude.errors import Positive, UsageError, unknown
from longitude.native.not_finite import nan_in_its_document
from longitude.positions.rotation import Angles, rotate_by_formula
from longitude.recurrent.base import RecurrentMixer, WideRMSNorm, fill_step_bias, softplus
from longitude.recurrent.ops.checks import Form, Running, require_running, require_state, require_tokens, state_dtype
from longitude.recurrent.ops.decayed import decayed


class Mamba3State(NamedTuple):
    """State of Mamba-3 after the last token.

    Args:
        angle: Angle of each pair of key channels, in radians.
        last: The last token's rotated key and its value, which the trapezoid rule uses again at the next token.
        matrix: The decayed sum over tokens of products of key and value.
    """

    angle: Float[Tensor, "B H R"]
    last: Float[Tensor, "B 1 H*(K+V)"]
    matrix: Float[Tensor, "B H K V"]


def mamba3(
    q: Float[Tensor, "B H L K"],
    k: Float[Tensor, "B H L K"],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B H L"],
    step: Float[Tensor, "B H L"],
    share: Float[Tensor, "B H L"],
    speed: Float[Tensor, "B H L R"],
    *,
    state: Mamba3State | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B H L V"], Mamba3State]:
    """The recurrence of Mamba-3: each step adds a token and the token before it (trapezoid), with accumulated rotations.

        a_t = a_{t-1} + step_t speed_t;   q_t, k_t rotated by a_t, pairs interleaved
        S_t = e^{log_decay_t} (S_{t-1} + (1 - share_t) step_t k_{t-1}^T v_{t-1}) + share_t step_t k_t^T v_t,    o_t = q_t S_t

    With share = 1 it is Mamba-2's rule (with rotations), with share = 1/2 the trapezoid rule.

    Args:
        q: [B, H, L, K].
        k: [B, H, L, K].
        v: [B, H, L, V].
        log_decay: at most 0, [B, H, L].
        step: above 0, [B, H, L].
        share: weight of the token itself, in [0, 1], [B, H, L].
        speed: angular speed of each of the first R pairs in radians per unit step, [B, H, L, R].
        state: the state returned by an earlier call; None at the beginning.
        run: mode, chunk_size, reset and valid, as in `retention`.

    Returns:
        The outputs [B, H, L, V] in v's dtype, and the state after the last token, float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, more pairs than K has, an unknown mode, or a chunk without tokens.

    Source:
        Lahoti et al. 2026, arXiv 2603.15569, https://arxiv.org/abs/2603.15569
    """
    numbers = {"log_decay": log_decay, "step": step, "share": share}
    named = {"q": (q, "B H L K"), "k": (k, "B H L K"), "v": (v, "B H L V"), "speed": (speed, "B H L R")}
    require_tokens("mamba3", **named, **{name: (x, "B H L") for name, x in numbers.items()})
    (batch, heads, length, width), keys, pairs = v.shape, q.shape[-1], speed.shape[-1]
    if keys % 2 or pairs > keys // 2:
        raise UsageError("mamba3", "an even K and speeds of at most K/2 pairs", f"K={keys} and {pairs} pairs")
    *_, reset, valid = require_running("mamba3", batch, length, **run)
    last = (batch, 1, heads * (keys + width))
    require_state(
        "mamba3", state, {"angle": (batch, heads, pairs), "last": last, "matrix": (batch, heads, keys, width)}
    )
    tokens, states, back = nan_in_its_document(2, (q, k, v, log_decay, step, share, speed), state or (), reset, valid)
    q, k, v, log_decay, step, share, speed = tokens
    before = Mamba3State(*states) if states else None
    exact = state_dtype(v)
    turn = step.to(exact)[..., None] * speed.to(exact)
    angle = since_begin(turn, reset, None if before is None else before.angle.to(exact))
    table = Angles(
        *(F.pad(f, (0, keys // 2 - pairs), value=rest) for f, rest in ((angle.cos(), 1.0), (angle.sin(), 0.0)))
    )
    q, k = (rotate_by_formula(x.to(exact), table, "interleaved") for x in (q, k))

    earlier, last_pair = previous(
        join_heads(torch.cat([k, v.to(exact)], -1)), None if before is None else before.last, reset, valid
    )
    k_before, v_before = split_heads(earlier, heads).split([keys, width], -1)
    written = (share * step).to(exact)[..., None] * k
    other = ((1 - share) * step * log_decay.exp()).to(exact)[..., None] * k_before
    decay, matrix = log_decay[..., None], None if before is None else before.matrix
    out, matrix = decayed("mamba3", q, written, v.to(exact), decay, state=matrix, finite=True, **run)
    more, other_matrix = decayed("mamba3", q, other, v_before, decay, finite=True, **run)
    after = torch.remainder(angle[:, :, -1], 2 * math.pi)
    out, states = back((out + more).to(v.dtype), (after, last_pair, matrix + other_matrix))
    return out, Mamba3State(*states)


def since_begin(
    turn: Float[Tensor, "B H L R"], reset: Bool[Tensor, "B L"] | None, before: Float[Tensor, "B H R"] | None
) -> Float[Tensor, "B H L R"]:
    """Running sums of turn in each document; before: the sum of earlier calls, for the document that continues."""
    total = turn.cumsum(2)
    carried = torch.zeros_like(total[:, :, :1]) if before is None else before[:, :, None]
    if reset is None:
        return total + carried
    order = torch.arange(turn.shape[2], device=turn.device)
    first = torch.where(reset, order, -1).cummax(1).values  # first token of the document; -1: in an earlier call
    at = first.clamp(min=0)[:, None, :, None].expand_as(total)
    return torch.where((first < 0)[:, None, :, None], total + carried, total - (total - turn).gather(2, at))


def heavy_tail(x: Tensor) -> Tensor:
    """1 + x from 0 on, 1 / (1 - x) below: above zero, with a derivative at 0, and without the exponential tail of softplus."""
    return torch.where(x < 0, 1 / (1 - x.clamp(max=0)), 1 + x)


DECAY_ACTIVATIONS = {"softplus": softplus, "heavy_tail": heavy_tail}


@register_mixer("mamba3")
class Mamba3(RecurrentMixer):
    """Mamba-3, a rotating state: the block with one input and one output (SISO).

        z, x, B, C, dt, a, s, w = x W_in;   Delta = softplus(dt + dt_bias);   A = -max(f(a), 1e-4)
        B, C = rmsnorm(B) + B_bias, rmsnorm(C) + C_bias;   speed = pi tanh(w)
        y = mamba3(C, B, x, Delta A, Delta, sigmoid(s), speed) + D x;   out = (y * silu(z)) W_out

    B, C and w are shared by heads; each head has its own biases. There is no convolution. The state is the angle of each pair,
    the last token's key and value, and a matrix for each head.

    Args:
        dim: width of x and of the output.
        head_dim: width of a head; None: 64, or what a model passes.
        expand: the inner width is expand * dim.
        state_size: size N of B and C, a multiple of 4; half of it is rotated.
        bias: whether the projections have biases.
        norm_eps: epsilon of the norms.
        decay_activation: f. "softplus", as in the paper and in the authors' code of March 2026; "heavy_tail", 1 + a from 0 on and
            1 / (1 - a) below, as in their code since June 2026 (commit c69aaab, mamba_ssm 2.3.2.post1). Weights trained with
            one give other decays with the other: use "heavy_tail" for weights of their present code.
        mode, chunk_size: as in `mamba3`.

    Raises:
        ValueError: for sizes that do not fit, or another decay_activation.

    Source:
        Lahoti et al. 2026, arXiv 2603.15569, https://arxiv.org/abs/2603.15569;
        https://github.com/state-spaces/mamba for the second activation
    """

    source = "Lahoti et al. 2026"
    any_length = True
    undecayed = ("dt_bias", "B_bias", "C_bias", "D")

    def __init__(
        self,
        dim: int,
        *,
        head_dim: int | None = None,
        expand: int = 2,
        state_size: int = 128,
        bias: bool = False,
        norm_eps: Positive = 1e-5,
        decay_activation: str = "softplus",
        **form: Unpack[Form],
    ):
        super().__init__(**form)
        head_dim = 64 if head_dim is None else head_dim
        if decay_activation not in DECAY_ACTIVATIONS:
            raise unknown(
                "decay_activation", decay_activation, DECAY_ACTIVATIONS, "Mamba3 has two, softplus and heavy_tail."
            )
        inner = expand * dim
        if inner % head_dim or state_size % 4:
            expected = f"head_dim to divide expand dim = {inner} into heads, and a state_size of a multiple of 4"
            raise UsageError("Mamba3", expected, f"head_dim={head_dim} and state_size={state_size}")
        self.dim, self.inner, self.num_heads, self.head_dim = dim, inner, inner // head_dim, head_dim
        self.state_size, self.norm_eps, self.decay_activation = state_size, norm_eps, decay_activation
        self.sizes = [inner, inner, state_size, state_size, *[self.num_heads] * 3, state_size // 4]
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=bias)
        self.dt_bias, self.D = (nn.Parameter(torch.empty(self.num_heads)) for _ in range(2))
        self.B_bias, self.C_bias = (nn.Parameter(torch.empty(self.num_heads, state_size)) for _ in range(2))
        self.B_norm, self.C_norm = (WideRMSNorm(state_size, norm_eps) for _ in range(2))
        self.out_proj = nn.Linear(inner, dim, bias=bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as published: Delta log-uniform in [0.001, 0.1], biases and D 1."""
        fill_step_bias(self.dt_bias)
        for parameter in (self.B_bias, self.C_bias, self.D):
            nn.init.ones_(parameter)

    def products(self, keys: float) -> float:
        return 3 * self.inner * self.state_size

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, Mamba3State]:
        exact = state_dtype(x)
        z, tokens, *rest = self.in_proj(x).split(self.sizes, -1)
        B, C, dt, a, share, speed = (y.to(exact) for y in rest)
        step = softplus(dt + self.dt_bias.to(exact)).transpose(1, 2)  # [B, H, L]
        rate = DECAY_ACTIVATIONS[self.decay_activation](a)
        log_decay = -step * rate.clamp(min=1e-4).transpose(1, 2)
        k, q = (
            norm(y)[:, None] + bias.to(exact)[:, None]
            for y, norm, bias in ((B, self.B_norm, self.B_bias), (C, self.C_norm, self.C_bias))
        )
        speed = (math.pi * speed.tanh())[:, None].expand(-1, self.num_heads, -1, -1)
        v = split_heads(tokens, self.num_heads)
        y, state = mamba3(
            q, k, v, log_decay, step, share.sigmoid().transpose(1, 2), speed, state=state, **self.options(inputs)
        )
        y = y.to(exact) + self.D.to(exact)[:, None, None] * v
        return self.out_proj((join_heads(y) * F.silu(z.to(exact))).to(x.dtype)), state
