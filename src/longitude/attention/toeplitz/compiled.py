"""band.c for torch: attention with a table of offsets in one pass, where a compiler is at hand."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from longitude import native
from longitude.attention.toeplitz.band import Band, heads_last
from longitude.attention.toeplitz.bound import NOTHING, unevenness
from longitude.attention.toeplitz.tiles import LOG2E


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in "batch heads groups queries keys dim first last splits".split()),
        *((name, c_double) for name in ("scale", "enough")),
        ("threads", c_int),
    ]


class In(ctypes.Structure):
    _fields_ = [("at", c_void_p), *((name, c_int64) for name in ("batch", "head", "row"))]

    @classmethod
    def of(cls, x: Tensor) -> In:
        """x [B, H, L, D]."""
        assert x.stride(3) == 1 or x.shape[3] <= 1, x.stride()
        return cls(x.data_ptr(), *x.stride()[:3])


class Out(ctypes.Structure):
    _fields_ = [*In._fields_, ("split", c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> Out:
        """x [splits, B, H, L, D]."""
        return cls(x.data_ptr(), *x.stride()[1:4], x.stride(0))


@lru_cache
def functions(dtype: torch.dtype) -> ctypes.CDLL | None:
    """band.c for float32 or float64; None where it cannot be compiled."""
    found = native.library(Path(__file__).with_name("band.c"), *(["-DDOUBLE"] if dtype == torch.float64 else []))
    if found is not None:
        shape, data = ctypes.POINTER(Shape), c_void_p
        for room in (found.forward_room, found.backward_room):
            room.argtypes, room.restype = [shape], c_int64
        found.forward.argtypes = [shape, In, In, In, data, c_int64, Out, data, data]
        found.backward.argtypes = [shape, In, In, In, In, data, c_int64, data, data, Out, Out, Out, data, data]
        found.forward.restype = found.backward.restype = None
    return found


def forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, band: Band, scale: float
) -> tuple[Tensor, Tensor] | None:
    """out [B, H, Lq, D] and the logsumexp of each row [B, H, Lq]; None where it cannot be compiled."""
    wide = torch.promote_types(q.dtype, torch.float32)
    run = functions(wide)
    if run is None:
        return None
    threads = torch.get_num_threads()
    shape = _shape(q, k, band, scale, _enough(table, band, wide, v), 4 * threads)
    room = q.new_empty(threads * run.forward_room(shape), dtype=wide)
    made, lse = heads_last(q.to(wide)), q.new_empty(q.shape[:3], dtype=wide)
    q_, k_, v_ = (_rows(x, wide) for x in (q, k, v))
    table, step = _table(table)
    run.forward(shape, *map(In.of, (q_, k_, v_)), _at(table), step, Out.of(made[None]), lse.data_ptr(), room.data_ptr())
    return made.to(q.dtype), lse


def backward(
    grad: Tensor,
    minus_delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    lse: Tensor,
    band: Band,
    scale: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Gradients of q, k, v and the table; minus_delta [B, H, Lq] is -(grad . out) and what comes through lse."""
    wide = lse.dtype
    run = functions(wide)
    if run is None:
        return None
    threads = torch.get_num_threads()
    shape = _shape(q, k, band, scale, _enough(table, band, wide, v, grad, minus_delta[..., None]), threads)
    room = q.new_empty(threads * run.backward_room(shape), dtype=wide)
    dq = heads_last(q.to(wide))[None]
    dk, dv = (x.new_empty(shape.splits, *_swap(x.shape), dtype=wide).transpose(2, 3) for x in (k, v))
    of_tables = None
    if table is not None and learned:
        of_tables = q.new_empty(shape.splits * q.shape[0], *table.shape, dtype=wide)
    inputs = [_rows(x, wide) for x in (grad, q, k, v)]
    table, step = _table(table)
    run.backward(
        shape, *map(In.of, inputs), _at(table), step, lse.contiguous().data_ptr(), minus_delta.contiguous().data_ptr(),
        *map(Out.of, (dq, dk, dv)), _at(of_tables), room.data_ptr(),
    )  # fmt: skip
    dq, dk, dv = (x.sum(0) if len(x) > 1 else x[0] for x in (dq, dk, dv))
    made = [heads_last(x).copy_(y) if (x.dtype, heads_last(x).stride()) != (y.dtype, y.stride()) else y
            for x, y in ((q, dq), (k, dk), (v, dv))]  # fmt: skip
    return *made, None if of_tables is None else of_tables.sum(0)  # type: ignore[return-value]


def _shape(q: Tensor, k: Tensor, band: Band, scale: float, enough: float, tasks: int) -> Shape:
    """tasks: how many there should be at least: heads are split where there are too few."""
    (batch, heads, queries, dim), shared = q.shape, k.shape[1]
    splits = max(1, min(-(-tasks // max(1, batch * shared)), -(-queries // 48)))
    sizes = batch, heads, heads // max(1, shared), queries, k.shape[2], dim, band.first, band.last, splits
    return Shape(*sizes, scale, enough, torch.get_num_threads())


def _enough(table: Tensor | None, band: Band, wide: torch.dtype, *rows: Tensor) -> float:
    """2^-this of the largest weight changes no digit of a sum, though some rows it is multiplied with are longer than others.
    Tables that never fall as far need not look."""
    if table is None or band.width <= 0:
        return math.inf
    seen = table[:, band.first : band.last + 1]
    if not bool((seen.amax(1) - seen.amin(1) > NOTHING[wide]).any()):
        return math.inf
    enough = NOTHING[wide] + sum(unevenness(x) for x in rows)
    return enough * LOG2E if math.isfinite(enough) else math.inf


def _rows(x: Tensor, wide: torch.dtype) -> Tensor:
    """In the dtype that is computed in, the numbers of a row side by side."""
    x = x.to(wide)
    return x if x.stride(3) == 1 else x.contiguous()


def _table(table: Tensor | None) -> tuple[Tensor | None, int]:
    """With the diagonals of a head side by side, and the step from head to head."""
    if table is None:
        return None, 0
    table = table if table.stride(1) == 1 else table.contiguous()
    return table, table.stride(0) if len(table) > 1 else 0


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _swap(shape: torch.Size) -> tuple[int, int, int, int]:
    return shape[0], shape[2], shape[1], shape[3]
