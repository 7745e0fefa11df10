"""RWKV-4: each channel's values, weighted by their keys and by a decay with the distance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.attention.mixer import register_mixer
from longitude.attention.short_conv import previous
from longitude.attention.state_mixer import StateInputs
from longitude.native.not_finite import nan_in_its_document
from longitude.recurrent.base import RecurrentMixer, fill
from longitude.recurrent.ops.c_loops import Loop, flags_of, usable
from longitude.recurrent.ops.checks import Running, require_running, require_state, require_tokens, state_dtype

FLOOR = -1e38
"""The exponent of an empty sum: finite, so that no difference of two of them is NaN."""


def rwkv4(
    time_decay: Float[Tensor, " C"],
    time_first: Float[Tensor, " C"],
    key: Float[Tensor, "B L C"],
    value: Float[Tensor, "B L C"],
    *,
    state: tuple[Tensor, ...] | None = None,
    **run: Unpack[Running],
) -> tuple[Float[Tensor, "B L C"], tuple[Tensor, ...]]:
    """The weighted mean of RWKV-4, for keys of any size without overflow.

        wkv_t = (sum_{i<t} e^{-(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same without v)
        w = exp(time_decay),    u = time_first

    Args:
        time_decay: [C].
        time_first: [C].
        key: [B, L, C].
        value: [B, L, C].
        state: the state returned by an earlier call; None at the beginning.
        run: as in `retention`, with chunks of 32 tokens. mode: "recurrent" runs token by token; "parallel" joins sums of 1,
            2, 4, ... tokens; "chunked" does so within chunk_size tokens, or runs in a C kernel if there is one. The results
            are equal.

    Returns:
        wkv [B, L, C] in key's dtype, and the sums after the last token: numerator and denominator, both over e^max, and max,
        [B, C] each, float32 or wider.

    Raises:
        ValueError: for shapes that do not fit, an unknown mode, or a chunk without tokens.

    Source:
        Peng et al. 2023, section 3.1, arXiv 2305.13048, https://arxiv.org/abs/2305.13048
    """
    require_tokens(
        "rwkv4", time_decay=(time_decay, "C"), time_first=(time_first, "C"), key=(key, "B L C"), value=(value, "B L C")
    )
    batch, length, channels = key.shape
    mode, chunk_size, reset, valid = require_running("rwkv4", batch, length, **run)
    require_state("rwkv4", state, dict.fromkeys(("numerator", "denominator", "max"), (batch, channels)))
    dtype = state_dtype(key)
    (key, value), states, back = nan_in_its_document(1, (key, value), state or (), reset, valid)
    k, v, u, w = key.to(dtype), value.to(dtype), time_first.to(dtype), time_decay.to(dtype).exp()
    sums = Sums(*(x.to(dtype) for x in states)) if states else empty_sums(k[:, 0])
    tokens = Sums(v, torch.ones_like(v), k)
    if mode == "chunked" and usable("wkv.c", k):
        out, after = Loop.apply("wkv.c", {}, w, u, k, v, flags_of(reset, valid), torch.stack(sums))
        out, after = back(out.to(key.dtype), after.unbind())
        return out, tuple(after)
    clock = k.new_ones(1, length, 1) if valid is None else valid[..., None].to(dtype)
    tokens = tokens if valid is None else tokens.unless(~valid[..., None])
    reset = None if reset is None else reset[..., None]
    row = Row(tokens, w, clock, reset)
    if mode == "recurrent":
        before, sums = _steps(row, sums)
    else:
        before, sums = _chunked(row, sums, length if mode == "parallel" else chunk_size)
    out = join(before.unless(reset), Sums(v, torch.ones_like(v), u + k))
    out, after = back((out.numerator / out.denominator).to(key.dtype), sums)
    return out, tuple(after)


class Sums(NamedTuple):
    """numerator e^max = sum e^k v and denominator e^max = sum e^k over some tokens."""

    numerator: Tensor
    denominator: Tensor
    max: Tensor

    def later(self, exponent: Tensor) -> Sums:
        """After a decay by e^-exponent."""
        return Sums(self.numerator, self.denominator, self.max - exponent)

    def unless(self, dropped: Tensor | None) -> Sums:
        """Empty where `dropped` is True."""
        if dropped is None:
            return self
        numerator, denominator = (torch.where(dropped, 0, x) for x in self[:2])
        return Sums(numerator, denominator, torch.where(dropped, FLOOR, self.max))

    def at(self, *index: Any) -> Sums:
        return Sums(*(x[index] for x in self))


def empty_sums(like: Tensor) -> Sums:
    return Sums(torch.zeros_like(like), torch.zeros_like(like), torch.full_like(like, FLOOR))


def join(a: Sums, b: Sums) -> Sums:
    """The sums over the tokens of both."""
    top = torch.maximum(a.max, b.max)
    of_a, of_b = (a.max - top).exp(), (b.max - top).exp()
    return Sums(of_a * a.numerator + of_b * b.numerator, of_a * a.denominator + of_b * b.denominator, top)


def of_all(put: Callable[..., Tensor], *parts: Sums) -> Sums:
    """Sums put together along the tokens by torch.cat or torch.stack."""
    return Sums(*(put(x, 1) for x in zip(*parts, strict=True)))


class Row(NamedTuple):
    """The tokens of one call. clock: steps of decay per token, 1, or 0 for padding."""

    tokens: Sums  # [B, L, C], of one token each
    w: Tensor  # [C]
    clock: Tensor  # [B or 1, L, 1]
    reset: Tensor | None  # [B, L, 1]


# ---- three algorithms for the sums before each token and after the last ----
def _steps(row: Row, sums: Sums) -> tuple[Sums, Sums]:
    before, decay = [], row.clock * row.w
    for t in range(decay.shape[1]):
        sums = sums.unless(None if row.reset is None else row.reset[:, t])
        before.append(sums)
        sums = join(sums.later(decay[:, t]), row.tokens.at(slice(None), t))
    return of_all(torch.stack, *before), sums


def _doubled(row: Row, sums: Sums) -> tuple[Sums, Sums]:
    """Sums over 1, 2, 4, ... tokens up to each; the state counts as a token before the first."""
    after = of_all(torch.cat, sums.at(slice(None), None), row.tokens)
    clock = F.pad(row.clock.cumsum(1), (0, 0, 1, 0))
    document = None if row.reset is None else F.pad(row.reset.cumsum(1), (0, 0, 1, 0))
    step = 1
    while step < clock.shape[1]:
        dropped = None if document is None else document[:, step:] != document[:, :-step]
        earlier = after.at(slice(None), slice(None, -step)).later((clock[:, step:] - clock[:, :-step]) * row.w)
        joined = join(earlier.unless(dropped), after.at(slice(None), slice(step, None)))
        after, step = of_all(torch.cat, after.at(slice(None), slice(None, step)), joined), 2 * step
    return after.at(slice(None), slice(None, -1)), after.at(slice(None), -1)


def _chunked(row: Row, sums: Sums, size: int) -> tuple[Sums, Sums]:
    """Doubling within `size` tokens at a time."""
    before = []
    for start in range(0, row.clock.shape[1], size):
        here = slice(start, start + size)
        reset = None if row.reset is None else row.reset[:, here]
        of_chunk, sums = _doubled(Row(row.tokens.at(slice(None), here), row.w, row.clock[:, here], reset), sums)
        before.append(of_chunk)
    return of_all(torch.cat, *before), sums


@register_mixer("rwkv4")
class RWKV4(RecurrentMixer):
    """RWKV-4's time mixing: the layer, with the parameter names of its checkpoints.

        r, k, v = W (mu x_t + (1 - mu) x_{t-1}), with separate mu and W for r, k, v;   out = W_o(sigmoid(r) * rwkv4(k, v))

    The state is the last token, [B, 1, dim], and numerator, denominator and max of the weighted mean, [B, inner] each.

    Args:
        dim: width of x and of the output.
        inner: channels of r, k and v; None: dim.
        mode, chunk_size: as in `rwkv4`.

    Raises:
        ValueError: for sizes that are not positive.

    Source:
        Peng et al. 2023, section 3.1, arXiv 2305.13048, https://arxiv.org/abs/2305.13048
    """

    source = "Peng et al. 2023"
    undecayed = ("time_decay", "time_first", "time_mix_key", "time_mix_value", "time_mix_receptance")

    def __init__(self, dim: int, *, inner: int | None = None, mode: str = "chunked", chunk_size: int = 32):
        super().__init__(mode=mode, chunk_size=chunk_size)
        inner = dim if inner is None else inner
        self.dim, self.inner = dim, inner
        self.time_decay, self.time_first = (nn.Parameter(torch.empty(inner)) for _ in range(2))
        self.time_mix_key, self.time_mix_value, self.time_mix_receptance = (
            nn.Parameter(torch.empty(1, 1, dim)) for _ in range(3)
        )
        self.key, self.value, self.receptance = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.output = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as the authors do in the middle layer: decay increases from the first channel to the last."""
        depth, exact, device = 0.5, torch.float32, self.time_decay.device
        place = torch.linspace(0, 1, self.inner, dtype=exact, device=device)
        fill(self.time_decay, -5 + 8 * place ** (0.7 + 1.3 * depth))
        zigzag = 0.5 * ((torch.arange(self.inner, device=device) + 1) % 3 - 1)
        fill(self.time_first, math.log(0.3) + zigzag)
        channel = torch.arange(self.dim, dtype=exact, device=device) / self.dim
        fill(self.time_mix_key, channel ** (1 - depth))
        fill(self.time_mix_value, channel ** (1 - depth) + 0.3 * depth)
        fill(self.time_mix_receptance, channel ** (0.5 * (1 - depth)))

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
        last, *sums = (None,) if state is None else state
        before, last = previous(x, last, inputs.reset, inputs.valid)
        key = self.key(torch.lerp(before, x, self.time_mix_key))
        value = self.value(torch.lerp(before, x, self.time_mix_value))
        receptance = self.receptance(torch.lerp(before, x, self.time_mix_receptance)).sigmoid()
        sums = tuple(sums) or None
        wkv, sums = rwkv4(self.time_decay, self.time_first, key, value, state=sums, **self.options(inputs))
        return self.output(receptance * wkv), (last, *sums)
