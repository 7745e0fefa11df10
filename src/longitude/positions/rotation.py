"""Turning pairs of numbers by an angle, forward and backward, at about the price of copying them.

`formula` is what is meant. Eager mode pays for each of its six passes over memory, so `turned` has cheaper forms of it. Against
cloning q and k (H=8, D=64, L 1024 to 8192, one thread of a busy machine): formula 5 to 6, `halves` 2.2 to 3.7, `pairs` 1.3 to
1.6, compiled 1.1 to 1.6, the upper ends at L=1024, where 15 us of Python beside each call weigh most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude import c_compile

WORTH_COMPILING = 2**17  # numbers in a tensor; below that the calls cost more than the passes


class Angles(NamedTuple):
    cos: Tensor
    sin: Tensor


class RotaryTable(Angles):
    """cos and sin of the angle of each pair, [L, pairs] or [B, 1, L, pairs]: one table for all heads."""

    @cached_property
    def back(self) -> RotaryTable:
        """The turn by the negative angles, the gradient's; the inverse, where cos^2 + sin^2 = 1."""
        return RotaryTable(self.cos, -self.sin)

    @cached_property
    def complex(self) -> Tensor:
        return torch.complex(self.cos, self.sin)


def apply_rotary(x: Tensor, turn: RotaryTable, layout: str) -> Tensor:
    """X [B, H, L, 2 pairs] -> the same shape and dtype, turned in float32 or wider."""
    cos, sin = turn
    if x.dtype != cos.dtype:
        wider = torch.promote_types(x.dtype, cos.dtype)
        if wider != cos.dtype:
            turn = RotaryTable(cos.to(wider), sin.to(wider))
        if wider != x.dtype:
            return apply_rotary(x.to(wider), turn, layout).to(x.dtype)
        cos, sin = turn
    # Compilers fuse the formula themselves; and it alone broadcasts, has gradients of tables, and suits torch.func.
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if traced or cos.requires_grad or sin.requires_grad or not fits(x, cos):
        return formula(x, cos, sin, layout)
    if x.numel() < WORTH_COMPILING and not torch.is_grad_enabled():  # decoding: no call to spare
        return halves(x, cos, sin) if layout == "half" else pairs(x, turn.complex)
    return Rotation.apply(x, (turn, layout == "half"))


def formula(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos)"""
    between = -2 if layout == "half" else -1  # the dimension that tells a from b
    a, b = x.unflatten(-1, (2, -1) if layout == "half" else (-1, 2)).unbind(between)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], between).flatten(-2)


def fits(x: Tensor, table: Tensor) -> bool:
    """Whether the table has a row for each token of x [B, H, L, 2 pairs]."""
    *rows, length, pairs = table.shape
    return x.dim() == 4 and x.shape[2:] == (length, 2 * pairs) and (not rows or rows in ([x.shape[0], 1], [1, 1]))


class Rotation(torch.autograd.Function):
    """The gradient of a turn is the turn back, of whatever order; nothing of x is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[RotaryTable, bool]) -> Tensor:
        ctx.turn, ctx.half = turn, half = how
        cos, sin = turn
        plain = x.dtype == cos.dtype == torch.float32 and x.stride(3) == 1 and x.device.type == "cpu"
        if plain and x.numel() >= WORTH_COMPILING and compiled() is not None:
            return torch.ops.longitude.turn.default(x, cos, sin, half)
        return halves(x, cos, sin) if half else pairs(x, turn.complex)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Rotation.apply(gradient, (ctx.turn.back, ctx.half)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Rotation.apply(tangent, (ctx.turn, ctx.half))


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The half layout in four passes over half of x, without room for products: some tokens at a time, which stay in cache."""
    out = torch.empty_like(x)
    for some, here, c, s in zip(*(t.split(256, -2) for t in (x, out, cos, sin)), strict=True):
        (a, b), (turned_a, turned_b) = some.chunk(2, -1), here.chunk(2, -1)
        torch.mul(a, c, out=turned_a).addcmul_(b, s, value=-1)
        torch.mul(b, c, out=turned_b).addcmul_(a, s)
    return out


def pairs(x: Tensor, turn: Tensor) -> Tensor:
    """The interleaved layout as one product of complex numbers, a + ib times cos + i sin."""
    x = even(x)
    out = torch.empty_like(x)
    torch.mul(x.view(turn.dtype), turn, out=out.view(turn.dtype))
    return out


def even(x: Tensor) -> Tensor:
    """X itself if its memory can be read as complex numbers, else a copy."""
    readable = x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
    return x if readable else x.clone(memory_format=torch.contiguous_format)


# ---- one pass, where there is a compiler -----------------------------------------------------------------------------
@lru_cache(maxsize=1)
def compiled() -> Callable[..., None] | None:
    """turn.c as a function; None where it cannot be compiled."""
    library = c_compile.library(Path(__file__).with_name("turn.c"), "-ffp-contract=off")
    if library is None:
        return None
    found = library.turn
    found.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 11 + [ctypes.c_int] * 2
    found.restype = None
    return found


def empty_like_heads(x: Tensor) -> Tensor:
    """For a result laid out as x, the numbers of a head side by side."""
    out = torch.empty_like(x)
    return out if out.stride(3) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


# An operator, so that whoever traces, fakes or profiles torch sees one.
torch.library.define("longitude::turn", "(Tensor x, Tensor cos, Tensor sin, bool half) -> Tensor")


@torch.library.impl("longitude::turn", "cpu")
def _(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    run = compiled()
    assert run is not None
    out, cos, sin = empty_like_heads(x), cos.contiguous(), sin.contiguous()
    each = cos.stride(0) if cos.dim() == 4 and cos.shape[0] > 1 else 0
    data = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
    run(*data, *x.shape[:3], cos.shape[-1], *x.stride()[:3], *out.stride()[:3], each, half, torch.get_num_threads())
    return out


@torch.library.register_fake("longitude::turn")
def _(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    return empty_like_heads(x)
