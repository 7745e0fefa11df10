"""The verdict of `explain` on a backend, and its rendering as text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longitude.attention.backends import Backend
from longitude.attention.request import Request


@dataclass(frozen=True)
class Verdict:
    """Verdict of `explain` on a backend: whether it supports a request, its cost, and whether it runs.

    Attributes:
        backend: Name of the backend.
        refusal: Reason why it does not support the request; None: it does.
        memory: Bytes beyond inputs and output.
        price: Estimated time relative to causal attention without bias.
        chosen: Whether the backend runs.
        passed_over: Reason why it does not run though it supports the request.
    """

    backend: str
    refusal: str | None
    memory: int
    price: float
    chosen: bool
    passed_over: str | None = None

    def __str__(self) -> str:
        mark = "->" if self.chosen else "  "
        if self.refusal is not None:
            return f"{mark} {self.backend:10s} refuses: {self.refusal}"
        why = f"; passed over: {self.passed_over}" if self.passed_over else ""
        if self.chosen and 1.5 <= self.price < math.inf:
            why = f", in about {self.price:.1f} times the time of plain attention"
        return f"{mark} {self.backend:10s} takes it, with about {_mib(self.memory)} beyond inputs and output{why}"


def _mib(memory: int) -> str:
    return f"{memory / 2**20:.1f} MiB"


def passed_over(backend: Backend, chosen: Backend, r: Request) -> str:
    """Why "auto" took another."""
    price, best = backend.price(r), chosen.price(r)
    if price == math.inf:
        return f"{_mib(backend.memory(r))} are more than it is taken for unasked"
    if price == best:
        return f"no cheaper than {chosen.name!r}, which comes first"
    return f"about {price:.1f} times the time of plain attention, {chosen.name!r} about {best:.1f}"
