"""Choice between our C kernel and torch's function for attention without a bias on a CPU, by a committed table.

Nothing is timed here. `benchmarks/routes.py` writes routes.json: the shortest sequences for which our kernel runs, for each
type of processor, pass, dtype and mask, by threads and head_dim. Threads and head_dim are rounded to a measured value, in the
direction that never overestimates our kernel. A row without a mask was measured with and without causality, so it is
valid for both. The environment variable LONGITUDE_ROUTES=0 leaves all calls to torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from longitude.attention.backends.table import band
from longitude.attention.backends.table.decoding import describes
from longitude.attention.request import Request
from longitude.native.tensors import in_memory

Routes = Mapping[str, Mapping[str, int | None]]
"""Pass, dtype and mask, "forward float32 causal" -> head_dim, "64" -> the shortest sequence our kernel runs; None: none."""
HEADS = 8  # batch * heads in the measurement: with fewer, sequences must be longer for as much work
_repeated: Routes | None = None


@lru_cache
def processor() -> str:
    """Type of this processor in the table: the instruction set of torch's kernels, and whether it has AMX for bfloat16."""
    vectors, cpuinfo = torch.backends.cpu.get_cpu_capability().lower(), Path("/proc/cpuinfo")
    matrices = vectors == "avx512" and cpuinfo.is_file() and "amx_bf16" in cpuinfo.read_text()
    return "avx512 amx" if matrices else vectors


def is_on() -> bool:
    """Whether our C kernel is compiled, and not switched off."""
    return os.environ.get("LONGITUDE_ROUTES") != "0" and band.available(torch.float32)


@lru_cache
def routes_of(processor: str, threads: int) -> Routes:
    """Routes of the table for a processor and a number of threads; empty if switched off, not compiled, or not measured."""
    if not is_on():
        return {}
    table = json.loads(Path(__file__).with_name("routes.json").read_text())
    found = {}
    for what, by_threads in table.get(processor, {}).get("shortest", {}).items():
        measured = [int(each) for each in by_threads if int(each) <= threads]
        found[what] = by_threads[str(max(measured))] if measured else {}
    return found


def routes() -> Routes:
    """Routes for this process, or those set by `repeated`."""
    return routes_of(processor(), torch.get_num_threads()) if _repeated is None else _repeated


@contextmanager
def repeated(recorded: Routes) -> Iterator[None]:
    """Use the routes that an earlier process recorded, unless our kernel is off here."""
    global _repeated
    before, _repeated = _repeated, recorded if is_on() else {}
    try:
        yield
    finally:
        _repeated = before


def row_of(r: Request) -> tuple[str, str, str]:
    """Pass and dtype of a request, as the table has them; its mask; and its head_dim."""
    learns = torch.is_grad_enabled() and (r.q.requires_grad or r.k.requires_grad or r.v.requires_grad)
    what = f"{'training' if learns else 'forward'} {str(r.q.dtype).removeprefix('torch.')}"
    return what, "all pairs" if r.sees_all else "causal", str(r.q.shape[3])


def shortest(what: str, mask: str, head_dim: str) -> int | None:
    """The shortest sequence that our kernel runs; None: it runs none."""
    rows = routes()
    dims = rows.get(f"{what} {mask}") or rows.get(what, {})
    return next((dims[dim] for dim in sorted(dims, key=int) if int(head_dim) <= int(dim)), None)


def in_loop(r: Request) -> bool:
    """Whether our kernel runs a request that torch's function also supports.

    Compiled, exported and transformed calls are left to torch, which supports all of them.
    """
    if r.rows == 1 or not in_memory(r.q, r.k, r.v):
        return False
    rows, length = r.rows, r.length
    least = shortest(*row_of(r))
    if least is None or rows < least or length < least:
        return False
    return r.q.shape[0] * r.heads * rows * length >= HEADS * least * least


def is_step(r: Request) -> bool:
    """Whether the C kernel runs a decoding step whose request is shared by layers; only on processors of the table."""
    return len(routes()) > 0 and r.once("described", describes)


def words(r: Request) -> str:
    """The table's row for a request, as `explain` prints it."""
    what, mask, head_dim = row_of(r)
    least = shortest(what, mask, head_dim)
    row = f"{processor()}, {torch.get_num_threads()} threads, {what} {mask}, head_dim {head_dim}"
    if least is None:
        return f"routes of {row}: without a bias torch's function takes all"
    return f"routes of {row}: without a bias the loop in C takes sequences of {least} and more (LONGITUDE_ROUTES=0: torch's)"
