"""Rotating pairs of numbers by an angle, forward and backward, at about the cost of copying them.

`rotate_by_formula` is the definition. Eager mode makes six passes over memory for it. `rotate.c` makes one for all tensors of the
same tokens, on all cores; so does gpu/rotate.py on a GPU. Without either `rotate_halves` makes two, and `rotate_neighbours` one.
`make bench` measures them relative to a clone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from longitude.errors import UsageError, check_choice, check_sizes
from longitude.native import load
from longitude.native.derivatives import in_forward_mode, recorded
from longitude.native.gpu import switched_off, why_no_triton, why_not_on
from longitude.native.tensors import Signature, in_memory, needs_operator

WORTH_THREADS = 2**17  # numbers; for fewer, waking threads costs more than the pass
FEW = 2**13  # numbers; for fewer, torch's complex product is faster than a call of rotate.c
IN_CACHE = 2**18  # numbers that two passes of `rotate_halves` process at a time
KINDS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
"""Dtypes that rotate.c supports, with float32 tables, and their macros there."""


Layout = Literal["half", "interleaved"]
"""Which dimensions of a head are a pair: (k, k + rotary_dim/2), or (2k, 2k+1)."""


class Angles(NamedTuple):
    cos: Tensor
    sin: Tensor


def by_heads(table: Angles, heads: int) -> Angles:
    """A table [..., kv_heads, L, pairs] repeated for `heads` query heads: each has that of its key head."""
    group = heads // table.cos.shape[-3]
    return Angles(*(part.repeat_interleave(group, -3) for part in table)) if group > 1 else table


class RotaryTable(Angles):
    """cos and sin of the angle of each pair, [L, pairs] or [B, 1, L, pairs]: one table for all heads."""

    @cached_property
    def back(self) -> RotaryTable:
        """The rotation by the negative angles, which gradients need; it is the inverse if cos^2 + sin^2 = 1."""
        return RotaryTable(self.cos, -self.sin)

    @cached_property
    def complex(self) -> Tensor:
        return torch.complex(self.cos, self.sin)

    @cached_property
    def twice(self) -> Tensor:
        """Cos of both halves of a head, for the half layout."""
        return torch.cat([self.cos, self.cos], -1)

    def to(self, dtype: torch.dtype) -> RotaryTable:
        return self if self.cos.dtype == dtype else RotaryTable(self.cos.to(dtype), self.sin.to(dtype))


def table_of(angles: Tensor, dtype: torch.dtype, factor: float = 1.0) -> RotaryTable:
    """Cos and sin of angles, times a factor, in float32 or wider. Numbers, not buffers: nothing to save or to round."""
    dtype, cos, sin = torch.promote_types(dtype, torch.float32), angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return RotaryTable(cos.to(dtype), sin.to(dtype))


def inverse(table: RotaryTable) -> RotaryTable:
    """The inverse rotation, also if cos and sin have a common factor."""
    square = table.cos.square() + table.sin.square()
    return RotaryTable(table.cos / square, -table.sin / square)


def apply_rotary(x: Tensor, table: RotaryTable, layout: str) -> Tensor:
    """Rotate x [B, H, L, 2 pairs] in float32 or wider; shape and dtype stay the same."""
    return rotated((x,), table, layout)[0]


def rotated(tensors: tuple[Tensor, ...], table: RotaryTable, layout: str) -> tuple[Tensor, ...]:
    """Rotate tensors of the same tokens as `apply_rotary` does, in one pass over memory if there is a C compiler.

    If a tensor is wider than 2 pairs, the rest of each head is copied.
    """
    # torch.compile fuses the formula itself. Only the formula has gradients of tables and supports torch.func.
    traced = needs_operator(*tensors)
    if not traced and layout == "interleaved" and not torch.is_grad_enabled() and sum(map(Tensor.numel, tensors)) < FEW:
        return one_by_one(tensors, table, layout, rotate_neighbours)  # a generated token: each call counts
    learned = table.cos.requires_grad or table.sin.requires_grad
    if traced or learned or not all(fits(x, table.cos) for x in tensors):
        return one_by_one(tensors, table, layout, rotate_by_formula)
    if any(x.shape[0] != tensors[0].shape[0] for x in tensors):  # a pass has one batch size
        return tuple(apply_rotary(x, table, layout) for x in tensors)
    return (Rotation.apply if recorded(*tensors) or in_forward_mode() else unrecorded)((table, layout), *tensors)


def one_by_one(
    tensors: tuple[Tensor, ...], table: RotaryTable, layout: str, rotate: Callable[[Tensor, RotaryTable, str], Tensor]
) -> tuple[Tensor, ...]:
    """Rotate each in the wider of its dtype and the table's; dimensions beyond the table's pairs are copied."""
    width, out = 2 * table.cos.shape[-1], []
    for x in tensors:
        if x.dtype == table.cos.dtype and x.shape[-1] == width:
            out.append(rotate(x, table, layout))
            continue
        dtype = torch.promote_types(x.dtype, table.cos.dtype)
        first = rotate(x[..., :width].to(dtype), table.to(dtype), layout).to(x.dtype)
        out.append(first if width >= x.shape[-1] else torch.cat([first, x[..., width:]], -1))
    return tuple(out)


def rotate_by_formula(x: Tensor, table: Angles, layout: str) -> Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos)."""
    between, (cos, sin) = -2 if layout == "half" else -1, table  # between: the dimension of the two numbers of a pair
    a, b = x.unflatten(-1, (2, -1) if layout == "half" else (-1, 2)).unbind(between)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], between).flatten(-2)


