"""The weighted mean of RWKV-4: each channel's values, weighted by their keys and by a decay with the distance."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from longitude.recurrent.base import require_flags, require_mode, require_state, require_tokens, state_dtype
from longitude.recurrent.ops.c_loops import WkvLoop, flags_of, usable
from longitude.recurrent.ops.linear_scan import linear_scan

FLOOR = -1e38
"""The exponent of a sum of nothing: finite, so that no difference of two of them is NaN."""


def rwkv4(
    time_decay: Float[Tensor, " C"],
    time_first: Float[Tensor, " C"],
    key: Float[Tensor, "B L C"],
    value: Float[Tensor, "B L C"],
    *,
    mode: str = "chunked",
    chunk_size: int = 32,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B L C"], tuple[Tensor, Tensor, Tensor]]:
    """wkv_t = (sum_{i<t} e^{-(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same without v), w = exp(time_decay), u = time_first.

    -> wkv, and the sums after the last token: numerator and denominator, both over e^max, and max, [B, C] each, float32 or
    wider (Peng et al. 2023, RWKV-4). Keys of any size do not overflow.

    mode: "recurrent" takes one token after the other; "chunked" goes through all pieces of chunk_size tokens side by side, then
    from piece to piece; "parallel" joins sums of 1, 2, 4, ... tokens. All give the same numbers. state: what an earlier call
    returned. reset: tokens that hear nothing before them; valid: False for tokens that leave the state as it is.
    ValueError where shapes do not fit.
    """
    require_mode("rwkv4", mode, chunk_size)
    require_tokens(
        "rwkv4",
        time_decay=(time_decay, "C"),
        time_first=(time_first, "C"),
        key=(key, "B L C"),
        value=(value, "B L C"),
    )
    batch, length, channels = key.shape
    require_flags("rwkv4", batch, length, reset=reset, valid=valid)
    require_state("rwkv4", state, dict.fromkeys(("numerator", "denominator", "max"), (batch, channels)))
    dtype = state_dtype(key)
    k, v, u, w = key.to(dtype), value.to(dtype), time_first.to(dtype), time_decay.to(dtype).exp()
    sums = nothing(k[:, 0]) if state is None else Sums(*(x.to(dtype) for x in state))
    tokens = Sums(v, torch.ones_like(v), k)
    if mode == "chunked" and usable("wkv.c", k):
        out, after = WkvLoop.apply(w, u, k, v, flags_of(reset, valid), torch.stack(sums))
        return out.to(key.dtype), after.unbind()
    passed = k.new_ones(1, length, 1) if valid is None else valid[..., None].to(dtype)
    tokens = tokens if valid is None else tokens.unless(~valid[..., None])
    line = Line(tokens, w, passed, None if reset is None else reset[..., None])
    if mode == "parallel":
        before, sums = _doubled(line, sums)
    elif mode == "chunked":
        before, sums = _pieces(line, sums, chunk_size)
    else:
        before, sums = _steps(line, sums)
    if reset is not None:
        before = before.unless(reset[..., None])
    out = join(before, Sums(v, torch.ones_like(v), u + k))
    return (out.numerator / out.denominator).to(key.dtype), (sums.numerator, sums.denominator, sums.max)


class Sums(NamedTuple):
    """numerator e^max = sum e^k v and denominator e^max = sum e^k over some tokens."""

    numerator: Tensor
    denominator: Tensor
    max: Tensor

    def later(self, exponent: Tensor) -> Sums:
        """After a decay by e^-exponent."""
        return Sums(self.numerator, self.denominator, self.max - exponent)

    def unless(self, gone: Tensor | None) -> Sums:
        """Nothing where `gone` says so."""
        if gone is None:
            return self
        numerator, denominator = (torch.where(gone, 0, x) for x in self[:2])
        return Sums(numerator, denominator, torch.where(gone, FLOOR, self.max))

    def part(self, *places: Any) -> Sums:
        numerator, denominator, top = (x[places] for x in self)
        return Sums(numerator, denominator, top)


def nothing(like: Tensor) -> Sums:
    """The sums over no token."""
    return Sums(torch.zeros_like(like), torch.zeros_like(like), torch.full_like(like, FLOOR))


def join(a: Sums, b: Sums) -> Sums:
    """The sums over the tokens of both."""
    top = torch.maximum(a.max, b.max)
    of_a, of_b = (a.max - top).exp(), (b.max - top).exp()
    return Sums(of_a * a.numerator + of_b * b.numerator, of_a * a.denominator + of_b * b.denominator, top)


def along(dim: int, *parts: Sums) -> Sums:
    """One behind the other."""
    return Sums(*(torch.cat(x, dim) for x in zip(*parts, strict=True)))


class Line(NamedTuple):
    """The tokens of one call. passed: how many steps of decay each of them is, 1, or 0 for padding."""

    tokens: Sums  # [B, L, C], of one token each
    w: Tensor  # [C]
    passed: Tensor  # [B or 1, L, 1]
    reset: Tensor | None  # [B, L, 1]


# ---- three ways to the sums before each token, and after the last ----
def _steps(line: Line, sums: Sums) -> tuple[Sums, Sums]:
    passed = line.passed * line.w
    before = []
    for t, token in enumerate(zip(*(x.unbind(1) for x in (passed, *line.tokens)), strict=True)):
        sums = sums.unless(None if line.reset is None else line.reset[:, t])
        before.append(sums)
        sums = join(sums.later(token[0]), Sums(*token[1:]))
    return Sums(*(torch.stack(x, 1) for x in zip(*before, strict=True))), sums


def _doubled(line: Line, sums: Sums) -> tuple[Sums, Sums]:
    """Sums over 1, 2, 4, ... tokens up to each, the state being a token before the first."""
    after = along(1, sums.part(slice(None), None), line.tokens)
    clock = F.pad(line.passed.cumsum(1), (0, 0, 1, 0))
    document = None if line.reset is None else F.pad(line.reset.cumsum(1), (0, 0, 1, 0))
    step = 1
    while step < clock.shape[1]:
        gone = None if document is None else document[:, step:] != document[:, :-step]
        earlier = after.part(slice(None), slice(None, -step))
        earlier = earlier.later((clock[:, step:] - clock[:, :-step]) * line.w).unless(gone)
        joined = join(earlier, after.part(slice(None), slice(step, None)))
        after, step = along(1, after.part(slice(None), slice(None, step)), joined), 2 * step
    return after.part(slice(None), slice(None, -1)), after.part(slice(None), -1)


def _pieces(line: Line, sums: Sums, size: int) -> tuple[Sums, Sums]:
    """Pieces of one size, side by side, then what is left."""
    length = line.passed.shape[1]
    whole = length // size * size
    before = []
    for start, stop, piece in ((0, whole, size), (whole, length, length - whole)):
        if start < stop:
            here = slice(None), slice(start, stop)
            reset = None if line.reset is None else line.reset[here]
            some, sums = _side_by_side(Line(line.tokens.part(*here), line.w, line.passed[here], reset), sums, piece)
            before.append(some)
    return along(1, *before), sums


def _side_by_side(line: Line, sums: Sums, size: int) -> tuple[Sums, Sums]:
    """The sums inside each piece, as a scan of all pieces at once; then what comes into each from those before."""

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, size)).permute(2, 0, 1, 3)  # [size, B, pieces, C]

    tokens, passed = Sums(*(cut(x) for x in line.tokens)), cut(line.passed) * line.w
    reset = None if line.reset is None else cut(line.reset)
    top = torch.full_like(tokens.max[0], FLOOR)
    tops, decayed = [], []
    for t in range(size):
        top = top if reset is None else torch.where(reset[t], FLOOR, top)
        decayed.append(top - passed[t])
        top = torch.maximum(decayed[t], tokens.max[t])
        tops.append(top)
    tops = torch.stack(tops)
    a, b = (torch.stack(decayed) - tops).exp(), (tokens.max - tops).exp()
    b = torch.stack([b * tokens.numerator, b * tokens.denominator], 1)
    both = linear_scan(a[:, None], b, torch.zeros_like(b[0]))
    inside = Sums(both[:, 0], both[:, 1], tops)

    since = passed.cumsum(0)
    cut_off = None if reset is None else reset.cumsum(0) > 0
    starts = []
    for piece in range(tops.shape[2]):
        starts.append(sums)
        gone = None if cut_off is None else cut_off[-1, :, piece]
        sums = join(sums.later(since[-1, :, piece]).unless(gone), inside.part(-1, slice(None), piece))
    start = Sums(*(torch.stack(x, 1) for x in zip(*starts, strict=True)))  # [B, pieces, C]
    after = join(start.later(since).unless(cut_off), inside)
    before = along(0, start.part(None), after.part(slice(None, -1)))
    return Sums(*(x.permute(1, 2, 0, 3).flatten(1, 2) for x in before)), sums
