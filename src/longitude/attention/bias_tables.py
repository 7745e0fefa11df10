"""The bias of contiguous positions: one number per head and offset, cached on the CPU if it needs no gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.positions.bias import FixedBias
from longitude.positions.terms import OffsetBias, require_shape

LONGEST = 2**18  # most offsets of a call for which a table is cached


def bias_of(term: OffsetBias, first: int, last: int, q: Tensor, dtype: torch.dtype) -> Float[Tensor, "heads offsets"]:
    """The bias at the offsets first, first - 1, ..., last, on the device of q; do not write to it.

    A fixed bias is read from a cached table: computed again for each token, it could take longer than the attention. So is a
    learned one if it needs no gradient. Beyond its reach a bias is one number per head.
    """
    count = first - last + 1
    if torch.compiler.is_compiling():
        return _made(term, first, count, q, dtype)
    # No cache for fake tensors, nor on a GPU, where a table made on one stream may not be ready on another.
    plain = type(q) is Tensor and q.is_cpu and torch._C._len_torch_dispatch_stack() == 0 and count <= LONGEST
    fixed = isinstance(term.at, FixedBias)
    # Only modules without layers: hooks and adapters may change what a layer computes from its parameters.
    learned = term.of is not None and not term.of._modules
    if plain and (fixed or (learned and not torch.is_grad_enabled())):
        size = 1 << (count - 1).bit_length()  # a power of two, so that a growing sequence makes few tables
        lowest = last // size * size
        start = lowest + 2 * size - 1 - first
        table = _table(term.at, lowest, size, dtype) if fixed else _learned(term, lowest, size, dtype)
        if table.shape not in ((q.shape[1], 2 * size), (1, 2 * size)):
            require_shape("OffsetBias", table, q, (q.shape[1], 2 * size))
        return table[:, start : start + count]
    if term.reach is not None and first > term.reach:
        near = _made(term, term.reach, max(1, term.reach - last + 1), q, dtype)
        far = near[:, :1].expand(-1, min(count, first - term.reach))
        return torch.cat([far, near], 1) if last <= term.reach else far
    return _made(term, first, count, q, dtype)


def _made(term: OffsetBias, first: int, count: int, q: Tensor, dtype: torch.dtype) -> Tensor:
    bias = term.at(first - torch.arange(count, device=q.device))
    require_shape("OffsetBias", bias, q, (q.shape[1], count), (1, count))
    return bias.to(dtype)


@lru_cache(maxsize=32)  # by the numbers of the bias: equal ones are the same function
@torch.inference_mode(False)
@torch.no_grad()
def _table(at: Callable[[Tensor], Tensor], lowest: int, size: int, dtype: torch.dtype) -> Tensor:
    """The bias at 2 size offsets, descending to the lowest."""
    return at(lowest + 2 * size - 1 - torch.arange(2 * size, device="cpu")).to(dtype).contiguous()


_of_modules: WeakKeyDictionary[nn.Module, tuple[tuple[bytes, int, int, torch.dtype], Tensor]] = WeakKeyDictionary()


@torch.inference_mode(False)
@torch.no_grad()
def _learned(term: OffsetBias, lowest: int, size: int, dtype: torch.dtype) -> Tensor:
    """Table of a learned bias, cached while the parameters of its module are unchanged."""
    assert term.of is not None
    numbers = b"".join(p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for p in term.of.parameters())
    key = numbers, lowest, size, dtype
    known, table = _of_modules.get(term.of, (None, None))
    if known != key or table is None:
        offsets = lowest + 2 * size - 1 - torch.arange(2 * size, device="cpu")
        _of_modules[term.of] = key, table = key, term.at(offsets).to(dtype).contiguous()
    return table
