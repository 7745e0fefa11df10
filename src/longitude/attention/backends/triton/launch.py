"""Calls of the kernels: shapes, blocks, and what is allocated."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longitude.attention.backends.operators import Gradients, Inputs, heads_last
from longitude.attention.backends.triton.intervals import Intervals
from longitude.native.tensors import Signature

KERNELS_FILE = "longitude.attention.backends.triton.kernels"  # imported on use: it needs triton
LOG2 = 0.6931471805599453
MOST = 2**16 - 1
EDGE = 128
"""Columns added at each end of a table: the blocks at the ends read so far beyond its offsets."""
PROGRAMS = 2
"""Programs per multiprocessor that sum gradients of the table, if a block's distances are fewer."""


class Terms(NamedTuple):
    """What is added to scores. table: by offset from 1 - Lk to Lq - 1; it, levels, curves and rates in float32.

    With curves and rates (slopes, levels and ends of `NormalizedOffset`) the table has distances, and curve(table[i - j] rate_i)
    is added. Rates never increase from query to query.
    """

    table: Float[Tensor, "H Lq+Lk-1"] | None = None
    q_level: Float[Tensor, "B H Lq"] | None = None
    k_level: Float[Tensor, "B H Lk"] | None = None
    curves: Float[Tensor, "H 3 pieces"] | None = None
    rates: Float[Tensor, "B 1 Lq"] | None = None


class Limits(NamedTuple):
    """lo, hi: those of `Intervals`. nearest: column of the smallest distance in the table."""

    lo: Tensor
    hi: Tensor
    nearest: int = 0


SIGNATURE = Signature(
    "attention in Triton",
    {
        "q": "dtype B H Lq D", "k": "dtype B G Lk D", "v": "dtype B G Lk V",
        "table": "float32 H diagonals", "q_level": "float32 B H Lq", "k_level": "float32 B H Lk",
        "curves": "float32 H 3 pieces", "rates": "float32 B 1 Lq",
        "lo": "int32 rows Lq", "hi": "int32 rows Lq",
        "grad": "dtype B H Lq V", "grad_lse": "of_lse B H Lq", "out": "dtype B H Lq V", "lse": "float32 B H Lq",
    },
    lambda of: of["H"] % of["G"] == 0 and of["rows"] in (1, of["B"]),
    "heads of keys that divide those of queries, and a row of intervals for each sequence, or one",
)  # fmt: skip
"""The tensors that the kernels read: `Inputs`, and what backward gets besides."""


def require(x: Inputs, *of_backward: Tensor | None) -> None:
    """Raise UsageError unless the kernels can read all tensors by the sizes of q, k and v."""
    tensors = x.q, x.k, x.v, *x.terms, x.limits.lo, x.limits.hi, *(of_backward or [None] * 4)
    SIGNATURE.require(tensors, diagonals=x.q.shape[-2] + x.k.shape[-2] - 1)
    x.require_together("attention in Triton")


class Blocks(NamedTuple):
    """Queries and keys of a block, the warps that share it, and the stages of its software pipeline."""

    Q: int
    K: int
    num_warps: int
    num_stages: int
    maxnreg: int = 255  # the most of a thread; otherwise the assembler spills registers to run more blocks
    STRIP: bool = False  # how the table is loaded; see `_biases`


KERNELS = "forward", "backward_queries", "backward_keys", "diagonals"
# Two blocks run on a multiprocessor if a thread of 256 takes 128 registers.
_PAIR, _FLAT_PAIR, _TALL = Blocks(128, 64, 8, 2, 128), Blocks(128, 32, 8, 2, 128), Blocks(64, 32, 8, 2)
_WIDE, _FLAT, _SQUARE, _SMALL = Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 2), Blocks(32, 32, 4, 2)
BLOCKS = {
    8: {64: (_WIDE, _SMALL, _SMALL, _SMALL), 128: (_FLAT, _SMALL, Blocks(32, 64, 8, 2), _TALL)},
    9: {64: (_PAIR, _FLAT_PAIR, Blocks(64, 128, 8, 2), _WIDE), 128: (_WIDE, _FLAT, Blocks(32, 128, 8, 2), _WIDE)},
    10: {64: (_WIDE, _SQUARE, _SQUARE, _SQUARE), 128: (_FLAT, _SQUARE, Blocks(64, 64, 8, 1), _TALL)},
}
"""Block sizes of `KERNELS` by generation of chips and largest width: the largest of those tried that spill no register and
fit into the shared memory of all its chips. Blocks of `diagonals` are stacked squares. `python
benchmarks/gpu_kernels.py` prints registers and spills as reported by the assembler."""
SEVERAL = BLOCKS | {
    8: {64: BLOCKS[8][64], 128: (_FLAT, _SMALL, Blocks(32, 64, 8, 1), _TALL)},
    10: {64: BLOCKS[10][64], 128: (_FLAT, Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1), _TALL)},
}
"""Block sizes in the format of `BLOCKS` for curves, or a table and levels, which take more registers."""
GENERATIONS = {12: 8, 11: 10}
"""Major compute capabilities whose chips have the matrix instructions of another one."""


