"""What a backend declares, and the one function that says why it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longitude.attention.request import Request
from longitude.attention.spans import spans
from longitude.positions.base import Drift, OffsetBias, OffsetVectors, PairBias, RowBias, Transport

ALL_TERMS = (OffsetBias, PairBias, Drift, OffsetVectors, RowBias, Transport)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Backend:
    """What a backend can do. `refuses` reads the declarations; `limits` adds what they cannot say."""

    name: str
    run: Callable[[Request], Tensor]
    terms: tuple[type, ...]
    any_mask: bool  # else: causality, windows, and padding and documents in spans
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...] | None  # None: all
    table_gradients: bool
    dropout: bool
    weights: bool
    limits: Callable[[Request], str | None]
    memory: Callable[[Request], int]  # bytes beyond inputs and output, forward
    price: Callable[[Request], float]  # rough time over plain causal attention, to choose by
    partial: Callable[[Request], tuple[Tensor, Tensor]] | None = None  # the output and the logsumexp of the scores


def refuses(backend: Backend, r: Request) -> str | None:
    """Why this backend does not take this request, in words; None if it does."""
    for term in r.terms:
        if not isinstance(term, backend.terms):
            return f"it does not know {type(term).__name__}"
    if r.q.dtype not in backend.dtypes:
        return f"it computes in {_names(backend.dtypes)}, not in {r.q.dtype}"
    if backend.devices is not None and r.q.device.type not in backend.devices:
        return f"it runs on {', '.join(backend.devices)}, not on {r.q.device.type}"
    if r.learned and not backend.table_gradients:
        return "it gives no gradient to what the encoding has learned"
    if r.dropout and not backend.dropout:
        return "it has no dropout"
    if r.weights and not backend.weights:
        return "it never holds the weights"
    if r.lse and backend.partial is None:
        return "it does not tell the logsumexp of the scores"
    if r.beyond_band and not backend.any_mask and isinstance(why := spans(r), str):
        return f"it runs span by span, and {why}"
    return backend.limits(r)


def in_forward_mode() -> bool:
    """Whether derivatives are being carried forward, which torch's fused kernels and operators of our own do not do."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


NO_FORWARD_MODE = "it has no derivatives in forward mode"


def wide_item(r: Request) -> int:
    """Bytes of a number in float32 or wider."""
    return torch.promote_types(r.q.dtype, torch.float32).itemsize


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
