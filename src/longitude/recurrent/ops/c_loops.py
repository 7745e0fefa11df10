"""The loops over tokens in C, as autograd functions. The state stays in the processor's cache, not in memory."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.errors import UsageError
from longitude.native import load
from longitude.native.tensors import Signature
from longitude.recurrent.ops.scan import needs_formula, once

REPLAYED = 32
"""Tokens per chunk in the backward of delta.c, which stores all states of one chunk."""
LANES = 16
"""Channels in one vector, as in lanes.h."""


def loops(name: str, dtype: torch.dtype) -> load.Passes | None:
    """Forward and backward of a C file for float32 or float64; None if it cannot be compiled."""
    return load.passes(Path(__file__).with_name(name), dtype)


def usable(name: str, x: Tensor) -> bool:
    """Whether the loops of a C file support tensors like x."""
    return x.device.type == "cpu" and not needs_formula(x) and loops(name, x.dtype) is not None


class Kernel(NamedTuple):
    """Sizes in the struct Shape of a C file, and the shapes of what it reads and writes, in the order of its arguments."""

    sizes: str
    inputs: dict[str, str]
    results: dict[str, str]
    gradients: dict[str, str]

    def signature(self, name: str, backward: bool) -> Signature:
        """What forward or backward requires."""
        shapes = self.inputs | self.results | (self.gradients if backward else {})
        typed = {x: f"{'uint8' if x in ('keep', 'flags') else 'dtype'} {shape}" for x, shape in shapes.items()}
        return Signature(
            name, typed, lambda of: of.get("heads", 0) % of.get("groups", 1) == 0, "groups that divide heads"
        )


def _delta() -> Kernel:
    read, key, value = (
        f"batch {width}" for width in ("groups length keys", "heads length keys", "heads length values")
    )
    state, decay = "batch heads keys values", "batch heads length 1|keys"
    return Kernel(
        "batch groups length keys heads values decays early chunk threads",
        {"q": read, "r": read, "k": key, "b": key, "v": value, "log_w": decay, "keep": "batch length", "first": state},
        {"out": value, "last": state},
        {"gq": key, "gr": key, "gk": key, "gb": key, "gv": value, "gw": key, "gfirst": state},
    )


def _scan() -> Kernel:
    token, read, state = "batch length groups channels", "batch length groups size", "batch groups size channels"
    parts = "batch groups blocks length size"
    return Kernel(
        "batch length groups channels size chunk threads",
        {
            "dt": token,
            "x": token,
            "A": "groups size channels",
            "B": read,
            "C": read,
            "keep": "batch length",
            "first": state,
        },
        {"out": token, "last": state},
        {"gdt": token, "gx": token, "gA": state, "gB": parts, "gC": parts, "gfirst": state},
    )


def _diagonal() -> Kernel:
    token, pair, state = "batch length channels", "2 size channels", "batch 2 size channels"
    return Kernel(
        "batch length channels size chunk threads",
        {"u": token, "r": pair, "B": pair, "C": pair, "flags": "batch length", "first": state},
        {"out": token, "last": state},
        {"gu": token, "gr": state, "gB": state, "gC": state, "gfirst": state},
    )


def _wkv() -> Kernel:
    token, channel, state, sums = "batch length channels", "channels", "3 batch channels", "batch channels"
    return Kernel(
        "batch length channels threads",
        {"w": channel, "u": channel, "k": token, "v": token, "flags": "batch length", "first": state},
        {"out": token, "last": state},
        {"gw": sums, "gu": sums, "gk": token, "gv": token, "gfirst": state},
    )


KERNELS = {"delta.c": _delta(), "scan.c": _scan(), "diagonal.c": _diagonal(), "wkv.c": _wkv()}
SIGNATURES = {
    name: [kernel.signature(name, backward) for backward in (False, True)] for name, kernel in KERNELS.items()
}
"""Those of forward and of backward."""


def _call(name: str, direction: int, sizes: tuple[int, ...], *data: Tensor | None) -> None:
    """Run forward (0) or backward (1) of a C file. sizes: the numbers of its struct Shape, threads last."""
    known = dict(zip(KERNELS[name].sizes.split(), sizes, strict=True))
    SIGNATURES[name][direction].require(data, blocks=-(-known.get("channels", 0) // LANES), **known)
    if data[0] is None or not all(x is None or x.is_contiguous() for x in data):
        raise UsageError(name, "contiguous tensors", [None if x is None else x.stride() for x in data])
    run = loops(name, data[0].dtype)
    assert run is not None
    run[direction]((c_int64 * len(sizes))(*sizes), *(c_void_p(None if x is None else x.data_ptr()) for x in data))


def _forward(
    ctx: Any, name: str, sizes: tuple[int, ...], like: Tensor, first: Tensor, *data: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs in the shape of `like` and the state after; save the inputs for backward. first: the state before."""
    inputs = [x if x is None else x.contiguous() for x in (*data, first)]
    ctx.sizes = (*sizes, torch.get_num_threads())
    out, last = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (like, first))
    _call(name, 0, ctx.sizes, *inputs, out, last)
    ctx.save_for_backward(*inputs)
    return out, last


