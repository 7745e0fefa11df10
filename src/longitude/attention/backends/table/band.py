"""Attention in a band with a table of offsets: its inputs, and calls of band.c and decode.c if there is a compiler."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.errors import UsageError
from longitude.native import load
from longitude.native.tensors import Signature

BLOCK = 48  # queries at once, as in band.c
OPTIONS = {torch.float32: (), torch.float64: ("-DDOUBLE",), torch.bfloat16: ("-DBFLOAT16",)}
"""Compiler options for each dtype that C reads and writes; bfloat16 is computed in float32."""
FEW = 4  # queries at most for decode.c: with more, copying keys into another layout is faster


class Inputs(NamedTuple):
    """Arguments of the operators; `toeplitz_attention` documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    q_level: Tensor | None
    k_level: Tensor | None
    key_vectors: Tensor | None
    value_vectors: Tensor | None
    logits: Tensor | None
    curves: Tensor | None
    rates: Tensor | None
    spans: Tensor | None
    near: int
    low: int | None
    high: int | None
    scale: float

    @property
    def band(self) -> Band:
        """The diagonals that are allowed."""
        return Band.of(self.q.shape[2], self.k.shape[2], self.low, self.high)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of all sums."""
        return torch.promote_types(self.q.dtype, torch.float32)


SIGNATURE = Signature(
    "attention in C",
    {
        "q": "dtype B H Lq D", "k": "dtype B G Lk D", "v": "dtype B G Lk V",
        "table": "wide H diagonals", "q_level": "level B H Lq", "k_level": "level B H Lk",
        "key_vectors": "wide 1|H N D", "value_vectors": "wide 1|H M V",
        "logits": "wide B H Lq columns", "curves": "wide H 3 pieces", "rates": "wide B Lq", "spans": "int64 count 5",
        "grad": "dtype B H Lq V", "grad_lse": "of_lse B H Lq", "out": "dtype B H Lq V", "ends": "wide 2 B H Lq",
    },
    lambda of: of["H"] % of["G"] == 0 and of["near"] >= 0,
    "heads of keys that divide those of queries, and near >= 0",
)  # fmt: skip
"""The tensors that C reads: `Inputs`, and what backward gets besides."""


def require(x: Inputs, *of_backward: Tensor | None) -> None:
    """Raise UsageError unless C can read all tensors by the sizes of q, k and v."""
    tensors = *x[:12], *(of_backward or [None] * 4)
    SIGNATURE.require(tensors, wide=x.wide, near=x.near, diagonals=x.q.shape[-2] + x.k.shape[-2] - 1)
    if (x.curves is None) != (x.rates is None) or (x.curves is not None and x.table is None):
        raise UsageError("attention in C", "curves, rates and a table together", "some of them")
    if x.spans is not None:
        most = x.spans.new_tensor([len(x.q) - 1, *[x.q.shape[2]] * 2, *[x.k.shape[2]] * 2])
        if bool(((x.spans < 0) | (x.spans > most)).any() | (x.spans[:, 1::2] > x.spans[:, 2::2]).any()):
            raise UsageError("attention in C, spans", f"rows, queries and keys up to {most.tolist()}", x.spans.tolist())


class Tile(NamedTuple):
    """Queries i .. j-1, counted in reverse, and keys b .. e-1."""

    i: int
    j: int
    b: int
    e: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and keys."""
        return self.j - self.i, self.e - self.b


