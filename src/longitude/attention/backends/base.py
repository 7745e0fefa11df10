"""The declaration of a backend, the registry of backends, and the function that returns why a backend does not apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longitude.attention.request import Request
from longitude.native.derivatives import by_autograd
from longitude.native.gpu import switched_off

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NO_FORWARD_MODE = "it has no derivatives in forward mode"


@dataclass(frozen=True)
class Backend:
    """An implementation of attention: what it supports, its estimated cost, and the function that runs it.

    `refuses` compares a request with these declarations; `limits` adds conditions that they cannot express. Every backend must
    equal `reference`, and the laws of `lg.testing` run over all registered backends.

    Args:
        name: the name that users pass as `backend=`.
        run: function from a Request to the output [B, H, Lq, Dv], in the dtype of q. Queries and keys are already rotated.
        memory: bytes beyond inputs and output that forward takes, estimated from shapes.
        price: estimated time relative to causal attention without bias; "auto" takes the lowest. math.inf: only by name.
        terms: the kinds of terms (lg.terms.OffsetBias, lg.terms.PairBias, lg.terms.Drift, ...) that it adds to the scores.
        any_mask: whether it supports every mask. Otherwise: causality, windows, and padding and documents as cut by `spans`.
        dtypes: supported dtypes of q, k and v.
        devices: supported device types, such as ("cuda",); None: all.
        table_gradients: whether parameters of the encoding get gradients; q, k and v always do.
        dropout: whether it supports dropout of the weights.
        weights: whether it returns the weights.
        limits: function that returns why it does not support a request; None if it does. Like price, it is called once for
            calls that differ only in tensor values.
        partial: function that returns the output and the logsumexp of each query's scores [B, H, Lq]; None: it supports neither
            return_lse nor sinks.
        sinks: whether it applies the sinks of a request itself; otherwise they are applied to the result of `partial`.
        transforms: whether it supports torch.func gradients and forward-mode derivatives; autograd always works.
        by_weight: for a backend with any_mask: whether it hides keys of this request by weights of 0 instead of leaving them
            out. It then gets finite numbers only, because 0 * NaN is NaN.
    """

    name: str
    run: Callable[[Request], Tensor]
    memory: Callable[[Request], int]
    price: Callable[[Request], float]
    terms: tuple[type, ...] = ()
    any_mask: bool = False
    dtypes: tuple[torch.dtype, ...] = FLOATS
    devices: tuple[str, ...] | None = None
    table_gradients: bool = True
    dropout: bool = False
    weights: bool = False
    limits: Callable[[Request], str | None] = lambda r: None
    partial: Callable[[Request], tuple[Tensor, Tensor]] | None = None
    sinks: bool = False
    transforms: bool = True
    by_weight: Callable[[Request], bool] = lambda r: True


BACKENDS: dict[str, Backend] = {}
"""Backends by name; of equal prices "auto" takes the first."""


def register_backend(backend: Backend) -> Backend:
    """Register a backend by its name for `lg.attend`, `lg.explain` and the laws.

    Args:
        backend: the backend to register.

    Returns:
        The backend.

    Raises:
        ValueError: the name is "auto", or another backend has it.
    """
    runs = [(b.run.__module__, b.run.__qualname__) for b in (backend, BACKENDS.get(backend.name, backend))]
    if backend.name == "auto" or runs[0] != runs[1]:  # a notebook may define the same one again
        raise ValueError(f"the backend {backend.name!r} is registered already; choose another name")
    if backend.name in switched_off():
        backend = replace(backend, limits=lambda r: "LONGITUDE_BACKENDS in the environment switches it off")
    BACKENDS[backend.name] = backend
    return backend


def refuses(backend: Backend, r: Request) -> str | None:
    """The reason why this backend does not take this request; None if it does."""
    for term in r.terms:
        if not isinstance(term, backend.terms):
            return f"it does not support {type(term).__name__}"
    if r.q.dtype not in backend.dtypes:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in backend.dtypes)
        return f"it computes in {names}, not in {r.q.dtype}"
    if backend.devices is not None and r.q.device.type not in backend.devices:
        return f"it runs on {', '.join(backend.devices)}, not on {r.q.device.type}"
    if r.learned and not backend.table_gradients:
        return "it has no gradient for parameters of the encoding"
    if not backend.transforms and not by_autograd():
        return "it supports autograd only, not forward mode or torch.func"
    if r.dropout and not backend.dropout:
        return "it does not support dropout"
    if r.weights and not backend.weights:
        return "it does not return the weights"
    if (r.lse or r.sinks is not None) and backend.partial is None:
        what = "by which parts are merged" if r.lse else "which sinks need"
        return f"it does not return the logsumexp of the scores, {what}"
    if r.pairs.beyond_band and not backend.any_mask and isinstance(why := r.pairs.spans, str):
        return f"it runs span by span, and {why}"
    return backend.limits(r)


def refusal(backend: Backend, requests: Sequence[Request]) -> str | None:
    """The reason why a backend does not support all requests; None if it does."""
    for r in requests:
        if (why := refuses(backend, r)) is not None:
            return why
    return None


def cheapest(requests: Sequence[Request]) -> Backend:
    """The backend of the lowest price among those that support all requests, as `reference` does."""
    best, lowest, device = BACKENDS["reference"], math.inf, requests[0].q.device.type
    for backend in BACKENDS.values():  # a loop, because torch.compile does not support min(key=...)
        if backend.devices is not None and device not in backend.devices:
            continue
        price = backend.price(requests[-1])
        if price < lowest and refusal(backend, requests) is None:
            best, lowest = backend, price
        if lowest <= 1.0:  # plain attention: nothing costs less
            break
    return best


# ---- memory --------------------------------------------------------------------------------------------------------------
def wide_item(r: Request) -> int:
    """Bytes of a number in float32 or wider."""
    return torch.promote_types(r.q.dtype, torch.float32).itemsize


def dense_bytes(r: Request) -> int:
    """Scores, bias, weights, mask: four [B, H, Lq, Lk] at once; and what the terms allocate on the way to their bias."""
    return 4 * r.q.shape[0] * r.heads * r.rows * r.length * wide_item(r) + terms_bytes(r)


def terms_bytes(r: Request) -> int:
    """Bytes that the largest term allocates while it computes its bias, beyond a few [B, H, Lq, Lk]."""
    pairs = r.rows * r.length * (1 if r.contiguous else r.q.shape[0])
    return wide_item(r) * max([0, *[term.numbers_of(r, pairs) for term in r.terms]])
