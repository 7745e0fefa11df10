"""torch's FlexAttention: one function, compiled on first use, whose score function reads the table of offsets.

Lengths are padded to powers of two: blocks of padding are skipped, and few graphs serve many lengths. Shapes are fixed
then, because symbolic ones fail in places; `flex_limits` refuses what is known to fail. Tested: the CPU's kernel, and
FlexAttention's gradients in its uncompiled form. On CUDA nothing is measured yet.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longitude.attention.backends.base import Backend
from longitude.attention.masks import Band, Causal, Documents, Padding, Window
from longitude.attention.patterns import Prefix
from longitude.attention.request import Request
from longitude.attention.scores import drift_level
from longitude.attention.spans import steady
from longitude.positions.base import Drift, OffsetBias

BLOCK = 128  # queries and keys of one block of the block mask; FlexAttention's own default
NOWHERE = 2**60  # the place of a key that no query attends to
TABLE_BYTES = 2**26
WIDE_HEADS = 160 * 2**10  # #180278 and #198224 run out of 99 KiB at head_dim above 128; 163 and 227 KiB are enough
GRAPHS = 64  # compiled for shapes and kinds, per process, before the next is refused by torch; its own default is 8


# ---- inputs of the kernel: computed outside of it, because terms are any Python ----------------------------------------------
class Inputs(NamedTuple):
    """P and K: the lengths of queries and keys after padding. An absent term is None."""

    q: Float[Tensor, "B H P D"]
    k: Float[Tensor, "B Hkv K D"]
    v: Float[Tensor, "B Hkv K Dv"]
    table: Float[Tensor, "H offsets"] | None  # float32, as are levels
    q_at: Int[Tensor, "B P"] | None  # column of the table: q_at - k_at; None: query index - key index + K
    k_at: Int[Tensor, "B K"] | None
    q_level: Float[Tensor, "B H P"] | None
    k_level: Float[Tensor, "B H K"] | None
    q_rest: Float[Tensor, "B H P"] | None  # what float32 leaves of a wider level
    k_rest: Float[Tensor, "B H K"] | None
    first: Int[Tensor, "B P"]  # a query attends to the keys whose place is from first to last ...
    last: Int[Tensor, "B P"]
    place: Int[Tensor, "B K"]
    q_documents: tuple[Int[Tensor, "B P"], ...]  # ... and whose documents are its own
    k_documents: tuple[Int[Tensor, "B K"], ...]


def padded(length: int) -> int:
    """The next power of two, of one block or more."""
    return max(BLOCK, 1 << (length - 1).bit_length())


def inputs(r: Request) -> Inputs:
    q_tokens, k_tokens = (
        start + torch.arange(padded(length), device=r.q.device).clamp(max=length - 1)  # padding repeats the last
        for start, length in ((r.q_order, r.rows), (r.k_order, r.length))
    )
    q, k, v = (widened(x, padded(x.shape[2])) for x in (r.q, r.k, r.v))
    return Inputs(q, k, v, *table(r), *levels(r, q_tokens, k_tokens), *visibility(r, q_tokens, k_tokens))


def widened(x: Tensor, length: int) -> Tensor:
    """[B, H, L, D] -> [B, H, length, D], contiguous: at other strides gradients were wrong (#146377)."""
    if not torch.is_grad_enabled():
        x = x.detach()  # on the CPU FlexAttention refuses inputs that require a gradient
    return x.contiguous() if x.shape[2] == length else F.pad(x, (0, 0, 0, length - x.shape[2]))


def table(r: Request) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """-> the bias of every offset [H, offsets], and the columns of tokens where index and position differ."""
    at = [term.at for term in r.terms if isinstance(term, OffsetBias)]
    if not at:
        return None, None, None
    rows, keys = padded(r.rows), padded(r.length)
    counting = steady(r)
    if counting is not None:
        gap = counting.position_gap
        offset = gap - keys + torch.arange(rows + keys, device=r.q.device)
        offset = offset.clamp(gap - r.length + 1, gap + r.rows - 1)  # padding adds no offset of its own
        q_at = k_at = None
    else:
        i, j = (p if p.dim() == 2 else p[None] for p in r.places())
        lowest, highest = reach(r)
        width = padded(highest - lowest + 1)
        offset = (lowest + torch.arange(width, device=r.q.device)).clamp(max=highest)
        q_at, k_at = (
            F.pad(p, (0, length - p.shape[1])).expand(r.q.shape[0], -1).contiguous()
            for p, length in ((i - i.amin(), rows), (j - j.amax(), keys))
        )
    bias = torch.stack([f(offset).to(torch.float32) for f in at]).sum(0)
    return bias, q_at, k_at


def reach(r: Request) -> tuple[int, int]:
    """The smallest and the largest offset of positions in tensors. Synchronizes with the device."""
    i, j = r.places()
    return int(i.amin() - j.amax()), int(i.amax() - j.amin())


Levels = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def levels(r: Request, q_tokens: Tensor, k_tokens: Tensor) -> Levels:
    """The sum of all drifts' levels, of queries and of keys, and what float32 leaves of both."""
    level = drift_level(r)
    if level is None:
        return None, None, None, None
    # Only differences count; near 0 they round less.
    level = level - level[..., k_tokens].mean(-1, keepdim=True).detach()
    # Two tensors: one that is read twice gets no gradient (NotImplementedError in FlexAttention's own backward).
    mine, theirs = level[..., q_tokens], level[..., k_tokens]
    q_level, k_level = mine.to(torch.float32), theirs.to(torch.float32)
    if r.q.dtype != torch.float32:  # its output is rounded far more than this
        return q_level, k_level, None, None
    # Levels in the thousands would leave an error of 3e-5 at 8192 tokens; with the rest it is 1e-7.
    q_rest, k_rest = ((wide - x).detach().to(torch.float32) for wide, x in ((mine, q_level), (theirs, k_level)))
    return q_level, k_level, q_rest, k_rest


def visibility(
    r: Request, q_tokens: Tensor, k_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """first, last [B, P], place [B, K] and documents of both: the whole mask in numbers per token."""
    batch, (rows, keys) = r.q.shape[0], (len(q_tokens), len(k_tokens))
    last = torch.full((rows,), NOWHERE - 1, device=r.q.device)
    first, place = -last, k_tokens
    documents, visible = [], torch.arange(keys, device=r.q.device) < r.length
    for part in r.mask.parts():
        match part:
            case Causal(order=order) | Window(order=order):
                i, place = (q_tokens, k_tokens) if order is None else (order[q_tokens], order[k_tokens])
                last = torch.minimum(last, i)
                if isinstance(part, Window):
                    first = torch.maximum(first, i - part.size + 1)
            case Band(before, after):
                first, last = torch.maximum(first, q_tokens - before), torch.minimum(last, q_tokens + after)
            case Prefix(length):
                length = length[:, None] if isinstance(length, Tensor) else length
                last = torch.minimum(last, q_tokens.clamp(min=length - 1))
            case Documents(ids):
                documents.append(ids)
            case Padding(valid):
                visible = visible & valid[..., k_tokens].bool()
    # Padding in the block of the last query attends as that one does, which leaves blocks full; blocks of padding are empty.
    empty = torch.arange(rows, device=r.q.device) >= -(-r.rows // BLOCK) * BLOCK
    first, last = first.masked_fill(empty, NOWHERE), last.masked_fill(empty, -NOWHERE)
    place = place.masked_fill(~visible, NOWHERE) if visible.dim() == 1 else torch.where(visible, place, NOWHERE)

    def of_all(x: Tensor) -> Tensor:
        return x.expand(batch, -1).contiguous()

    theirs = tuple(of_all(ids[..., k_tokens]) for ids in documents)
    return of_all(first), of_all(last), of_all(place), tuple(of_all(ids[..., q_tokens]) for ids in documents), theirs


# ---- the function that is compiled --------------------------------------------------------------------------------------
def attention(x: Inputs, scale: float) -> Float[Tensor, "B H P Dv"]:
    """FlexAttention over `x`. Scores are float32 in the kernel, so the bias is never rounded to the dtype of q."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    keys = x.k.shape[2]

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if x.table is not None:
            column = i - j + keys if x.q_at is None or x.k_at is None else x.q_at[b, i] - x.k_at[b, j]
            score = score + x.table[h, column]
        if x.q_level is not None and x.k_level is not None:
            score = score + (x.q_level[b, h, i] - x.k_level[b, h, j])
        if x.q_rest is not None and x.k_rest is not None:
            score = score + (x.q_rest[b, h, i] - x.k_rest[b, h, j])
        return score

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = (x.place[b, j] >= x.first[b, i]) & (x.place[b, j] <= x.last[b, i])
        for mine, theirs in zip(x.q_documents, x.k_documents, strict=True):
            allowed = allowed & (mine[b, i] == theirs[b, j])
        return allowed

    some, every = blocks(x)
    lists, lengths = (*listed(some & ~every), *listed(every)), (x.q.shape[2], keys)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths)
    grouped = x.q.shape[1] != x.k.shape[1]
    return flex_attention(x.q, x.k, x.v, score_mod=score, block_mask=mask, scale=scale, enable_gqa=grouped)


def blocks(x: Inputs) -> tuple[Tensor, Tensor]:
    """Which blocks [B, 1, P / 128, K / 128] may have an allowed pair, by their extremes, and which have only allowed ones.

    O(L^2 / 128^2), where `create_block_mask` evaluates all pairs. Too many are only slower: `mask_mod` decides inside them.
    """

    def extremes(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tokens.unflatten(-1, (-1, BLOCK)).aminmax(dim=-1)

    def near(x: Tensor) -> Tensor:
        return x[:, None, :, None]

    def far(x: Tensor) -> Tensor:
        return x[:, None, None, :]

    (first, latest), (earliest, last) = extremes(x.first), extremes(x.last)
    low, high = extremes(x.place)
    _, real = extremes(x.place.masked_fill(x.place == NOWHERE, -NOWHERE))
    some = (far(real) >= near(first)) & (far(low) <= near(last))
    every = (far(low) >= near(latest)) & (far(high) <= near(earliest))
    for q_documents, k_documents in zip(x.q_documents, x.k_documents, strict=True):
        (a, b), (c, d) = extremes(q_documents), extremes(k_documents)
        some = some & (near(a) <= far(d)) & (far(c) <= near(b))
        every = every & (near(a) == near(b)) & (far(c) == far(d)) & (near(a) == far(c))
    return some, every


def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] of bool -> how many are chosen, and all indices with the chosen ones first, in order."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


@cache
def compiled() -> Callable[[Inputs, float], Tensor]:
    return torch.compile(attention, fullgraph=True, dynamic=False)


def flex(r: Request) -> Tensor:
    import torch._dynamo

    # Without autocast: it would make queries, keys and values differ in dtype, and backward fails then (#165468, #176025).
    with torch.autocast(r.q.device.type, enabled=False), torch._dynamo.config.patch(recompile_limit=GRAPHS):
        x, lost = marked(inputs(r))
        return (compiled()(x, r.scale) + lost[..., None])[:, :, : r.rows]


def marked(x: Inputs) -> tuple[Inputs, Float[Tensor, "B H P"]]:
    """The inputs with values of NaN where a key is not finite; and what to add to outputs: NaN where a query is not finite.

    The CPU's kernel leaves NaN scores out of its sums (torch 2.13, tried), and any kernel makes zeros of scores that are all
    -inf. A value of NaN makes every query of its block NaN. Added outside of the kernel, which has no epilogue on the CPU.
    """
    v, lost = x.v + unsound(x.k)[..., None], unsound(x.q)
    if x.table is not None:
        lost = lost + torch.where(x.table.isnan().any(-1), math.nan, 0.0)[:, None].to(lost.dtype)
    if x.q_level is not None and x.k_level is not None:
        lost = lost + unsound(x.q_level[..., None]).to(lost.dtype)
        v = v + unsound(x.k_level.unflatten(1, (v.shape[1], -1)).transpose(2, 3))[..., None].to(v.dtype)
    return x._replace(v=v), lost


def unsound(x: Tensor) -> Tensor:
    """[..., D] -> [...]: NaN where a number is not finite, else 0."""
    return torch.where(x.isfinite().all(-1), 0.0, math.nan).to(x.dtype)


# ---- what is refused -------------------------------------------------------------------------------------------
def flex_limits(r: Request) -> str | None:
    """Where FlexAttention is known to fail, with the source; #N: an issue of github.com/pytorch/pytorch."""
    if torch.compiler.is_compiling():
        # Symbolic lengths: C++ that does not compile on the CPU (torch 2.13, tried), NaN on CUDA (#186775, not reproduced).
        return "it compiles a kernel of its own, at fixed lengths, which another torch.compile would make symbolic"
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 7):
        return f"it needs torch 2.7: FlexAttention of {torch.__version__} takes no other head_dim than powers of two"  # #133495
    if r.rows < BLOCK:  # and decoding has a kernel of its own, with bugs of its own (#163314, #133717, #174923)
        return f"its blocks hold {BLOCK} queries: {r.rows} would be mostly padding"
    if not all(isinstance(part, Causal | Window | Band | Prefix | Documents | Padding) for part in r.mask.parts()):
        return "the mask is more than causality, windows, prefixes, padding and documents joined by &"
    # None: plain order.
    orders = [getattr(part, "order", None) for part in r.mask.parts() if not isinstance(part, Documents | Padding)]
    if any(order is not orders[0] for order in orders):
        return "causality and windows follow different orders"
    sizes = (x.numel() // x.shape[2] * padded(x.shape[2]) for x in (r.q, r.k, r.v))
    if max(sizes) >= 2**31:
        return "its kernels count elements in 32 bits"  # #160955, #190857: fixed in 2026
    if any(isinstance(term, OffsetBias) for term in r.terms) and steady(r) is None:
        lowest, highest = reach(r)
        if (size := 4 * r.heads * padded(highest - lowest + 1)) > TABLE_BYTES:
            return f"positions are so far apart that its table would take {size / 2**20:.0f} MiB, above {TABLE_BYTES >> 20}"
    return cpu_limits(r) if r.q.device.type == "cpu" else gpu_limits(r, Gpu.of(r.q.device))


def cpu_limits(r: Request) -> str | None:
    if wants_gradients(r, r.q, r.k, r.v):
        return "FlexAttention has no backward on the CPU"  # #148752, #169224
    if sys.platform == "darwin" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "FlexAttention on the CPU needs x86 with AVX2"  # lower_cpu in torch/_inductor/kernel/flex/flex_cpu.py
    if shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
        return f"it needs a C++ compiler, and there is no {compiler}"
    return None


class Gpu(NamedTuple):
    """What its limits depend on."""

    capability: tuple[int, int]
    shared_memory: int  # bytes, at most, of one block
    rocm: bool
    triton: bool

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
        found = importlib.util.find_spec("triton") is not None
        return cls(torch.cuda.get_device_capability(device), shared, torch.version.hip is not None, found)


def gpu_limits(r: Request, gpu: Gpu) -> str | None:
    narrow, wide = min(r.q.shape[3], r.v.shape[3]), max(r.q.shape[3], r.v.shape[3])
    capability, memory = ".".join(map(str, gpu.capability)), gpu.shared_memory >> 10
    atomic = torch.are_deterministic_algorithms_enabled() and wants_gradients(r)
    reasons = {
        "torch.compile needs triton there": not gpu.triton,
        "FlexAttention gives wrong results on ROCm in places": gpu.rocm,  # #138300: windows
        # triton-lang/triton#5066
        f"triton needs compute capability 8.0, this GPU has {capability}": gpu.capability < (8, 0),
        # flex_attention.py of torch/_inductor
        f"it takes head_dim 16 to 256, not {narrow if narrow < 16 else wide}": narrow < 16 or wide > 256,
        f"head_dim above 128 needs more shared memory than this GPU has, {memory} KiB a block": wide > 128
        and gpu.shared_memory < WIDE_HEADS,
        # Atomic additions (#137452).
        "it sums the gradient of its table in no fixed order, and deterministic algorithms are on": atomic,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def wants_gradients(r: Request, *inputs: Tensor) -> bool:
    """Whether the terms or one of the inputs require gradients."""
    levels = (term.level for term in r.terms if isinstance(term, Drift))
    return torch.is_grad_enabled() and (bool(r.learned) or any(x.requires_grad for x in (*levels, *inputs)))


def flex_memory(r: Request) -> int:
    """Padded copies of queries, keys, values and output; the table, levels and places; the lists of blocks, both ways."""
    rows, keys, batch = padded(r.rows), padded(r.length), r.q.shape[0]
    width, kv_heads = r.v.shape[3], r.k.shape[1]
    copies = rows * r.heads * (r.q.shape[3] + width) + keys * kv_heads * (r.q.shape[3] + width)
    per_token = 4 * r.heads + 8 * 4
    blocks = 4 * (rows // BLOCK) * (keys // BLOCK) * 4
    return batch * (copies * r.q.element_size() + (rows + keys) * per_token + blocks) + 4 * r.heads * (rows + keys)


def flex_price(r: Request) -> float:
    """On the CPU 3 to 4, but after 10 s of compiling, so only by name. On CUDA not measured yet: after plain attention."""
    if r.q.device.type == "cpu":
        return 100.0
    return 3.0 if r.learned else 1.5


FLEX = Backend(
    "flex",
    run=flex,
    terms=(OffsetBias, Drift),
    any_mask=True,  # flex_limits refuses the others
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    devices=("cuda", "cpu"),
    transforms=False,
    limits=flex_limits,
    memory=flex_memory,
    price=flex_price,
)
