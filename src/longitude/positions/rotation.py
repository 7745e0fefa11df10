"""Rotating pairs of numbers by an angle, forward and backward, at about the cost of copying them.

`rotate_by_formula` is the definition. Eager mode makes six passes over memory, so `apply_rotary` has cheaper
forms of it. Compared with cloning q and k (H=8, D=64, L 1024 to 8192, one thread of a busy machine): the formula 5 to 6,
`rotate_halves` 2.2 to 3.7, `rotate_neighbours` 1.3 to 1.6, compiled 1.1 to 1.6, the upper ends at L=1024, where 15 us of Python
for each call weigh most.
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
        """The rotation by the negative angles, the gradient's; the inverse, where cos^2 + sin^2 = 1."""
        return RotaryTable(self.cos, -self.sin)

    @cached_property
    def complex(self) -> Tensor:
        return torch.complex(self.cos, self.sin)

    @cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Cos and sin for whole heads in the half layout, sin with the sign of the first half."""
        return torch.cat([self.cos, self.cos], -1), torch.cat([-self.sin, self.sin], -1)


def apply_rotary(x: Tensor, table: RotaryTable, layout: str) -> Tensor:
    """X [B, H, L, 2 pairs] -> the same shape and dtype, rotated in float32 or wider."""
    cos, sin = table
    if x.dtype != cos.dtype:
        wider = torch.promote_types(x.dtype, cos.dtype)
        if wider != cos.dtype:
            table = RotaryTable(cos.to(wider), sin.to(wider))
        if wider != x.dtype:
            return apply_rotary(x.to(wider), table, layout).to(x.dtype)
        cos, sin = table
    # Compilers fuse the formula themselves; and it alone has gradients of tables, and suits torch.func.
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    short = x.numel() < WORTH_COMPILING and not torch.is_grad_enabled()  # decoding: no call to spare
    if short and not traced:
        return rotate_neighbours(x, table.complex) if layout == "interleaved" else rotate_few_halves(x, *table.halves)
    if traced or cos.requires_grad or sin.requires_grad or not fits(x, cos):
        return rotate_by_formula(x, cos, sin, layout)
    return Rotation.apply(x, (table, layout == "half"))


def rotate_by_formula(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos)."""
    between = -2 if layout == "half" else -1  # the dimension of the two numbers of a pair
    a, b = x.unflatten(-1, (2, -1) if layout == "half" else (-1, 2)).unbind(between)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], between).flatten(-2)


def fits(x: Tensor, table: Tensor) -> bool:
    """Whether the table has a row for each token of x [B, H, L, 2 pairs]."""
    *rows, length, pairs = table.shape
    return x.dim() == 4 and x.shape[2:] == (length, 2 * pairs) and (not rows or rows in ([x.shape[0], 1], [1, 1]))


class Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, of any order; nothing of x is saved for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[RotaryTable, bool]) -> Tensor:
        ctx.table, ctx.half = table, half = how
        cos, sin = table
        plain = x.dtype == cos.dtype == torch.float32 and x.stride(3) == 1 and x.device.type == "cpu"
        if plain and x.numel() >= WORTH_COMPILING and compiled() is not None:
            return torch.ops.longitude.rotate.default(x, cos, sin, half)
        return rotate_halves(x, cos, sin) if half else rotate_neighbours(x, table.complex)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Rotation.apply(gradient, (ctx.table.back, ctx.half)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Rotation.apply(tangent, (ctx.table, ctx.half))


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The half layout in four passes over half of x, without memory for products: some tokens at a time, which stay in cache."""
    out = torch.empty_like(x)
    for tokens, rotated, c, s in zip(*(t.split(256, -2) for t in (x, out, cos, sin)), strict=True):
        (a, b), (out_a, out_b) = tokens.chunk(2, -1), rotated.chunk(2, -1)
        torch.mul(a, c, out=out_a).addcmul_(b, s, value=-1)
        torch.mul(b, c, out=out_b).addcmul_(a, s)
    return out


def rotate_few_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The half layout in the fewest calls, for few tokens."""
    a, b = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([b, a], -1), sin)


def rotate_neighbours(x: Tensor, unit: Tensor) -> Tensor:
    """The interleaved layout as one product of complex numbers, a + ib times cos + i sin."""
    try:
        pairs = x.view(unit.dtype)
    except RuntimeError:  # its memory cannot be read as complex numbers
        pairs = x.clone(memory_format=torch.contiguous_format).view(unit.dtype)
    return (pairs * unit).view(x.dtype)


# ---- one pass, where there is a compiler -----------------------------------------------------------------------------
@lru_cache(maxsize=1)
def compiled() -> Callable[..., None] | None:
    """rotate.c as a function; None where it cannot be compiled."""
    library = c_compile.library(Path(__file__).with_name("rotate.c"), "-ffp-contract=off")
    if library is None:
        return None
    function = library.rotate
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 11 + [ctypes.c_int] * 2
    function.restype = None
    return function


def empty_like_heads(x: Tensor) -> Tensor:
    """Memory for a result laid out as x, the numbers of a head next to each other."""
    out = torch.empty_like(x)
    return out if out.stride(3) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


# An operator, so that tracing, fake tensors and profilers have one.
torch.library.define("longitude::rotate", "(Tensor x, Tensor cos, Tensor sin, bool half) -> Tensor")


@torch.library.impl("longitude::rotate", "cpu")
def _(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    run = compiled()
    assert run is not None
    out, cos, sin = empty_like_heads(x), cos.contiguous(), sin.contiguous()
    each = cos.stride(0) if cos.dim() == 4 and cos.shape[0] > 1 else 0
    data = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
    run(*data, *x.shape[:3], cos.shape[-1], *x.stride()[:3], *out.stride()[:3], each, half, torch.get_num_threads())
    return out


@torch.library.register_fake("longitude::rotate")
def _(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    return empty_like_heads(x)