def fits(x: Tensor, table: Tensor) -> bool:
    """Whether the table has a row for each token of x [B, H, L, 2 pairs or more]."""
    *rows, length, pairs = table.shape
    of_tokens = x.dim() == 4 and x.shape[2] == length and x.shape[3] >= 2 * pairs
    return of_tokens and (not rows or rows in ([x.shape[0], 1], [1, 1]))


@lru_cache
def _signature(kernel: str, count: int, dim: int) -> Signature:
    rows = "rows 1 L pairs" if dim == 4 else "L pairs"
    shapes = {f"x{n}": f"dtype B heads{n} L width{n}" for n in range(count)}
    shapes |= {"cos": f"float32 {rows}", "sin": f"float32 {rows}"}

    def fits(of: dict[str, Any]) -> bool:
        return of.get("rows", 1) in (1, of["B"]) and all(of[f"width{n}"] >= 2 * of["pairs"] for n in range(count))

    return Signature(
        kernel, shapes, fits, "rows of angles for each sequence, or for all, and heads of 2 pairs or wider"
    )


def require_rows(kernel: str, tensors: Sequence[Tensor], table: Angles) -> None:
    """Raise UsageError unless a kernel can rotate all tensors by the rows of a table [L, pairs] or [B or 1, 1, L, pairs]."""
    _signature(kernel, len(tensors), table.cos.dim()).require((*tensors, *table))


