"""The answer of a backend to a request, and what is applied around every backend: factors of queries, sinks, NaN kept apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from longitude.attention.apart import apart
from longitude.attention.backends import Backend, hides_by_weight
from longitude.attention.request import Request
from longitude.attention.terms import multiplied, with_sinks


def answer(backend: Backend, r: Request) -> tuple[Tensor, Tensor | None]:
    """What a backend gives. The dtype of q decides, under autocast too."""
    if torch.is_autocast_enabled(r.q.device.type):
        with torch.autocast(r.q.device.type, enabled=False):
            return answer(backend, r)
    if r.factors is not None:
        r = multiplied(r)
    run = partial(computed, backend)
    return apart(r, run) if hides_by_weight(backend, r) else run(r)


def computed(backend: Backend, r: Request) -> tuple[Tensor, Tensor | None]:
    """The same of finite numbers, or where nothing is hidden by a weight."""
    if r.sinks is not None and not backend.sinks:
        assert backend.partial is not None
        out, lse = with_sinks(*backend.partial(replace(r, sinks=None, lse=True)), r.sinks)
        return out, lse if r.lse else None
    if r.weights or r.lse:
        assert backend.partial is not None
        return backend.partial(r)
    return backend.run(r), None
