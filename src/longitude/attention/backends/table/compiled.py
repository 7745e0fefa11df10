"""band.c and decode.c for torch: attention with a table of offsets in one pass, where a compiler is at hand."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude import c_compile
from longitude.attention.backends.table.band import Band, heads_last

BLOCK = 48  # queries at once, as in band.c
FEW = 4  # queries that are decoded: beyond, it pays to lay keys out anew

Pieces = Sequence[tuple[int, int, int, int, int]]
"""(row of the batch, q_from, q_to, k_from, k_to): queries q_from .. q_to-1 of that row see only its keys k_from .. k_to-1."""


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in "batch heads groups queries keys dim first last".split()),
        *((name, c_int64) for name in "count most_queries most_keys splits shares".split()),
        ("scale", c_double),
        ("pieces", c_void_p),
        ("threads", c_int),
    ]


class In(ctypes.Structure):
    _fields_ = [("at", c_void_p), *((name, c_int64) for name in ("batch", "head", "row"))]

    @classmethod
    def of(cls, x: Tensor) -> In:
        """X [B, H, L, D]."""
        batch, head, row, _ = x.stride()
        return cls(x.data_ptr(), batch, head, row)


class Out(ctypes.Structure):
    _fields_ = [*In._fields_, ("split", c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> Out:
        """X [splits, B, H, L, D]."""
        return cls(x.data_ptr(), *x.stride()[1:4], x.stride(0))


@lru_cache
def functions(dtype: torch.dtype, *options: str) -> Functions | None:
    """band.c and decode.c for float32 or float64; None where they cannot be compiled."""
    options = (*options, "-DDOUBLE") if dtype == torch.float64 else options
    band, few = (c_compile.library(Path(__file__).with_name(name), *options) for name in ("band.c", "decode.c"))
    if band is None or few is None:
        return None
    found = Functions(few.decode_room, few.decode, band.forward_room, band.forward, band.backward_room, band.backward)
    shape, data = ctypes.POINTER(Shape), c_void_p
    for room in (found.decode_room, found.forward_room, found.backward_room):
        room.argtypes, room.restype = [shape], c_int64
    for run in (found.decode, found.forward):
        run.argtypes, run.restype = [shape, In, In, In, data, c_int64, Out, data, data, data], None
    found.backward.argtypes = [shape, In, In, In, In, data, c_int64, data, data, Out, Out, Out, data, data]
    found.backward.restype = None
    return found


_known: dict[torch.dtype, bool] = {}


def available(dtype: torch.dtype) -> bool:
    """Whether there are functions for float32 or float64. Compilers of graphs may ask: nothing is looked for then."""
    if dtype not in _known:
        if torch.compiler.is_compiling():
            return False
        _known[dtype] = functions(dtype) is not None
    return _known[dtype]


class Functions(NamedTuple):
    decode_room: Any
    decode: Any
    forward_room: Any
    forward: Any
    backward_room: Any
    backward: Any


def forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, pieces: Tensor | None, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Out [B, H, Lq, D], the logsumexp of each row [B, H, Lq], and what backward takes for it [2, B, H, Lq]; None where it
    cannot be compiled.

    pieces [n, 5], int64: see `Pieces`; None: each row of the batch is one.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    run = functions(wide)
    if run is None:
        return None
    few = q.shape[2] <= FEW
    cuts = _cuts(q, k, pieces)
    tasks, blocks = len(cuts) * k.shape[1], -(-_most_queries(cuts) // BLOCK)
    threads = torch.get_num_threads()
    splits = 1 if few else max(1, min(blocks, -(-4 * threads // max(1, tasks))))
    shape = _shape(q, k, cuts, band, scale, splits, 1, threads)
    made, lse = heads_last(q.to(wide)), q.new_empty(q.shape[:3], dtype=wide)
    ends = q.new_empty(2, *lse.shape, dtype=wide)
    if pieces is not None:
        made.zero_()
        lse.fill_(-math.inf)
        ends.fill_(math.inf)
    room_of, call = (run.decode_room, run.decode) if few else (run.forward_room, run.forward)
    room = q.new_empty(threads * room_of(shape), dtype=wide)
    inputs = [_rows(x, wide) for x in (q, k, v)]
    table, step = _table(table)
    call(shape, *map(In.of, inputs), _at(table), step, Out.of(made[None]), *map(_at, (lse, ends, room)))
    return made.to(q.dtype), lse, ends


def backward(
    grad: Tensor,
    minus_delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    pieces: Tensor | None,
    ends: Tensor,
    band: Band,
    scale: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Gradients of q, k, v and the table; minus_delta [B, H, Lq] is -(grad . out) and what comes through lse."""
    wide = ends.dtype
    run = functions(wide)
    if run is None:
        return None
    cuts = _cuts(q, k, pieces)
    threads, blocks = torch.get_num_threads(), -(-_most_queries(cuts) // BLOCK)
    tasks = -(-threads // k.shape[1])  # of each head
    shares = max(1, min(len(cuts), tasks))
    splits = max(1, min(blocks, -(-tasks // shares)))
    shape = _shape(q, k, cuts, band, scale, splits, shares, threads)
    room = q.new_empty(threads * run.backward_room(shape), dtype=wide)
    made = heads_last(q.to(wide))[None]
    dk, dv = (heads_last(x.to(wide).expand(splits, *x.shape).flatten(0, 1)).unflatten(0, (splits, -1)) for x in (k, v))
    if pieces is not None:
        for x in (made, dk, dv):
            x.zero_()
    of_tables = None
    if table is not None and learned:
        of_tables = q.new_zeros(splits * shares, *table.shape, dtype=wide)
    inputs, minus_delta = [_rows(x, wide) for x in (grad, q, k, v)], minus_delta.contiguous()
    table, step = _table(table)
    run.backward(
        shape, *map(In.of, inputs), _at(table), step, ends.data_ptr(), minus_delta.data_ptr(),
        *map(Out.of, (made, dk, dv)), _at(of_tables), room.data_ptr(),
    )  # fmt: skip
    summed = [x[0] if len(x) == 1 else torch.sum(x, 0, out=heads_last(x[0])) for x in (made, dk, dv)]
    dq, dk, dv = (x.to(q.dtype) for x in summed)
    return dq, dk, dv, None if of_tables is None else of_tables.sum(0)


def _cuts(q: Tensor, k: Tensor, pieces: Tensor | None) -> Pieces:
    if pieces is None:
        return [(n, 0, q.shape[2], 0, k.shape[2]) for n in range(q.shape[0])]
    return pieces.tolist()


def _most_queries(cuts: Pieces) -> int:
    return max((q_to - q_from for _, q_from, q_to, _, _ in cuts), default=1)


def _shape(
    q: Tensor, k: Tensor, cuts: Pieces, band: Band, scale: float, splits: int, shares: int, threads: int
) -> Shape:
    (batch, heads, queries, dim), shared = q.shape, k.shape[1]
    sizes = batch, heads, heads // shared, queries, k.shape[2], dim, band.first, band.last
    most_keys = max((k_to - k_from for *_, k_from, k_to in cuts), default=1)
    numbers = (ctypes.c_int64 * (5 * len(cuts)))(*chain.from_iterable(cuts))
    shape = Shape(
        *sizes, len(cuts), _most_queries(cuts), most_keys, splits, shares, scale,
        ctypes.addressof(numbers), threads,
    )  # fmt: skip
    shape.kept = numbers  # as long as its address is
    return shape


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