class Rotation(torch.autograd.Function):
    """A rotation with gradients of any order: each is the rotation back, for which no input is saved."""

    @staticmethod
    def forward(ctx: Any, how: tuple[RotaryTable, str], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how
        return unrecorded(how, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        table, layout = ctx.how
        wanted = ctx.needs_input_grad[1:]
        recorded = torch.is_grad_enabled() or in_forward_mode()
        rotate = Rotation.apply if recorded else unrecorded
        back = iter(rotate((table.back, layout), *(g for g, need in zip(gradients, wanted, strict=True) if need)))
        return None, *(next(back) if need else None for need in wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Rotation.apply(ctx.how, *tangents)


def unrecorded(how: tuple[RotaryTable, str], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Rotate outside of autograd, by the fastest code that supports the tensors."""
    (table, layout), dtype, device = how, tensors[0].dtype, tensors[0].device
    known = dtype in KINDS and table.cos.dtype == torch.float32
    known = known and all(x.dtype == dtype for x in tensors)
    if known and in_memory(*tensors) and (run := compiled(dtype)) is not None:
        return rotate_in_one_pass(run, tensors, table, layout)
    if known and device.type == "cuda" and len(tensors) <= 2 and (launch := launched(device, dtype)) is not None:
        return launch(tensors, table, layout)
    return one_by_one(tensors, table, layout, rotate_halves if layout == "half" else rotate_neighbours)


def rotate_halves(x: Tensor, table: RotaryTable, layout: str = "half") -> Tensor:
    """Rotate the half layout in two passes, over as many tokens at a time as fit in cache."""
    out, most = torch.empty_like(x), max(1, IN_CACHE * x.shape[2] // max(1, x.numel()))
    for tokens, rotated, cos, sin in zip(*(t.split(most, -2) for t in (x, out, table.twice, table.sin)), strict=True):
        (a, b), (out_a, out_b) = tokens.chunk(2, -1), rotated.chunk(2, -1)
        torch.mul(tokens, cos, out=rotated)
        out_a.addcmul_(b, sin, value=-1)
        out_b.addcmul_(a, sin)
    return out


def rotate_neighbours(x: Tensor, table: RotaryTable, layout: str = "interleaved") -> Tensor:
    """Rotate the interleaved layout by one product of complex numbers, a + ib times cos + i sin."""
    unit = table.complex
    try:
        pairs = x.view(unit.dtype)
    except RuntimeError:  # its memory cannot be read as complex numbers
        pairs = x.clone(memory_format=torch.contiguous_format).view(unit.dtype)
    return (pairs * unit).view(x.dtype)


@lru_cache
def launched(device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[Tensor, ...]] | None:
    """`gpu.rotate.rotate` if it runs on this GPU, else None; one warning if a test call fails."""
    if why_no_triton() is not None or "triton" in switched_off():
        return None

    def small_call() -> None:
        x, angle = torch.zeros(1, 1, 1, 2, dtype=dtype, device=device), torch.zeros(1, 1, device=device)
        rotate()((x, x), Angles(angle, angle), "half")

    def rotate() -> Callable[..., tuple[Tensor, ...]]:
        return import_module("longitude.positions.gpu.rotate").rotate

    return None if why_not_on(device, "rotation in Triton", small_call) else rotate()


# ---- one pass, if there is a C compiler ------------------------------------------------------------------------------
@lru_cache
def compiled(dtype: torch.dtype) -> Callable[..., None] | None:
    """rotate.c for numbers of this dtype; None if it cannot be compiled."""
    library = load.library(Path(__file__).with_name("rotate.c"), "-ffp-contract=off", f"-D{KINDS[dtype]}")
    if library is None:
        return None
    library.rotate.restype = None
    return library.rotate


def rotate_in_one_pass(
    run: Callable[..., None], tensors: tuple[Tensor, ...], table: RotaryTable, layout: str
) -> tuple[Tensor, ...]:
    """Rotate all tensors in one call, with the numbers of rotate.c's struct Call as its argument."""
    require_rows("rotation in C", tensors, table)
    (cos, sin), (B, _, L, _) = table, tensors[0].shape
    cos, sin = cos.contiguous(), sin.contiguous()
    pairs, each = cos.shape[-1], cos.stride(0) if cos.dim() == 4 and cos.shape[0] > 1 else 0
    threads = torch.get_num_threads() if sum([x.numel() for x in tensors]) >= WORTH_THREADS else 1
    call = [cos.data_ptr(), sin.data_ptr(), B, L, pairs, each, layout == "half", threads, len(tensors)]
    kept, out = [], []
    for x in tensors:
        if x.stride(3) != 1:
            kept.append(x := x.contiguous())  # alive until rotate.c has read it
        out.append(y := empty_like_heads(x))
        (_, heads, _, width), (xb, xh, xl, _), (yb, yh, yl, _) = x.shape, x.stride(), y.stride()
        call += [x.data_ptr(), y.data_ptr(), heads, width - 2 * pairs, xb, xh, xl, yb, yh, yl]
    run(load.struct_of(call))
    return tuple(out)


def empty_like_heads(x: Tensor) -> Tensor:
    """An empty tensor in the memory order of x, but with the numbers of each head contiguous."""
    out = torch.empty_like(x)
    return out if out.stride(3) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


# ---- the other layout --------------------------------------------------------------------------------------------------
def pair_order(rotary_dim: int, to: str) -> Tensor:
    """The permutation of a rotary block [rotary_dim]: dimension d of layout `to` is dimension pair_order[d] of the other.

    to="half": 0, 2, 4, ..., 1, 3, 5, ...    to="interleaved", its inverse: 0, n, 1, n+1, ..., where n = rotary_dim/2.
    """
    check_sizes("pair_order", rotary_dim=rotary_dim)
    check_choice("pair_order", Layout, to=to)
    if rotary_dim % 2:
        raise UsageError("pair_order", "an even rotary_dim", rotary_dim, "dimensions rotate in pairs")
    return torch.arange(rotary_dim).view((-1, 2) if to == "half" else (2, -1)).T.flatten()


def convert_layout(weight: Tensor, head_dim: int, to: str, rotary_dim: int | None = None) -> Tensor:
    """Convert a projection weight of queries or keys to the other rotary layout. Exactly a permutation of rows.

    Scores stay the same. Leave values and outputs unless they rotate too (rotate_values): then convert v_proj, and the columns
    of o_proj.

    Args:
        weight: a projection [heads * head_dim, in], its bias [heads * head_dim], or a norm inside heads [head_dim]; any number
            of heads, as grouped keys have fewer.
        head_dim: width of a head.
        to: the wanted layout, "half" or "interleaved".
        rotary_dim: only the first rotary_dim dimensions of each head rotate, the others stay in place; default: all.

    Returns:
        The weight with its rows permuted inside each head, of the same shape and dtype.

    Raises:
        ValueError: rows that are no multiple of head_dim, an odd or too large rotary_dim, an unknown layout.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    check_sizes("convert_layout", head_dim=head_dim, rotary_dim=rotary_dim)
    if rotary_dim > head_dim:
        raise UsageError("convert_layout", f"a rotary_dim of at most head_dim={head_dim}", rotary_dim)
    if not isinstance(weight, Tensor):
        raise UsageError("convert_layout", f"a tensor [heads * {head_dim}, ...]", repr(weight))
    if weight.dim() < 1 or not len(weight) or len(weight) % head_dim:
        remedy = "split fused projections into queries, keys and values first"
        raise UsageError("convert_layout", f"a multiple of head_dim={head_dim} rows", list(weight.shape), remedy)
    order = torch.cat([pair_order(rotary_dim, to), torch.arange(rotary_dim, head_dim)]).to(weight.device)
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
