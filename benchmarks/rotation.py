"""The target of rotation alone: queries and keys rotated by tables that are prepared already, and how other libraries do it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import longitude as lg
from longitude.bench.cases import Inputs
from longitude.bench.measurement import Row
from peers import ROTATIONS, Forward
from target import Call, Session

PINNED = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""So that the allocator keeps its memory: else pages that the system zeroes cost more than what is measured."""


def prepared(name: str, inputs: Inputs) -> Forward:
    """How a library rotates, with its tables."""
    tables, rotate = ROTATIONS[name][1](inputs)
    return partial(rotate, tables())


def rotated(rope: lg.Encoding, tables: Any, q: Tensor, k: Tensor) -> list[Tensor]:
    return [*rope.queries_and_keys(q, k, tables)]


def forward_and_back(rotate: Forward, inputs: Inputs) -> object:
    return torch.autograd.grad(rotate(), [inputs.q, inputs.k], [inputs.gradient, inputs.gradient])


@torch.no_grad()
def cloned_twice(inputs: Inputs) -> object:
    """Q and k, and the gradients that come back: autograd itself would pass those on as they are."""
    return [x.clone() for x in (inputs.q, inputs.k, inputs.gradient, inputs.gradient)]


def rotation(session: Session) -> list[Row]:
    """Rotating q and k by prepared tables, over cloning both; with the backward pass, over cloning their gradients too."""
    rows = []
    for length, turns in ((2048, 30), (8192, 15)):
        shape = session.shape(length)
        inputs = Inputs.of(shape)
        q, k = inputs.q, inputs.k
        ways: dict[str, tuple[str, str, Forward]] = {
            "clone": ("plain", "torch", lambda q=q, k=k: [q.clone(), k.clone()])
        }
        for layout in ("half", "interleaved"):
            rope = lg.Rotary(head_dim=shape.head_dim, layout=layout)
            tables = rope.prepare(torch.arange(shape.length))
            ways[f"longitude, {layout}"] = ("ours", "longitude", partial(rotated, rope, tables, q, k))
        for peer in session.peers_of((*ROTATIONS,), shape):
            ways[peer.name] = ("peer", peer.package, prepared(peer.name, inputs))
        for passed in ("forward", "forward+backward"):
            calls: dict[str, Call] = {}
            for name, (kind, backend, way) in ways.items():
                both = partial(cloned_twice, inputs) if name == "clone" else partial(forward_and_back, way, inputs)
                calls[name] = (kind, backend, torch.no_grad()(way) if passed == "forward" else both)
            rows += session.compare(calls, "clone", shape, passed, turns, "rotation")
    return rows
