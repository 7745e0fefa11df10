"""Log-linear attention: a matrix state for each binary digit of the number of tokens, each read with its own weight."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longitude.attention.mixer import register_mixer
from longitude.attention.state_mixer import StateInputs
from longitude.errors import UsageError, check_sizes
from longitude.not_finite import nan_in_its_document
from longitude.recurrent.base import softplus
from longitude.recurrent.mamba2 import Mamba2Block
from longitude.recurrent.ops.checks import require_flags, require_mode, require_state, require_tokens, state_dtype
from longitude.recurrent.ops.decayed import decays_by_head


class LogLinearState(NamedTuple):
    """State of log-linear attention after a prefix of a document.

    Args:
        seen: Number of tokens so far.
        states: A matrix for each binary digit of `seen`: the sum over a block of tokens if the digit is 1, else zeros.
    """

    seen: Int[Tensor, " B"]
    states: Float[Tensor, "B levels H K V"]


def log_linear(
    q: Float[Tensor, "B G L K"],
    k: Float[Tensor, "B G L K"],
    v: Float[Tensor, "B H L V"],
    log_decay: Float[Tensor, "B H L"],
    scales: Float[Tensor, "B H L levels"],
    *,
    mode: str = "chunked",
    chunk_size: int = 64,
    state: LogLinearState | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B H L V"], LogLinearState]:
    """Linear attention with a decay, and a separate weight for each block of 2^n earlier tokens.

        o_t = sum_{s <= t} lambda_t[level(s, t)] exp(log_decay_{s+1} + ... + log_decay_t) (q_t . k_s) v_s

    level(t, t) = 0; else 1 + the highest binary digit in which s and t, counted from 0 in their document, differ. The tokens
    before t are therefore in blocks of 2^(level - 1), one for each binary digit 1 of t. The state stores the sums of these
    blocks: O(log L) matrices. With all scales 1 the result is that of the state space dual `ssd`.

    Args:
        q: [B, G, L, K].
        k: [B, G, L, K]; each of the G heads serves H / G adjacent heads of values.
        v: [B, H, L, V].
        log_decay: at most 0, [B, H, L].
        scales: lambda, [B, H, L, levels]; the last scale applies to all higher levels too.
        mode: as in `retention`.
        chunk_size: as in `retention`.
        state: the state returned by an earlier call; None at the beginning.
        reset: as in `retention`.
        valid: as in `retention`; padding does not count.

    Returns:
        The outputs [B, H, L, V] in v's dtype, and the state after the last token, float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Guo et al. 2025, arXiv 2506.04761, https://arxiv.org/abs/2506.04761
    """
    named = {"q": (q, "B G L K"), "k": (k, "B G L K"), "v": (v, "B H L V"), "log_decay": (log_decay, "B H L")}
    require_tokens("log_linear", **named, scales=(scales, "B H L levels"))
    if v.shape[1] % q.shape[1]:
        raise UsageError("log_linear", "the heads of q and k to divide those of v", f"{q.shape[1]} and {v.shape[1]}")
    require_mode("log_linear", mode, chunk_size)
    (batch, heads, length, width), dtype = v.shape, state_dtype(v)
    require_flags("log_linear", batch, length, reset=reset, valid=valid)
    levels = state[1].shape[1] if isinstance(state, tuple) and state[-1].dim() == 5 else 0
    shapes = {"seen": (batch,), "states": (batch, levels, heads, q.shape[-1], width)}
    require_state("log_linear", state, shapes)
    states = [] if state is None else [state[1]]
    (q, k, v, log_decay, scales), states, back = nan_in_its_document(
        2, (q, k, v, log_decay, scales), states, reset, valid
    )
    real = q.new_ones(batch, length, dtype=torch.bool) if valid is None else valid
    reset = torch.zeros_like(real) if reset is None else reset
    if state is None:
        before = LogLinearState(real.new_zeros(batch, dtype=torch.long), v.new_zeros(*shapes["states"], dtype=dtype))
    else:
        before = LogLinearState(state[0], *states)
    known = int(before.seen.max()) if levels else 0  # without a state, sizes depend on lengths alone
    size = {"parallel": length, "recurrent": 1}.get(mode, min(chunk_size, length))
    out = []
    with torch.autocast(v.device.type, enabled=False):
        for first in range(0, length, size):
            here = slice(first, first + size)
            q_, k_, v_, log_w, own = (x[:, :, here].to(dtype) for x in (q, k, v, log_decay, scales))
            known += v_.shape[2]
            flags = reset[:, here], real[:, here]
            part, before = _chunk(q_, k_, v_, log_w, own, before, flags, known.bit_length())
            out.append(part)
    whole, [after] = back(torch.cat(out, 2).to(v.dtype), [before.states])
    return whole, LogLinearState(before.seen, after)


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scales: Tensor,
    state: LogLinearState,
    flags: tuple[Tensor, Tensor],
    bits: int,
) -> tuple[Tensor, LogLinearState]:
    """Outputs of the tokens of a chunk, all pairs at once, and the state after them.

    flags: starts of documents, and tokens that are no padding. bits: binary digits of the largest number of tokens.
    """
    reset, real = flags
    groups = q.shape[1]
    document = reset.cumsum(1)  # 0: it began before the chunk
    order = real.cumsum(1) - 1
    begin = torch.where(reset, order, -1).cummax(1).values  # order of the first token of each token's document
    number = torch.where(document == 0, order + state.seen[:, None], order - begin)
    count = number[:, -1] + 1  # padding at the end has the number of the last token before it

    # One head of queries for R heads of values, one chunk: [B, G, R, 1, C, ...], as decays_by_head has them.
    grouped = [x.unflatten(1, (groups, -1)) for x in (log_decay, v)]
    log_w, tokens = grouped[0][:, :, :, None, :, None], grouped[1][:, :, :, None]
    chunk = decays_by_head(q[:, :, None, None], k[:, :, None, None], log_w, reset[:, None, None, None])

    def read(level: Int[Tensor, "B C n"]) -> Float[Tensor, "B G R 1 C n"]:
        """Lambda of each token at these levels."""
        at = level.clamp(max=scales.shape[-1] - 1)[:, None].expand(-1, scales.shape[1], -1, -1)
        return scales.gather(-1, at).unflatten(1, (groups, -1))[:, :, :, None]

    pairs = chunk.pairs * read(digits(number[:, :, None] ^ number[:, None], bits))
    out = (pairs @ tokens).flatten(1, 2)[:, :, 0]

    # Blocks of the state before the chunk: the first token of a block decides its level.
    digit = torch.arange(state.states.shape[1], device=q.device)
    there = state.seen[:, None] >> digit & 1 == 1  # [B, levels]
    first = ((state.seen[:, None] >> digit) - 1).clamp(min=0) << digit
    queries = chunk.queries.expand(*tokens.shape[:-1], -1).flatten(1, 2)[:, :, 0]  # zeros for other documents
    weight = read(digits(number[:, :, None] ^ first[:, None], bits)).flatten(1, 2)[:, :, 0] * there[:, None, None]
    out = out + torch.einsum("bhcn,bhck,bnhkv->bhcv", weight, queries, state.states)

    # The new state: the highest digit in which its number differs from the count decides where a token or block is added.
    levels = torch.arange(bits, device=q.device)
    into = digits(count[:, None] ^ number, bits)[..., None] == levels + 1  # [B, C, bits]
    keys = chunk.keys.expand(*tokens.shape[:-1], -1).flatten(1, 2)[:, :, 0]
    states = torch.einsum("bcn,bhck,bhcv->bnhkv", into.to(v.dtype), keys, v)
    merged = (digits(count[:, None] ^ first, bits)[..., None] == levels + 1) & there[..., None]
    decay = chunk.decay.flatten(1, 2)[:, :, 0, 0, 0]  # 0 where a document began
    return out, LogLinearState(
        count, states + torch.einsum("bmn,bh,bmhkv->bnhkv", merged.to(v.dtype), decay, state.states)
    )


def digits(x: Int[Tensor, ...], bits: int) -> Int[Tensor, ...]:
    """Number of binary digits of a number below 2^bits; 0 for 0."""
    return (x[..., None] >> torch.arange(max(1, bits), device=x.device) > 0).sum(-1)


@register_mixer("log_linear_mamba2")
class LogLinearMamba2(Mamba2Block):
    """Log-linear Mamba-2: log-linear attention instead of a single state per head.

        z, xBC, dt, dl = x W_in;   x, B, C = silu(conv(xBC));   Delta = softplus(dt + dt_bias);   lambda = softplus(L dl)
        y = log_linear(C, B, Delta x, -Delta exp(A_log), lambda) + D x;   out = rmsnorm(y * silu(z)) W_out

    The state is the last inputs of the convolution, and for each head a matrix per binary digit of the number of tokens.

    Args:
        dim: width of x and of the output.
        head_dim: width of a head; None: 64, or what a model passes.
        expand: the inner width is expand * dim.
        state_size: size N of B and C.
        groups: number of groups of heads; each has its own B, C and norm.
        levels: number of lambdas per token; the last applies to all blocks of 2^(levels - 2) tokens and more.
        conv_kernel: size of the depthwise causal convolution in tokens.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        norm_eps: epsilon of the norm.
        mode, chunk_size: as in `log_linear`.

    Raises:
        ValueError: for sizes that do not fit.

    Source:
        Guo et al. 2025, arXiv 2506.04761, https://arxiv.org/abs/2506.04761
    """

    source = "Guo et al. 2025"
    growth = "O(log N)"
    undecayed = (*Mamba2Block.undecayed, "L")

    def __init__(
        self,
        dim: int,
        *,
        head_dim: int | None = None,
        expand: int = 2,
        state_size: int = 128,
        groups: int = 1,
        levels: int = 15,
        conv_kernel: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        mode: str = "chunked",
        chunk_size: int = 64,
    ):
        check_sizes("LogLinearMamba2", levels=levels)
        sizes = {"head_dim": head_dim, "expand": expand, "state_size": state_size, "groups": groups}
        conv = {"conv_kernel": conv_kernel, "conv_bias": conv_bias, "bias": bias, "norm_eps": norm_eps}
        super().__init__(dim, **sizes, **conv, mode=mode, chunk_size=chunk_size, more=levels)
        self.L = nn.Parameter(torch.empty(self.num_heads, levels))
        self.mark_undecayed()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as Mamba-2, with L = 1."""
        super().reset_parameters()
        nn.init.ones_(self.L)

    def recur(
        self, delta_x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, more: Tensor, state: Any, inputs: StateInputs
    ) -> tuple[Tensor, LogLinearState]:
        exact = state_dtype(delta_x)
        scales = softplus(self.L.to(exact) * more.to(exact).unflatten(-1, self.L.shape)).transpose(1, 2)
        return log_linear(C, B, delta_x, log_decay, scales, state=state, **self.options(inputs))

    def products(self, keys: float) -> float:
        return (1 + math.log2(max(2, keys))) * self.inner * self.state_size  # one write, log2(keys) reads
