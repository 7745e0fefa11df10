"""Attention in a band of diagonals in C: its inputs, and calls of band.c and decode.c."""

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
from longitude.native.derivatives import constant_in_graphs
from longitude.native.tensors import Signature

BLOCK = 48  # queries at once, as in band.c
OPTIONS = {torch.float32: (), torch.float64: ("-DDOUBLE",), torch.bfloat16: ("-DBFLOAT16",)}
"""Compiler options for each dtype that C reads and writes; bfloat16 is computed in float32."""
MOST_OF_DECODE = 4  # queries


class Terms(NamedTuple):
    """What is added to scores and outputs; `toeplitz_attention` documents each."""

    table: Tensor | None = None
    q_level: Tensor | None = None
    k_level: Tensor | None = None
    key_vectors: Tensor | None = None
    value_vectors: Tensor | None = None
    logits: Tensor | None = None
    curves: Tensor | None = None
    rates: Tensor | None = None


class Limits(NamedTuple):
    """Which pairs are allowed, and where vectors begin; `toeplitz_attention` documents each."""

    spans: Tensor | None = None
    near: int = 0
    low: int | None = None
    high: int | None = None


class Inputs(NamedTuple):
    """Arguments of the operators."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    limits: Limits
    scale: float

    @property
    def wide(self) -> torch.dtype:
        """The dtype of all sums."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def is_short(self) -> bool:
        """Whether decode.c runs it: with more queries, copying keys into another layout is faster."""
        others = self.terms._replace(table=None, q_level=None, k_level=None)
        return self.q.shape[2] <= MOST_OF_DECODE and all(term is None for term in others)