def blocks_for(major: int, width: int, several: bool = False) -> tuple[Blocks, ...]:
    """Block sizes of `KERNELS` for a major compute capability and a width of vectors; several: see `SEVERAL`.

    The choice depends only on these: nothing is timed, so that equal calls round equally.
    """
    blocks = SEVERAL if several else BLOCKS
    widths = blocks.get(GENERATIONS.get(major, major), blocks[8])
    chosen = next(blocks for limit, blocks in widths.items() if width <= limit)
    return tuple(blocks._replace(STRIP=major == 9) for blocks in chosen)


def blocks_of(kernel: str, x: Inputs) -> Blocks:
    terms = x.terms
    major = torch.cuda.get_device_capability(x.q.device)[0] if x.q.is_cuda else 8
    several = terms.curves is not None or (terms.table is not None and terms.q_level is not None)
    return blocks_for(major, max(wide(x.q.shape[3]), wide(x.v.shape[3])), several)[KERNELS.index(kernel)]


def wide(width: int) -> int:
    """The next power of two that a product of blocks supports."""
    return max(16, 1 << (width - 1).bit_length())


def prepared(x: Inputs) -> Inputs:
    """Inputs as all kernels read them: terms in units of log 2, and tables wider by `EDGE` at both ends."""
    x = x._replace(q=side_by_side(x.q), k=side_by_side(x.k), v=side_by_side(x.v))
    terms = x.terms
    if terms.curves is not None:
        # Beyond the ends distances do not fall.
        table = F.pad(terms.table[None], (EDGE, EDGE), mode="replicate")[0]
        curves = torch.cat([terms.curves[:, :2] / LOG2, terms.curves[:, 2:]], 1)
        terms = terms._replace(table=table, curves=curves, rates=terms.rates.contiguous())
    elif terms.table is not None:
        terms = terms._replace(table=F.pad(terms.table / LOG2, (EDGE, EDGE)))
    if terms.q_level is not None:
        q_level, k_level = ((level / LOG2).contiguous() for level in (terms.q_level, terms.k_level))
        terms = terms._replace(q_level=q_level, k_level=k_level)
    return x._replace(terms=terms)


def _shared(x: Inputs, blocks: Blocks) -> dict[str, Any]:
    """The arguments that all kernels have by the same names."""
    (_, heads, rows, d), (kv_heads, keys), dv = x.q.shape, x.k.shape[1:3], x.v.shape[3]
    terms, limits = x.terms, x.limits
    # Of a term that is not there any address serves.
    at = {name: x.q if term is None else term for name, term in terms._asdict().items()}
    pieces, width = 0 if terms.curves is None else terms.curves.shape[2], at["table"].shape[1]
    return {
        "q": x.q, "k": x.k, "v": x.v, "lo": limits.lo.contiguous(), "hi": limits.hi.contiguous(), **at,
        "factor": x.scale / LOG2, "last": keys + EDGE - 1, "width": width,
        "nearest": min(max(limits.nearest + EDGE, 0), width - 1), "pieces": pieces,
        "rows": rows, "keys": keys, "heads": heads, "group": heads // kv_heads,
        "q_batch": x.q.stride(0), "q_head": x.q.stride(1), "q_stride": x.q.stride(2),
        "k_batch": x.k.stride(0), "k_head": x.k.stride(1), "k_stride": x.k.stride(2),
        "v_batch": x.v.stride(0), "v_head": x.v.stride(1), "v_stride": x.v.stride(2),
        "interval": rows if len(limits.lo) > 1 else 0,
        "D": d, "DV": dv, "WIDE_D": wide(d), "WIDE_DV": wide(dv),
        "TABLE": terms.table is not None, "LEVELS": terms.q_level is not None,
        "ENDS": 1 << (pieces - 2).bit_length() if pieces else 0, "FAR": far(x),
        **blocks._asdict(),
    }  # fmt: skip


def far(x: Inputs) -> bool:
    """Whether offsets within a sequence of an input or a result may need more than 32 bits."""
    width = max(x.q.shape[3], x.v.shape[3])
    return any(y.shape[2] * max(y.stride(2), y.shape[1] * width) >= 2**31 for y in (x.q, x.k, x.v))


def side_by_side(x: Tensor) -> Tensor:
    """Copy x unless vectors are contiguous, and near enough that offsets within a block fit into 32 bits."""
    return x if x.stride(3) == 1 and x.stride(2) < 2**24 else x.contiguous()


def launches(batch: int) -> list[tuple[int, int]]:
    """Split a batch into launches, as (sequences before, sequences): a grid's third dimension is limited."""
    return [(skip, min(MOST, batch - skip)) for skip in range(0, batch, MOST)]


def forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """Out [B, H, Lq, Dv], and the logsumexp of the scores of each query [B, H, Lq] in float32."""
    require(x)
    kernels = import_module(KERNELS_FILE)

    x = prepared(x)
    batch, heads, rows, _ = x.q.shape
    out = heads_last(x.q, x.v.shape[3])
    lse = x.q.new_empty(batch, heads, rows, dtype=torch.float32)
    blocks = blocks_of("forward", x)
    shared = _shared(x, blocks)
    with torch.cuda.device_of(x.q):  # Triton launches on torch's current device
        for skip, sequences in launches(batch):
            kernels.forward[(-(-rows // blocks.Q), heads, sequences)](out=out, lse=lse, skip=skip, **shared)
    return out, lse


def backward(x: Inputs, grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, learned: bool) -> Gradients:
    """Gradients; learned: those of the table, curves and rates are wanted."""
    require(x, grad, grad_lse, out, lse)
    kernels = import_module(KERNELS_FILE)

    x, lse = prepared(x), lse.contiguous()
    (batch, heads, rows, _), (kv_heads, keys), terms = x.q.shape, x.k.shape[1:3], x.terms
    # As `heads_last` lays them out, whatever autograd brings.
    grad, out = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (grad, out))
    delta, of_lse = torch.empty_like(lse), torch.zeros_like(lse) if grad_lse is None else grad_lse.float().contiguous()
    of_q, of_k, of_v = heads_last(x.q), heads_last(x.k), heads_last(x.v)
    of_levels = (lse, lse) if terms.q_level is None else (torch.empty_like(lse), lse.new_empty(batch, heads, keys))

    blocks = blocks_of("backward_queries", x)
    shared, tiles = _shared(x, blocks), batch * -(-rows // blocks.Q)
    learned = learned and terms.table is not None
    curved = learned and terms.curves is not None
    of_curves = lse.new_empty(heads, tiles, 2, 2 * shared["ENDS"]) if curved else lse
    of_rates = torch.empty_like(lse) if curved else lse
    with torch.cuda.device_of(x.q):
        kernels.backward_queries[(tiles, heads)](
            out=out, grad=grad, lse=lse, grad_lse=of_lse, delta=delta, of_q=of_q, of_level=of_levels[0],
            of_curves=of_curves, of_rates=of_rates, scale=x.scale, LEARNED=learned, **shared,
        )  # fmt: skip

    blocks = blocks_of("backward_keys", x)
    bounds = Intervals(x.limits.lo, x.limits.hi).first_queries(keys, blocks.K)
    shared = _shared(x, blocks)
    with torch.cuda.device_of(x.q):
        for skip, sequences in launches(batch):
            kernels.backward_keys[(bounds.shape[2], kv_heads, sequences)](
                grad=grad, lse=lse, delta=delta, bounds=bounds, of_k=of_k, of_v=of_v, of_level=of_levels[1], scale=x.scale,
                blocks=bounds.shape[2], skip=skip, **shared,
            )  # fmt: skip
    gradients = Terms()
    if learned:
        gradients = Terms(table=along_diagonals(x, grad, lse, delta) * (LOG2 if curved else 1.0))
    if curved:
        ends_apart = F.pad(of_curves.sum(1)[..., : shared["pieces"]], (0, 0, 0, 1))  # ends have no gradient
        gradients = gradients._replace(curves=ends_apart, rates=of_rates.sum(1, keepdim=True) * LOG2)
    if terms.q_level is not None:
        gradients = gradients._replace(q_level=of_levels[0], k_level=of_levels[1])
    return Gradients(of_q, of_k, of_v, gradients)


def along_diagonals(x: Inputs, grad: Tensor, lse: Tensor, delta: Tensor) -> Float[Tensor, "H Lq+Lk-1"]:
    """The gradient of the table, of distances if there are curves."""
    kernels = import_module(KERNELS_FILE)
    batch, heads, rows, keys = *x.q.shape[:3], x.k.shape[2]
    blocks = blocks_of("diagonals", x)
    shared, squares = _shared(x, blocks), blocks.Q // blocks.K
    distances = -(-rows // blocks.Q) * squares - squares + -(-keys // blocks.K)
    programs = min(batch, max(1, table_rows(x.q.device, heads) // distances))
    sums = lse.new_empty(heads, programs, distances, 2, squares, blocks.K)
    i = torch.arange(rows, dtype=torch.int32, device=lse.device)
    reach = torch.stack([(i - x.limits.hi).amin(), (i - x.limits.lo).amax()])
    with torch.cuda.device_of(x.q):
        kernels.diagonals[(distances, heads, programs)](
            grad=grad, lse=lse, delta=delta, reach=reach, of_table=sums, batch=batch, **shared
        )
    total, before = lse.new_zeros(heads, distances + squares, blocks.K), -keys % blocks.K
    for half, square in product((0, 1), range(squares)):
        # The lower diagonals of a square are the upper ones of the square below it.
        total[:, half + square :][:, :distances] += sums[:, :, :, half, square].sum(1)
    return total.flatten(1)[:, before : before + rows + keys - 1]


def table_rows(device: torch.device, heads: int) -> int:
    """Programs of each head that sum gradients of the table, a number of the chip: the workspace does not grow with the batch."""
    chip = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
    return -(-PROGRAMS * chip // heads)
