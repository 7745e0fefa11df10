"""The loops over tokens in C, as an autograd function. The state stays in the processor's cache, not in memory."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.errors import UsageError
from longitude.native import load
from longitude.native.tensors import LITERALS, Signature
from longitude.recurrent.ops.scan import needs_formula, once

REPLAYED = 32
"""Tokens per chunk in the backward of delta.c, which stores all states of one chunk."""
LANES = 16
"""Channels in one vector, as in lanes.h."""
FLAGS = ("keep", "flags")


def loops(name: str, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """Forward and backward of a C file for float32 or float64; None if it cannot be compiled."""
    return load.passes(Path(__file__).with_name(name), dtype)


def usable(name: str, x: Tensor) -> bool:
    """Whether the loops of a C file support tensors like x."""
    return x.device.type == "cpu" and not needs_formula(x) and loops(name, x.dtype) is not None


class Kernel(NamedTuple):
    """Sizes in the struct Shape of a C file, and the shapes of what it reads and writes, in the order of its arguments.

    Args:
        sizes: Names of the sizes.
        inputs: Tensors that forward reads; `flags` and `keep` are uint8 or None, and have no gradient.
        results: Outputs of the tokens, and the state after the last.
        gradients: Gradients of the other inputs, in their order, before sums over what shares an input.
        folded: Sums that `sum_to_size` does not compute: of a gradient, for its input.
    """

    sizes: str
    inputs: dict[str, str]
    results: dict[str, str]
    gradients: dict[str, str]
    folded: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}

    def signature(self, name: str, backward: bool) -> Signature:
        """What forward or backward requires."""
        shapes = self.inputs | self.results | (self.gradients if backward else {})
        typed = {x: f"{'uint8' if x in FLAGS else 'dtype'} {shape}" for x, shape in shapes.items()}
        return Signature(
            name, typed, lambda of: of.get("heads", 0) % of.get("groups", 1) == 0, "groups that divide heads"
        )


def _delta() -> Kernel:
    """A delta rule. b None: k is removed too, by what r reads after the decay; else r reads before it."""
    read, key, value = (
        f"batch {width}" for width in ("groups length keys", "heads length keys", "heads length values")
    )
    state, decay = "batch heads keys values", "batch heads length 1|keys"
    return Kernel(
        "batch groups length keys heads values decays early chunk threads",
        {"q": read, "r": read, "k": key, "b": key, "v": value, "log_w": decay, "keep": "batch length", "first": state},
        {"out": value, "last": state},
        {"gq": key, "gr": key, "gk": key, "gb": key, "gv": value, "gw": key, "gfirst": state},
        dict.fromkeys(("q", "r"), lambda g, x: g.unflatten(1, (x.shape[1], -1)).sum(2)),
    )


def _scan() -> Kernel:
    token, read, state = "batch length groups channels", "batch length groups size", "batch groups size channels"
    diagonal, parts = "groups size channels", "batch groups blocks length size"
    return Kernel(
        "batch length groups channels size chunk threads",
        {"dt": token, "x": token, "A": diagonal, "B": read, "C": read, "keep": "batch length", "first": state},
        {"out": token, "last": state},
        {"gdt": token, "gx": token, "gA": state, "gB": parts, "gC": parts, "gfirst": state},
        dict.fromkeys(("B", "C"), lambda g, _: g.sum(2).transpose(1, 2)),
    )


def _diagonal() -> Kernel:
    """Real and imaginary parts of complex numbers are the 2."""
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


def _call(name: str, direction: int, sizes: dict[str, int], *data: Tensor | None) -> None:
    """Run forward (0) or backward (1) of a C file. sizes: those of its struct Shape, and of all its shapes."""
    SIGNATURES[name][direction].require(data, **sizes)
    if data[0] is None or not all(x is None or x.is_contiguous() for x in data):
        raise UsageError(name, "contiguous tensors", [None if x is None else x.stride() for x in data])
    run, shape = loops(name, data[0].dtype), [sizes[size] for size in KERNELS[name].sizes.split()]
    assert run is not None
    run[direction]((c_int64 * len(shape))(*shape), *(c_void_p(None if x is None else x.data_ptr()) for x in data))


class Loop(torch.autograd.Function):
    """Loop.apply(C file, sizes that no shape decides, *inputs) -> outputs of the tokens, and the state after the last.

    Backward keeps the inputs alone, and loops over the tokens twice more, `chunk` of them at a time.
    """

    @staticmethod
    def forward(ctx: Any, name: str, sizes: dict[str, int], *data: Tensor | None) -> Any:
        inputs, kernel = [x if x is None else x.contiguous() for x in data], KERNELS[name]
        known, ctx.gradients = _sizes(name, *[None if x is None else x.shape for x in inputs])
        ctx.name, ctx.sizes = name, {**known, "threads": torch.get_num_threads(), **sizes}
        of_shape: Any = dict(zip(kernel.inputs.values(), inputs, strict=True))
        results = [torch.empty_like(of_shape[shape]) for shape in kernel.results.values()]
        _call(name, 0, ctx.sizes, *inputs, *results)
        ctx.save_for_backward(*inputs)
        return tuple(results)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, kernel = ctx.saved_tensors, KERNELS[ctx.name]  # read once: checkpointing recomputes them for one read
        gradients = [saved[-1].new_empty(shape) for shape in ctx.gradients]
        _call(ctx.name, 1, ctx.sizes, *saved, *(g.contiguous() for g in grads), *gradients)
        rest, of_inputs = iter(gradients), []
        for name, x in zip(kernel.inputs, saved, strict=True):
            g = None if name in FLAGS else next(rest)
            of_inputs.append(None if g is None or x is None else kernel.folded.get(name, _summed)(g, x))
        return None, None, *of_inputs


@lru_cache(4096)  # layers have the same shapes
def _sizes(name: str, *shapes: torch.Size | None) -> tuple[dict[str, int], list[list[int]]]:
    """The sizes that the shapes of inputs decide, and the shapes of gradients; do not write to them."""
    kernel = KERNELS[name]
    declared = zip(kernel.inputs.values(), shapes, strict=True)
    named = (pair for dims, shape in declared if shape is not None for pair in zip(dims.split(), shape))
    known = {dim: size for dim, size in named if dim not in LITERALS}
    known["decays"] = known.pop("1|keys", 0)
    known["blocks"] = -(-known.get("channels", 0) // LANES)
    sizes = LITERALS | known
    return known, [[sizes[dim] for dim in dims.split()] for dims in kernel.gradients.values()]


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.sum_to_size(x.shape)


def flags_of(reset: Tensor | None, valid: Tensor | None) -> Tensor | None:
    """[B, L] uint8, as wkv.c and diagonal.c read them: 1 where a document begins, + 2 for padding; None for neither."""
    flags = None if reset is None else reset.to(torch.uint8)
    if valid is not None:
        padding = 2 * (~valid).to(torch.uint8)
        flags = padding if flags is None else flags + padding
    return flags