class Gradients(NamedTuple):
    """Gradients of the tensors of `Inputs`; None for those that are not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms


def diagonals(queries: int, keys: int, low: int | None, high: int | None) -> tuple[int, int]:
    """First and last diagonal of the band low <= order of the query - order of the key <= high.

    Diagonal n has order difference keys - 1 - n; query i, counted in reverse, and key b meet at n = i + b.
    """
    first = 0 if high is None else max(0, keys - 1 - high)
    last = queries + keys - 2 if low is None else min(queries + keys - 2, keys - 1 - low)
    return first, last


SIGNATURE = Signature(
    "attention in C",
    {
        "q": "dtype B H Lq D", "k": "dtype B G Lk D", "v": "dtype B G Lk V",
        "table": "wide H diagonals", "q_level": "float64 B H Lq", "k_level": "float64 B H Lk",
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
    terms, spans = x.terms, x.limits.spans
    tensors = x.q, x.k, x.v, *terms, spans, *(of_backward or [None] * 4)
    SIGNATURE.require(tensors, wide=x.wide, near=x.limits.near, diagonals=x.q.shape[-2] + x.k.shape[-2] - 1)
    straight = terms.curves is None
    if (
        (terms.q_level is None) != (terms.k_level is None)
        or (terms.rates is None) != straight
        or (terms.table is None and not straight)
    ):
        raise UsageError("attention in C", "both levels or none, and curves with rates and a table", "some of them")
    if spans is not None:
        most = spans.new_tensor([len(x.q) - 1, *[x.q.shape[2]] * 2, *[x.k.shape[2]] * 2])
        if bool(((spans < 0) | (spans > most)).any() | (spans[:, 1::2] > spans[:, 2::2]).any()):
            raise UsageError("attention in C, spans", f"rows, queries and keys up to {most.tolist()}", spans.tolist())


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
        *((name, c_void_p) for name in ("q_levels", "k_levels", "grad_q_levels", "grad_k_levels")),
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
    """The C functions `decode`, `forward`, `backward` and `decode_space`, ...; None if there are none here.

    The latter return the working space of a thread, in numbers. stored: a dtype of OPTIONS; options: more of the compiler's.
    """
    options = (*options, *OPTIONS[stored])
    band_library, decode_library = (
        load.library(Path(__file__).with_name(name), *options) for name in ("band.c", "decode.c")
    )
    if band_library is None or decode_library is None:
        return None
    functions, shape, data = SimpleNamespace(), ctypes.POINTER(Shape), c_void_p
    table = data, c_int64
    arguments = {
        "decode": [shape, In, In, In, *table, Out, data, data, data],
        "forward": [shape, In, In, In, *table, Out, data, data, data],
        "backward": [shape, In, In, In, In, In, *table, data, data, Out, Out, Out, data, data],
    }
    for name, types in arguments.items():
        library = decode_library if name == "decode" else band_library
        run, space = library[name], library[f"{name}_space"]
        run.argtypes, run.restype = types, None
        space.argtypes, space.restype = [shape], c_int64
        vars(functions).update({name: run, f"{name}_space": space})
    return functions


@constant_in_graphs
def available(dtype: torch.dtype) -> bool:
    """Whether there are C functions for a dtype of OPTIONS."""
    return functions(dtype) is not None


def forward(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The output [B, H, Lq, Dv], the logsumexp [B, H, Lq], and what `backward` needs of each row [2, B, H, Lq]."""
    require(x)
    stored, wide, threads = _stored(x), x.wide, torch.get_num_threads()
    run, shape = _functions(stored), shape_of(x, threads)
    if not x.is_short:
        tasks, blocks = shape.count * x.k.shape[1], -(-shape.most_queries // BLOCK)
        shape.splits = max(1, min(blocks, -(-4 * threads // max(1, tasks))))
    out, lse = heads_last(x.q.to(stored), x.v.shape[3]), x.q.new_empty(x.q.shape[:3], dtype=wide)
    ends = x.q.new_empty(2, *lse.shape, dtype=wide)
    if x.limits.spans is not None:
        out.zero_()
        lse.fill_(-math.inf)
        ends.fill_(math.inf)
    call, space = (run.decode, run.decode_space) if x.is_short else (run.forward, run.forward_space)
    working = x.q.new_empty(threads * space(shape), dtype=wide)
    table, step = table_of(x.terms.table)
    inputs = [In.of(t, stored) for t in (x.q, x.k, x.v)]
    call(shape, *inputs, at(table), step, Out.of(out[None]), *map(at, (lse, ends, working)))
    return out.to(x.q.dtype), lse, ends


def backward(x: Inputs, grad: Tensor, grad_lse: Tensor | None, out: Tensor, ends: Tensor, learned: bool) -> Gradients:
    """Gradients from those of the output and of lse [B, H, Lq]. learned: the table needs one."""
    require(x, grad, grad_lse, out, ends)
    threads, wide, terms = torch.get_num_threads(), ends.dtype, x.terms
    shape = shape_of(x, threads)
    tasks, blocks = -(-threads // x.k.shape[1]), -(-shape.most_queries // BLOCK)  # of each head
    shape.shares = max(1, min(shape.count, tasks))
    splits = shape.splits = max(1, min(blocks, -(-tasks // shape.shares)))
    sums = splits * shape.shares
    stored = _stored(x) if splits == 1 else wide  # parts of a sum are not rounded
    run = _functions(stored)
    working = x.q.new_empty(threads * run.backward_space(shape), dtype=wide)
    dq = heads_last(x.q.to(stored))[None]
    dk, dv = (
        heads_last(t.to(stored).expand(splits, *t.shape).flatten(0, 1)).unflatten(0, (splits, -1)) for t in (x.k, x.v)
    )
    if x.limits.spans is not None:
        for t in (dq, dk, dv):
            t.zero_()
    of_table = None
    if terms.table is not None and learned:
        of_table = x.q.new_zeros(sums, *terms.table.shape, dtype=wide)
    of_levels = None, None
    if terms.q_level is not None and terms.k_level is not None:
        of_levels = (
            torch.zeros_like(terms.q_level, memory_format=torch.contiguous_format),
            terms.k_level.new_zeros(splits, *terms.k_level.shape),
        )
        shape.grad_q_levels, shape.grad_k_levels = map(at, of_levels)
    of_logits = None if terms.logits is None else torch.zeros_like(terms.logits, memory_format=torch.contiguous_format)
    shape.grad_logits = at(of_logits)
    of_curves, of_rates = None, None
    if terms.curves is not None:
        of_curves, of_rates = terms.curves.new_zeros(sums, *terms.curves.shape), ends.new_zeros(x.q.shape[:3])
        shape.grad_curves, shape.grad_rates = at(of_curves), at(of_rates)
    of_vectors = [
        vectors.learns(t, sums, x.q.shape[1])
        for vectors, t in ((shape.key_vectors, terms.key_vectors), (shape.value_vectors, terms.value_vectors))
    ]
    grad_lse = None if grad_lse is None else grad_lse.to(wide).contiguous()
    table, step = table_of(terms.table)
    inputs = [In.of(t, stored) for t in (grad, x.q, x.k, x.v, out)]
    outputs = [Out.of(t) for t in (dq, dk, dv)]
    run.backward(shape, *inputs, at(table), step, at(ends), at(grad_lse), *outputs, at(of_table), at(working))
    summed = (t[0] if len(t) == 1 else torch.sum(t, 0, out=heads_last(t[0])) for t in (dq, dk, dv))
    dq, dk, dv = [t.to(x.q.dtype) for t in summed]
    of_keys, of_values = [
        None if made is None or t is None else made.sum(0).unflatten(0, (-1, len(t))).sum(0)
        for made, t in zip(of_vectors, (terms.key_vectors, terms.value_vectors), strict=True)
    ]
    of_terms = Terms(
        table=_summed(of_table, 0), q_level=of_levels[0], k_level=_summed(of_levels[1], 0), key_vectors=of_keys,
        value_vectors=of_values, logits=of_logits, curves=_summed(of_curves, 0), rates=_summed(of_rates, 1),
    )  # fmt: skip
    return Gradients(dq, dk, dv, of_terms)


def _summed(x: Tensor | None, dim: int) -> Tensor | None:
    return None if x is None else x.sum(dim)


def _stored(x: Inputs) -> torch.dtype:
    """Dtype that the C kernels read and write; other dtypes are widened before."""
    return x.q.dtype if x.q.dtype in OPTIONS else x.wide


def _functions(stored: torch.dtype) -> SimpleNamespace:
    """The C functions; RuntimeError if there are none, as in a graph that was compiled elsewhere."""
    run = functions(stored)
    if run is None:
        raise RuntimeError(f"attention in C: {load.route()}")
    return run


def shape_of(x: Inputs, threads: int) -> Shape:
    """Describe a call to C, with one split and one share; without spans, each row of the batch is a span."""
    (batch, heads, queries, dim), (_, shared, keys, _), limits = x.q.shape, x.k.shape, x.limits
    most_queries, most_keys, spans = queries, keys, [(n, 0, queries, 0, keys) for n in range(batch)]
    if limits.spans is not None:
        spans = limits.spans.tolist()
        most_queries = max((q_to - q_from for _, q_from, q_to, _, _ in spans), default=1)
        most_keys = max((k_to - k_from for *_, k_from, k_to in spans), default=1)
    numbers = (c_int64 * (5 * len(spans)))(*chain.from_iterable(spans))
    first, last = diagonals(queries, keys, limits.low, limits.high)
    shape = Shape(
        batch, heads, heads // shared, queries, keys, dim, x.v.shape[3], first, last, len(spans), most_queries, most_keys,
        1, 1, x.scale, ctypes.addressof(numbers), threads=threads, near=limits.near,
    )  # fmt: skip
    terms = Terms(*[None if t is None else t.contiguous() for t in x.terms])
    shape.logits, shape.curves, shape.rates = map(at, (terms.logits, terms.curves, terms.rates))
    shape.q_levels, shape.k_levels = map(at, (terms.q_level, terms.k_level))
    shape.columns = 0 if terms.logits is None else terms.logits.shape[3]
    shape.pieces = 0 if terms.curves is None else terms.curves.shape[2]
    shape.key_vectors, shape.value_vectors = map(Vectors.of, (terms.key_vectors, terms.value_vectors))
    shape.kept = numbers, terms  # as long as their addresses are
    return shape


def table_of(table: Tensor | None) -> tuple[Tensor | None, int]:
    """The table with contiguous diagonals, and the stride from head to head: 0 if heads share it."""
    if table is None:
        return None, 0
    table = table if table.stride(1) == 1 else table.contiguous()
    return table, table.stride(0) if len(table) > 1 else 0


def at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