class Band(NamedTuple):
    """Query i, counted in reverse, and key b meet at diagonal n = i + b, allowed when first <= n <= last."""

    queries: int
    keys: int
    first: int
    last: int

    @classmethod
    def of(cls, queries: int, keys: int, low: int | None, high: int | None) -> Band:
        """The band of low <= order of the query - order of the key <= high."""
        # Diagonal n has order difference keys - 1 - n.
        first = 0 if high is None else max(0, keys - 1 - high)
        last = queries + keys - 2 if low is None else min(queries + keys - 2, keys - 1 - low)
        return cls(queries, keys, first, last)

    @property
    def diagonals(self) -> int:
        """Number of all diagonals, in the band or not."""
        return self.queries + self.keys - 1

    @property
    def width(self) -> int:
        """Number of diagonals in the band."""
        return self.last - self.first + 1

    def mask(self, table: Tensor) -> Tensor:
        """The table, contiguous, with -inf outside the band."""
        if (self.first, self.last) == (0, self.diagonals - 1):
            return table.contiguous()
        masked = table.new_full(table.shape, -math.inf)
        if self.first <= self.last:
            masked[:, self.first : self.last + 1] = table[:, self.first : self.last + 1]
        return masked

    def live_rows(self) -> tuple[int, int]:
        """The queries that attend to at least one key: start <= i < stop."""
        start, stop = max(0, self.first - (self.keys - 1)), min(self.queries, self.last + 1)
        return (start, stop) if self.first <= self.last and start < stop else (0, 0)

    def live_keys(self, i: int, j: int) -> tuple[int, int]:
        """The keys that some query of i .. j-1 attends to: b <= key < e (none when e <= b)."""
        return max(0, self.first - (j - 1)), min(self.keys, self.last - i + 1)

    def open_keys(self, i: int, j: int) -> tuple[int, int]:
        """The keys that every query of i .. j-1 attends to: b <= key < e (none when e <= b)."""
        return max(0, self.first - i), min(self.keys, self.last - (j - 1) + 1)


