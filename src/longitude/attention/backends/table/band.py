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

from longitude.attention.backends.operators import Gradients, Inputs, heads_last, present
from longitude.attention.request import Request
from longitude.errors import UsageError
from longitude.native import load
from longitude.native.derivatives import constant_in_graphs, recorded
from longitude.native.tensors import Signature, in_memory

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


def limits_of(r: Request, spans: Tensor | None = None, near: int = 0) -> Limits:
    """Limits of a request; C gives the last query the order of the last key."""
    low, high = r.pairs.band
    late = r.q_order + r.q.shape[2] - r.k_order - r.k.shape[2]
    return Limits(spans, near, low if low is None else low - late, high if high is None else high - late)


def is_short(x: Inputs) -> bool:
    """Whether decode.c runs it: with more queries, copying keys into another layout is faster."""
    return x.q.shape[2] <= MOST_OF_DECODE and present(x.terms).keys() <= {"table", "q_level", "k_level"}


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
        "table": "wide 1|H diagonals", "q_level": "float64 B H Lq", "k_level": "float64 B H Lk",
        "key_vectors": "wide 1|H N D", "value_vectors": "wide 1|H M V",
        "logits": "wide B H Lq columns", "curves": "wide H 3 pieces", "rates": "wide B 1 Lq", "spans": "int64 count 5",
        "grad": "dtype B H Lq V", "grad_lse": "of_lse B H Lq", "out": "dtype B H Lq V", "ends": "wide 2 B H Lq",
    },
    lambda of: of["H"] % of["G"] == 0 and of["near"] >= 0,
    "heads of keys that divide those of queries, and near >= 0",
)  # fmt: skip
"""The tensors that C reads: those of `Inputs`, and what backward gets besides."""


def require(x: Inputs, *of_backward: Tensor | None) -> None:
    """Raise UsageError unless C can read all tensors by the sizes of q, k and v."""
    terms, spans = x.terms, x.limits.spans
    tensors = x.q, x.k, x.v, *terms, spans, *(of_backward or [None] * 4)
    SIGNATURE.require(tensors, wide=x.wide, near=x.limits.near, diagonals=x.q.shape[-2] + x.k.shape[-2] - 1)
    x.require_together("attention in C")
    if spans is not None:
        most = spans.new_tensor([len(x.q) - 1, *[x.q.shape[2]] * 2, *[x.k.shape[2]] * 2])
        if bool(((spans < 0) | (spans > most)).any() | (spans[:, 1::2] > spans[:, 2::2]).any()):
            raise UsageError("attention in C, spans", f"rows, queries and keys up to {most.tolist()}", spans.tolist())


