"""RWKV-4 as a layer: its time mix, and the channel mix that stands beside it in the published blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longitude.attention.mixer import register_mixer
from longitude.attention.zero_gradients import with_zero_gradients
from longitude.positions.base import Encoding, check_sizes
from longitude.recurrent.base import RecurrentMixer, fill, require_mode
from longitude.recurrent.ops.short_conv import previous
from longitude.recurrent.rwkv4 import rwkv4


@register_mixer("rwkv4")
class RWKV4(RecurrentMixer):
    """The time mix of RWKV-4 (Peng et al. 2023, section 3.1), with the parameter names of its checkpoints:

        r, k, v = W (mu x_t + (1 - mu) x_{t-1}), each with a mu and a W of its own;   out = W_o(sigmoid(r) * rwkv4(k, v))

    inner: the channels of r, k and v; dim where not said. mode, chunk_size: as rwkv4 has them. The state is the last token,
    [B, 1, dim], and numerator, denominator and max of the weighted mean, [B, inner] each.
    """

    undecayed = ("time_decay", "time_first", "time_mix_key", "time_mix_value", "time_mix_receptance")

    def __init__(self, dim: int, *, inner: int | None = None, mode: str = "chunked", chunk_size: int = 32):
        super().__init__()
        inner = dim if inner is None else inner
        check_sizes("RWKV4", dim=dim, inner=inner)
        require_mode("RWKV4", mode, chunk_size)
        self.dim, self.inner, self.mode, self.chunk_size = dim, inner, mode, chunk_size
        self.time_decay = nn.Parameter(torch.empty(inner))
        self.time_first = nn.Parameter(torch.empty(inner))
        self.time_mix_key = nn.Parameter(torch.empty(1, 1, dim))
        self.time_mix_value = nn.Parameter(torch.empty(1, 1, dim))
        self.time_mix_receptance = nn.Parameter(torch.empty(1, 1, dim))
        self.key = nn.Linear(dim, inner, bias=False)
        self.value = nn.Linear(dim, inner, bias=False)
        self.receptance = nn.Linear(dim, inner, bias=False)
        self.output = nn.Linear(inner, dim, bias=False)
        self.mark_undecayed()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' initial values, for a layer in the middle: slow and fast channels from the first to the last."""
        depth, exact, device = 0.5, torch.float32, self.time_decay.device
        place = torch.linspace(0, 1, self.inner, dtype=exact, device=device)
        fill(self.time_decay, -5 + 8 * place ** (0.7 + 1.3 * depth))
        zigzag = 0.5 * ((torch.arange(self.inner, device=device) + 1) % 3 - 1)
        fill(self.time_first, math.log(0.3) + zigzag)
        channel = torch.arange(self.dim, dtype=exact, device=device) / self.dim
        fill(self.time_mix_key, channel ** (1 - depth))
        fill(self.time_mix_value, channel ** (1 - depth) + 0.3 * depth)
        fill(self.time_mix_receptance, channel ** (0.5 * (1 - depth)))

    def mix(
        self,
        x: Tensor,
        state: Any,
        reset: Tensor | None,
        valid: Tensor | None,
        positions: Tensor,
        encoding: Encoding,
        tables: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        tail, *sums = (None,) if state is None else state
        before, tail = previous(x, tail, reset, valid)
        key = self.key(torch.lerp(before, x, self.time_mix_key))
        value = self.value(torch.lerp(before, x, self.time_mix_value))
        receptance = self.receptance(torch.lerp(before, x, self.time_mix_receptance)).sigmoid()
        wkv, sums = rwkv4(
            self.time_decay,
            self.time_first,
            key,
            value,
            mode=self.mode,
            chunk_size=self.chunk_size,
            state=tuple(sums) or None,
            reset=reset,
            valid=valid,
        )
        wkv = with_zero_gradients(wkv, [self.time_decay])  # one token has nothing behind it to decay
        return self.output(receptance * wkv), (tail, *sums)


class RWKVChannelMix(nn.Module):
    """What stands in place of an MLP in RWKV's published blocks: out = sigmoid(W_r x_r) * W_v relu(W_k x_k)^2, where x_r and
    x_k are mu x_t + (1 - mu) x_{t-1}, each with a mu of its own (Peng et al. 2023).
    """

    def __init__(self, dim: int, hidden: int | None = None):
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        check_sizes("RWKVChannelMix", dim=dim, hidden=hidden)
        self.time_mix_key = nn.Parameter(torch.full((1, 1, dim), 0.5))
        self.time_mix_receptance = nn.Parameter(torch.full((1, 1, dim), 0.5))
        self.key = nn.Linear(dim, hidden, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(hidden, dim, bias=False)

    def forward(
        self,
        x: Float[Tensor, "B L dim"],
        tail: Float[Tensor, "B 1 dim"] | None = None,
        reset: Bool[Tensor, "B L"] | None = None,
        valid: Bool[Tensor, "B L"] | None = None,
    ) -> tuple[Float[Tensor, "B L dim"], Float[Tensor, "B 1 dim"]]:
        """-> [B, L, dim], and the tail for the call after this one; tail, reset and valid as `previous` has them."""
        before, tail = previous(x, tail, reset, valid)
        key = self.key(torch.lerp(before, x, self.time_mix_key)).relu().square()
        receptance = self.receptance(torch.lerp(before, x, self.time_mix_receptance)).sigmoid()
        return receptance * self.value(key), tail