def heads_last(x: Tensor, width: int | None = None) -> Tensor:
    """Uninitialised, of x's shape [B, H, L, D or width] but laid out [B, L, H, D], so that merging the heads later is free."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3] if width is None else width).transpose(1, 2)


# ---- in one pass ---------------------------------------------------------------------------------------------------------
class Vectors(ctypes.Structure):
    """`Vectors` of vectors.h."""

    _fields_ = [("at", c_void_p), ("grad", c_void_p), ("head", c_int64), ("count", c_int64)]

    @classmethod
    def of(cls, x: Tensor | None) -> Vectors:
        """Describe x [H or 1, N, D], contiguous, to C."""
        if x is None:
            return cls()
        return cls(x.data_ptr(), None, 0 if len(x) == 1 else x.stride(0), x.shape[1])

    def learns(self, x: Tensor | None, tasks: int, heads: int) -> Tensor | None:
        """Zeros to which the gradients of x are added, for each task and head."""
        if x is None:
            return None
        made = x.new_zeros(tasks, heads, *x.shape[1:])
        self.grad = made.data_ptr()
        return made


class Shape(ctypes.Structure):
    """`Shape` of vectors.h."""

    _fields_ = [
        *((name, c_int64) for name in "batch heads groups queries keys dim value_dim first last".split()),
        *((name, c_int64) for name in "count most_queries most_keys splits shares".split()),
        ("scale", c_double),
        *((name, c_void_p) for name in ("spans", "logits", "grad_logits")),
        ("columns", c_int64),
        *((name, c_void_p) for name in ("curves", "rates", "grad_curves", "grad_rates")),
        ("pieces", c_int64),
        ("key_vectors", Vectors),
        ("value_vectors", Vectors),
        ("near", c_int64),
        ("threads", c_int),
    ]


class In(ctypes.Structure):
    """`In` of vectors.h."""

    _fields_ = [("at", c_void_p), *((name, c_int64) for name in ("batch", "head", "row"))]

    @classmethod
    def of(cls, x: Tensor, stored: torch.dtype) -> In:
        """Describe x [B, H, L, D] to C: address and strides, in the dtype that the C kernel reads, with contiguous rows."""
        x = x.to(stored)
        x = x if x.stride(3) == 1 else x.contiguous()
        batch, head, row, _ = x.stride()
        made = cls(x.data_ptr(), batch, head, row)
        made.kept = x  # as long as its address is
        return made


class Out(ctypes.Structure):
    """`Out` of vectors.h."""

    _fields_ = [*In._fields_, ("split", c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> Out:
        """Describe x [splits, B, H, L, D] to C."""
        return cls(x.data_ptr(), *x.stride()[1:4], x.stride(0))


@lru_cache
def functions(stored: torch.dtype, *options: str) -> SimpleNamespace | None:
    """The C functions `decode`, `forward`, `backward` and `decode_space`, ...; None if they cannot be compiled.

    The latter return the working space of a thread, in numbers. stored: a dtype of OPTIONS; options: more for the compiler.
    """
    options = (*options, *OPTIONS[stored])
    band, few = (load.library(Path(__file__).with_name(name), *options) for name in ("band.c", "decode.c"))
    if band is None or few is None:
        return None
    found, shape, data = SimpleNamespace(), ctypes.POINTER(Shape), c_void_p
    table = data, c_int64
    arguments = {
        "decode": [shape, In, In, In, *table, Out, data, data, data],
        "forward": [shape, In, In, In, *table, Out, data, data, data],
        "backward": [shape, In, In, In, In, In, *table, data, data, Out, Out, Out, data, data],
    }
    for name, types in arguments.items():
        library = few if name == "decode" else band
        run, space = library[name], library[f"{name}_space"]
        run.argtypes, run.restype = types, None
        space.argtypes, space.restype = [shape], c_int64
        vars(found).update({name: run, f"{name}_space": space})
    return found


_known: dict[torch.dtype, bool] = {}


def available(dtype: torch.dtype) -> bool:
    """Whether there are C functions for a dtype of OPTIONS; False while compiling if no earlier call has found out."""
    if dtype not in _known:
        if torch.compiler.is_compiling():
            return False
        _known[dtype] = functions(dtype) is not None
    return _known[dtype]


def forward(x: Inputs) -> tuple[Tensor, Tensor, Tensor] | None:
    """The output [B, H, Lq, Dv], the logsumexp [B, H, Lq], and what `backward` needs of each row [2, B, H, Lq].

    None if levels are added, or if C cannot be compiled.
    """
    require(x)
    stored, wide = _stored(x), x.wide
    run = _functions(x, stored)
    if run is None:
        return None
    few, threads = x.q.shape[2] <= FEW and all(t is None for t in x[6:11]), torch.get_num_threads()
    shape = shape_of(x, threads)
    if not few:
        tasks, blocks = shape.count * x.k.shape[1], -(-shape.most_queries // BLOCK)
        shape.splits = max(1, min(blocks, -(-4 * threads // max(1, tasks))))
    out, lse = heads_last(x.q.to(stored), x.v.shape[3]), x.q.new_empty(x.q.shape[:3], dtype=wide)
    ends = x.q.new_empty(2, *lse.shape, dtype=wide)
    if x.spans is not None:
        out.zero_()
        lse.fill_(-math.inf)
        ends.fill_(math.inf)
    call, space = (run.decode, run.decode_space) if few else (run.forward, run.forward_space)
    working = x.q.new_empty(threads * space(shape), dtype=wide)
    table, step = table_of(x.table)
    inputs = [In.of(t, stored) for t in x[:3]]
    call(shape, *inputs, at(table), step, Out.of(out[None]), *map(at, (lse, ends, working)))
    return out.to(x.q.dtype), lse, ends


def backward(
    x: Inputs, grad: Tensor, grad_lse: Tensor | None, out: Tensor, ends: Tensor, learned: bool
) -> tuple[Tensor | None, ...] | None:
    """Gradients of the fields q to rates, from those of the output and of lse [B, H, Lq]. learned: the table needs one."""
    require(x, grad, grad_lse, out, ends)
    threads, wide = torch.get_num_threads(), ends.dtype
    shape = shape_of(x, threads)
    of_logits = None if x.logits is None else torch.zeros_like(x.logits, memory_format=torch.contiguous_format)
    shape.grad_logits = at(of_logits)
    tasks, blocks = -(-threads // x.k.shape[1]), -(-shape.most_queries // BLOCK)  # of each head
    shape.shares = max(1, min(shape.count, tasks))
    splits = shape.splits = max(1, min(blocks, -(-tasks // shape.shares)))
    stored = _stored(x) if splits == 1 else wide  # parts of a sum are not rounded
    run = _functions(x, stored)
    if run is None:
        return None
    working = x.q.new_empty(threads * run.backward_space(shape), dtype=wide)
    dq = heads_last(x.q.to(stored))[None]
    dk, dv = (
        heads_last(t.to(stored).expand(splits, *t.shape).flatten(0, 1)).unflatten(0, (splits, -1)) for t in (x.k, x.v)
    )
    if x.spans is not None:
        for t in (dq, dk, dv):
            t.zero_()
    of_tables = None
    if x.table is not None and learned:
        of_tables = x.q.new_zeros(splits * shape.shares, *x.table.shape, dtype=wide)
    of_curves, of_rates = None, None
    if x.curves is not None:
        of_curves, of_rates = x.curves.new_zeros(splits * shape.shares, *x.curves.shape), ends.new_zeros(x.q.shape[:3])
        shape.grad_curves, shape.grad_rates = at(of_curves), at(of_rates)
    vectors = x.key_vectors, x.value_vectors
    of_vectors = [
        own.learns(t, splits * shape.shares, x.q.shape[1])
        for own, t in zip((shape.key_vectors, shape.value_vectors), vectors, strict=True)
    ]
    grad_lse = None if grad_lse is None else grad_lse.to(wide).contiguous()
    table, step = table_of(x.table)
    inputs = [In.of(t, stored) for t in (grad, *x[:3], out)]
    outputs = [Out.of(t) for t in (dq, dk, dv)]
    run.backward(shape, *inputs, at(table), step, at(ends), at(grad_lse), *outputs, at(of_tables), at(working))
    summed = (t[0] if len(t) == 1 else torch.sum(t, 0, out=heads_last(t[0])) for t in (dq, dk, dv))
    dq, dk, dv = [t.to(x.q.dtype) for t in summed]
    of_tables, of_curves = [None if t is None else t.sum(0) for t in (of_tables, of_curves)]
    of_keys, of_values = [
        None if made is None or t is None else made.sum(0).unflatten(0, (-1, len(t))).sum(0)
        for made, t in zip(of_vectors, vectors, strict=True)
    ]
    of_rates = None if of_rates is None else of_rates.sum(1)
    return dq, dk, dv, of_tables, None, None, of_keys, of_values, of_logits, of_curves, of_rates


def _stored(x: Inputs) -> torch.dtype:
    """Dtype that the C kernels read and write; other dtypes are widened before."""
    return x.q.dtype if x.q.dtype in OPTIONS and functions(x.q.dtype) is not None else x.wide


def _functions(x: Inputs, stored: torch.dtype) -> SimpleNamespace | None:
    return functions(stored) if x.q_level is None else None


def shape_of(x: Inputs, threads: int) -> Shape:
    """Describe a call to C, with one split and one share; without spans, each row of the batch is a span."""
    (batch, heads, queries, dim), (_, shared, keys, _), band = x.q.shape, x.k.shape, x.band
    most_queries, most_keys, spans = queries, keys, [(n, 0, queries, 0, keys) for n in range(batch)]
    if x.spans is not None:
        spans = x.spans.tolist()
        most_queries = max((q_to - q_from for _, q_from, q_to, _, _ in spans), default=1)
        most_keys = max((k_to - k_from for *_, k_from, k_to in spans), default=1)
    numbers = (c_int64 * (5 * len(spans)))(*chain.from_iterable(spans))
    shape = Shape(
        batch, heads, heads // shared, queries, keys, dim, x.v.shape[3], band.first, band.last, len(spans), most_queries,
        most_keys, 1, 1, x.scale, ctypes.addressof(numbers), threads=threads,
    )  # fmt: skip
    logits = None if x.logits is None else x.logits.contiguous()
    if logits is not None:
        shape.logits, shape.columns = logits.data_ptr(), logits.shape[3]
    curves, rates = [None if t is None else t.contiguous() for t in (x.curves, x.rates)]
    if curves is not None:
        shape.curves, shape.rates, shape.pieces = curves.data_ptr(), at(rates), curves.shape[2]
    vectors = [None if t is None else t.contiguous() for t in (x.key_vectors, x.value_vectors)]
    shape.key_vectors, shape.value_vectors, shape.near = *map(Vectors.of, vectors), x.near
    shape.kept = numbers, logits, curves, rates, vectors  # as long as their addresses are
    return shape


def table_of(table: Tensor | None) -> tuple[Tensor | None, int]:
    """The table with contiguous diagonals, and the stride from head to head: 0 if heads share it."""
    if table is None:
        return None, 0
    table = table if table.stride(1) == 1 else table.contiguous()
    return table, table.stride(0) if len(table) > 1 else 0


def at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