# ---- calls of C -----------------------------------------------------------------------------------------------------------
class Shape(ctypes.Structure):
    """`Shape` of vectors.h: a term has its name, and its gradient that with grad_ in front. Vectors are written out."""

    _fields_ = [
        *((name, c_int64) for name in "batch heads groups queries keys dim value_dim first last".split()),
        *((name, c_int64) for name in "count most_queries most_keys splits shares".split()),
        ("scale", c_double),
        *((name, c_void_p) for name in "spans logits grad_logits".split()),
        ("columns", c_int64),
        *((name, c_void_p) for name in "curves rates grad_curves grad_rates".split()),
        ("pieces", c_int64),
        *((name, c_void_p) for name in "q_level k_level grad_q_level grad_k_level".split()),
        *((name, c_void_p) for name in "key_vectors grad_key_vectors".split()),
        *((name, c_int64) for name in "key_vectors_head key_vectors_count".split()),
        *((name, c_void_p) for name in "value_vectors grad_value_vectors".split()),
        *((name, c_int64) for name in "value_vectors_head value_vectors_count".split()),
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
    wide, threads, short = x.wide, torch.get_num_threads(), is_short(x)
    stored = x.q.dtype if x.q.dtype in OPTIONS else wide  # other dtypes are widened before
    run, shape = _functions(stored), shape_of(x, threads)
    if not short:
        tasks, blocks = shape.count * x.k.shape[1], -(-shape.most_queries // BLOCK)
        shape.splits = max(1, min(blocks, -(-4 * threads // max(1, tasks))))
    out, lse = heads_last(x.q.to(stored), x.v.shape[3]), x.q.new_empty(x.q.shape[:3], dtype=wide)
    ends = x.q.new_empty(2, *lse.shape, dtype=wide)
    if x.limits.spans is not None:
        out.zero_()
        lse.fill_(-math.inf)
        ends.fill_(math.inf)
    call, space = (run.decode, run.decode_space) if short else (run.forward, run.forward_space)
    working = x.q.new_empty(threads * space(shape), dtype=wide)
    q, k, v = In.of(x.q, stored), In.of(x.k, stored), In.of(x.v, stored)
    call(shape, q, k, v, *shape.table, Out.of(out[None]), lse.data_ptr(), ends.data_ptr(), working.data_ptr())
    return out.to(x.q.dtype), lse, ends


def backward(x: Inputs, grad: Tensor, grad_lse: Tensor | None, out: Tensor, ends: Tensor, learned: bool) -> Gradients:
    """Gradients from those of the output and of lse [B, H, Lq]. learned: the table needs one."""
    require(x, grad, grad_lse, out, ends)
    (batch, heads), threads, wide = x.q.shape[:2], torch.get_num_threads(), ends.dtype
    shape = shape_of(x, threads)
    tasks, blocks = -(-threads // x.k.shape[1]), -(-shape.most_queries // BLOCK)  # of each head
    shape.shares = max(1, min(shape.count, tasks))
    splits = shape.splits = max(1, min(blocks, -(-tasks // shape.shares)))
    # Parts of a sum are not rounded.
    stored = x.q.dtype if x.q.dtype in OPTIONS and splits == 1 else wide
    run = _functions(stored)
    working = x.q.new_empty(threads * run.backward_space(shape), dtype=wide)
    of_q = heads_last(x.q.to(stored))[None]
    of_k, of_v = (
        heads_last(t.to(stored).expand(splits, *t.shape).flatten(0, 1)).unflatten(0, (splits, -1)) for t in (x.k, x.v)
    )
    if x.limits.spans is not None:
        for t in (of_q, of_k, of_v):
            t.zero_()
    terms = x.terms if learned else x.terms._replace(table=None)
    of_terms = {}
    for name, term in present(terms).items():  # with a copy for each that may add to it at once
        match name:
            case "k_level":
                size = splits, *term.shape
            case "q_level" | "logits" | "rates":
                size = batch, heads, *term.shape[2:]
            case _:
                size = splits * shape.shares, heads, *term.shape[1:]
        of_terms[name] = term.new_zeros(size)
        if name != "table":
            setattr(shape, f"grad_{name}", of_terms[name].data_ptr())
    grad_lse = None if grad_lse is None else grad_lse.to(wide).contiguous()
    inputs = [In.of(t, stored) for t in (grad, x.q, x.k, x.v, out)]
    outputs = [Out.of(t) for t in (of_q, of_k, of_v)]
    of_table = at(of_terms.get("table"))
    run.backward(shape, *inputs, *shape.table, ends.data_ptr(), at(grad_lse), *outputs, of_table, working.data_ptr())
    summed = (t[0] if splits == 1 else torch.sum(t, 0, out=heads_last(t[0])) for t in (of_q, of_k, of_v))
    of_q, of_k, of_v = [t.to(x.q.dtype) for t in summed]
    of_terms = {name: copies.sum_to_size(getattr(terms, name).shape) for name, copies in of_terms.items()}
    return Gradients(of_q, of_k, of_v, Terms(**of_terms))


def _functions(stored: torch.dtype) -> SimpleNamespace:
    """The C functions; RuntimeError if there are none, as in a graph that was compiled elsewhere."""
    run = functions(stored)
    if run is None:
        raise RuntimeError(f"attention in C: {load.route()}")
    return run


def shape_of(x: Inputs, threads: int) -> Shape:
    """Describe a call to C, with one split and one share; without spans, each row of the batch is a span."""
    (batch, heads, queries, dim), (_, shared, keys, _), limits = x.q.shape, x.k.shape, x.limits
    most_queries, most_keys = queries, keys
    if limits.spans is None:
        spans = [(n, 0, queries, 0, keys) for n in range(batch)]
    else:
        spans = limits.spans.tolist()
        most_queries = max((q_to - q_from for _, q_from, q_to, _, _ in spans), default=1)
        most_keys = max((k_to - k_from for *_, k_from, k_to in spans), default=1)
    numbers = (c_int64 * (5 * len(spans)))(*chain.from_iterable(spans))
    first, last = diagonals(queries, keys, limits.low, limits.high)
    shape = Shape(
        batch, heads, heads // shared, queries, keys, dim, x.v.shape[3], first, last, len(spans), most_queries, most_keys,
        1, 1, x.scale, ctypes.addressof(numbers), threads=threads, near=limits.near,
    )  # fmt: skip
    shape.kept, shape.table = [numbers], (None, 0)  # kept as long as their addresses are
    for name, term in zip(x.terms._fields, x.terms, strict=True):
        if term is None:
            continue
        shape.kept.append(term := term if name == "table" and term.stride(1) == 1 else term.contiguous())
        if name == "table":  # an argument of its own: its address, and the stride from head to head
            shape.table = term.data_ptr(), term.stride(0) if len(term) > 1 else 0
            continue
        setattr(shape, name, term.data_ptr())
        match name:
            case "logits":
                shape.columns = term.shape[3]
            case "curves":
                shape.pieces = term.shape[2]
            case "key_vectors" | "value_vectors":
                setattr(shape, f"{name}_head", 0 if len(term) == 1 else term.stride(0))
                setattr(shape, f"{name}_count", term.shape[1])
    return shape


def at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


# ---- without a bias --------------------------------------------------------------------------------------------------------
SHORTEST = 512
"""Queries and keys from which C is faster without a bias, causal; 256 in float32 with heads of 32 or wider. Measured with torch
2.13 on one thread of an AMD EPYC with AVX2, one with AVX-512, and an Intel Xeon with AMX: 8 heads of 16 to 128, batches of 1 and
8, from 2026-11-23 to 2026-11-26. C took at most 0.9 of torch's time on all three. Without causality torch's function is as
fast; with shorter sequences the processors differ. Nothing is timed while a program runs: two runs of one study would round
differently."""


def is_faster_in_c(r: Request) -> bool:
    """Whether C runs a request that torch's function also supports; compiled and transformed calls are left to torch."""
    if not in_memory(r.q, r.k, r.v):  # first: what a comparison of symbolic lengths decides, a graph is bound to
        return False
    wide_heads = r.q.dtype == torch.float32 and r.q.shape[3] >= 32
    if min(r.rows, r.length) < (SHORTEST // 2 if wide_heads else SHORTEST) or r.sees_all:
        return False
    # Without gradients torch multiplies bfloat16 in tiles of AMX. Elsewhere C takes 0.42 to 0.71 of torch's time: Zen 4, one
    # thread, 512 to 2,048 tokens in 8 heads of 16 to 128, batches of 1 and 8, medians of 9 turns, 2026-11-30.
    narrow = r.q.dtype == torch.bfloat16 and (recorded(r.q, r.k, r.v) or not torch.cpu._is_amx_tile_supported())
    return (r.q.dtype == torch.float32 or narrow) and available(r.q.dtype)
