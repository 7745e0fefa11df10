"""scan.c, wkv.c and diagonal.c as functions with gradients. A state in the processor's cache costs no pass over memory."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longitude import c_compile


class Loops(NamedTuple):
    forward: Any
    backward: Any


@lru_cache
def loops(name: str, dtype: torch.dtype) -> Loops | None:
    """The functions of a file for float32 or float64; None where it cannot be compiled."""
    options = ("-DDOUBLE",) if dtype == torch.float64 else ()
    library = c_compile.library(Path(__file__).with_name(name), *options)
    if library is None:
        return None
    found = Loops(library.forward, library.backward)
    for function in found:
        function.restype = None
    return found


def usable(name: str, x: Tensor) -> bool:
    """Whether the loops of a file can take x and its like."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and loops(name, x.dtype) is not None


def _call(function: Any, shape: ctypes.Structure, *data: Tensor | None) -> None:
    assert all(x is None or x.is_contiguous() for x in data)
    function(ctypes.byref(shape), *(c_void_p(None if x is None else x.data_ptr()) for x in data))


class _Scan(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "length", "groups", "channels", "size", "chunk")),
        ("threads", ctypes.c_int),
    ]


class ScanLoop(torch.autograd.Function):
    """dt, x [B, L, G, P], A [G, N, P], B, C [B, L, G, N], keep [B, L] uint8 or None, h [B, G, N, P] -> y [B, L, G, P], h after.

    Backward keeps the inputs alone, and goes through the tokens twice more, `chunk` of them at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor, keep: Any, h: Tensor, chunk: int
    ) -> Any:
        data = [t.contiguous() for t in (dt, x, A, B, C)]
        first = h.contiguous()
        batch, length, groups, channels = dt.shape
        ctx.shape = _Scan(batch, length, groups, channels, A.shape[1], min(chunk, length), torch.get_num_threads())
        y, last = torch.empty_like(data[0]), torch.empty_like(first)
        run = loops("scan.c", dt.dtype)
        assert run is not None
        _call(run.forward, ctx.shape, *data, keep, first, y, last)
        ctx.save_for_backward(*data, keep, first)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *data, keep, first = ctx.saved_tensors
        dt, x, A, *_ = data
        batch, length, groups, channels = dt.shape
        tasks = -(-channels // LANES)
        gdt, gx, gfirst, gA = (torch.empty_like(t) for t in (dt, x, first, first))
        gB, gC = dt.new_empty(2, batch, groups, tasks, length, A.shape[1]).unbind()
        run = loops("scan.c", dt.dtype)
        assert run is not None
        gy, glast = (g.contiguous() for g in grads)
        _call(run.backward, ctx.shape, *data, keep, first, gy, glast, gdt, gx, gA, gB, gC, gfirst)
        gB, gC = (g.sum(2).transpose(1, 2) for g in (gB, gC))
        return gdt, gx, gA.sum(0), gB, gC, None, gfirst, None


LANES = 16
"""Channels side by side, as lanes.h has them."""


class _Wkv(ctypes.Structure):
    _fields_ = [*((name, c_int64) for name in ("batch", "length", "channels")), ("threads", ctypes.c_int)]


class WkvLoop(torch.autograd.Function):
    """w, u [C], k, v [B, L, C], flags [B, L] uint8 or None (1: begins a document, 2: padding), state [3, B, C]
    -> out [B, L, C], the state after.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, u: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, state: Tensor) -> Any:
        data = [t.contiguous() for t in (w, u, k, v)]
        first = state.contiguous()
        ctx.shape = _Wkv(*k.shape, torch.get_num_threads())
        out, last = torch.empty_like(data[2]), torch.empty_like(first)
        run = loops("wkv.c", k.dtype)
        assert run is not None
        _call(run.forward, ctx.shape, *data, flags, first, out, last)
        ctx.save_for_backward(*data, flags, first)
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *data, flags, first = ctx.saved_tensors
        k = data[2]
        gw, gu = k.new_empty(2, k.shape[0], k.shape[2]).unbind()
        gk, gv, gfirst = torch.empty_like(k), torch.empty_like(k), torch.empty_like(first)
        run = loops("wkv.c", k.dtype)
        assert run is not None
        gout, glast = (g.contiguous() for g in grads)
        _call(run.backward, ctx.shape, *data, flags, first, gout, glast, gw, gu, gk, gv, gfirst)
        return gw.sum(0), gu.sum(0), gk, gv, None, gfirst


class _Diagonal(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "length", "channels", "size", "chunk")),
        ("threads", ctypes.c_int),
    ]


class DiagonalLoop(torch.autograd.Function):
    """u [B, L, H], r, B, C [2, n, H], real and imaginary, flags as WkvLoop has them, h [B, 2, n, H] -> y [B, L, H], h after."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, r: Tensor, B: Tensor, C: Tensor, flags: Any, h: Tensor, chunk: int) -> Any:
        data = [t.contiguous() for t in (u, r, B, C)]
        first = h.contiguous()
        ctx.shape = _Diagonal(*u.shape, r.shape[1], min(chunk, u.shape[1]), torch.get_num_threads())
        y, last = torch.empty_like(data[0]), torch.empty_like(first)
        run = loops("diagonal.c", u.dtype)
        assert run is not None
        _call(run.forward, ctx.shape, *data, flags, first, y, last)
        ctx.save_for_backward(*data, flags, first)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *data, flags, first = ctx.saved_tensors
        gu, gfirst = torch.empty_like(data[0]), torch.empty_like(first)
        gr, gB, gC = first.new_empty(3, *first.shape).unbind()
        run = loops("diagonal.c", gu.dtype)
        assert run is not None
        gy, glast = (g.contiguous() for g in grads)
        _call(run.backward, ctx.shape, *data, flags, first, gy, glast, gu, gr, gB, gC, gfirst)
        return gu, gr.sum(0), gB.sum(0), gC.sum(0), None, gfirst, None


def flags_of(reset: Tensor | None, valid: Tensor | None) -> Tensor | None:
    """[B, L] uint8, as the loops read them: 1 where a document begins, + 2 for padding; None where there is neither."""
    flags = None if reset is None else reset.to(torch.uint8)
    if valid is not None:
        padding = 2 * (~valid).to(torch.uint8)
        flags = padding if flags is None else flags + padding
    return None if flags is None else flags.contiguous()