class ScanLoop(torch.autograd.Function):
    """dt, x [B, L, G, P], A [G, N, P], B, C [B, L, G, N], keep [B, L] uint8 or None, h [B, G, N, P] -> y [B, L, G, P], h after.

    Backward keeps the inputs alone, and loops over the tokens twice more, `chunk` of them at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor, keep: Any, h: Tensor, chunk: int
    ) -> Any:
        sizes = *dt.shape, A.shape[1], min(chunk, dt.shape[1])
        return _forward(ctx, "scan.c", sizes, dt, h, dt, x, A, B, C, keep)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dt, x, *_, first = saved = ctx.saved_tensors  # read once: checkpointing recomputes them for one read
        batch, length, groups, channels, size, *_ = ctx.sizes
        gdt, gx, gfirst, gA = (torch.empty_like(t) for t in (dt, x, first, first))
        gB, gC = dt.new_empty(2, batch, groups, -(-channels // LANES), length, size).unbind()
        gy, glast = (g.contiguous() for g in grads)
        _call("scan.c", 1, ctx.sizes, *saved, gy, glast, gdt, gx, gA, gB, gC, gfirst)
        gB, gC = (g.sum(2).transpose(1, 2) for g in (gB, gC))
        return gdt, gx, gA.sum(0), gB, gC, None, gfirst, None


class WkvLoop(torch.autograd.Function):
    """w, u [C], k, v [B, L, C], flags [B, L] or None, state [3, B, C] -> out [B, L, C], the state after."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, u: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, state: Tensor) -> Any:
        return _forward(ctx, "wkv.c", tuple(k.shape), k, state, w, u, k, v, flags)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, _, k, v, _, first = saved = ctx.saved_tensors
        gw, gu = k.new_empty(2, k.shape[0], k.shape[2]).unbind()
        gk, gv, gfirst = (torch.empty_like(t) for t in (k, v, first))
        gout, glast = (g.contiguous() for g in grads)
        _call("wkv.c", 1, ctx.sizes, *saved, gout, glast, gw, gu, gk, gv, gfirst)
        return gw.sum(0), gu.sum(0), gk, gv, None, gfirst


class DiagonalLoop(torch.autograd.Function):
    """u [B, L, H], r, B, C [2, n, H], real and imaginary, flags [B, L] or None, h [B, 2, n, H] -> y [B, L, H], h after."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, r: Tensor, B: Tensor, C: Tensor, flags: Any, h: Tensor, chunk: int) -> Any:
        sizes = *u.shape, r.shape[1], min(chunk, u.shape[1])
        return _forward(ctx, "diagonal.c", sizes, u, h, u, r, B, C, flags)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        u, *_, first = saved = ctx.saved_tensors
        gu, gfirst = torch.empty_like(u), torch.empty_like(first)
        gr, gB, gC = first.new_empty(3, *first.shape).unbind()
        gy, glast = (g.contiguous() for g in grads)
        _call("diagonal.c", 1, ctx.sizes, *saved, gy, glast, gu, gr, gB, gC, gfirst)
        return gu, gr.sum(0), gB.sum(0), gC.sum(0), None, gfirst, None


class DeltaLoop(torch.autograd.Function):
    """q, r [B, G, L, K], k, b [B, H, L, K], v [B, H, L, V], log w [B, H, L, K|1], keep [B, L] uint8 or None, S [B, H, K, V].

    -> o [B, H, L, V], S after. b None: k is removed too, by what r reads after the decay; else r reads before it.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, r: Tensor, k: Tensor, b: Tensor | None, v: Tensor, log_w: Tensor, keep: Any, state: Tensor
    ) -> Any:
        (batch, groups, length, keys), (_, heads, _, values) = q.shape, v.shape
        sizes = batch, groups, length, keys, heads, values, log_w.shape[-1], b is not None, min(REPLAYED, length)
        return _forward(ctx, "delta.c", sizes, v, state, q, r, k, b, v, log_w, keep)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, _, k, b, v, log_w, _, state = saved = ctx.saved_tensors
        gq, gr, gk, gb, gw = k.new_empty(5, *k.shape).unbind()
        gv, gfirst = torch.empty_like(v), torch.empty_like(state)
        gout, glast = (g.contiguous() for g in grads)
        _call("delta.c", 1, ctx.sizes, *saved, gout, glast, gq, gr, gk, gb, gv, gw, gfirst)
        gq, gr = (g.unflatten(1, (q.shape[1], -1)).sum(2) for g in (gq, gr))
        gw = gw.sum(-1, keepdim=True) if log_w.shape[-1] == 1 else gw
        return gq, gr, gk, None if b is None else gb, gv, gw, None, gfirst


def flags_of(reset: Tensor | None, valid: Tensor | None) -> Tensor | None:
    """[B, L] uint8, as wkv.c and diagonal.c read them: 1 where a document begins, + 2 for padding; None for neither."""
    flags = None if reset is None else reset.to(torch.uint8)
    if valid is not None:
        padding = 2 * (~valid).to(torch.uint8)
        flags = padding if flags is None else flags + padding
    return flags
