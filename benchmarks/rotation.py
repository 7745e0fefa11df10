"""The target of rotation alone: queries and keys rotated by tables that are prepared already, and how other libraries do it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import longitude as lg
from longitude.bench.cases import Inputs
from longitude.bench.peers import Forward, llama_rotary
from longitude.bench.rows import Row
from target import Call, Session

PINNED = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""So that the allocator keeps its memory: else pages that the system zeroes cost more than what is measured."""


# ---- other libraries ---------------------------------------------------------------------------------------------------
def x_transformers(inputs: Inputs) -> Forward:
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    angles, _ = RotaryEmbedding(inputs.shape.head_dim).forward_from_seq_len(inputs.shape.length)
    return lambda: [apply_rotary_pos_emb(x, angles) for x in (inputs.q, inputs.k)]


def rotary_torch(inputs: Inputs) -> Forward:
    """It keeps its angles after the first call."""
    from rotary_embedding_torch import RotaryEmbedding

    rotary = RotaryEmbedding(inputs.shape.head_dim, cache_max_seq_len=inputs.shape.length)
    return lambda: [rotary.rotate_queries_or_keys(x) for x in (inputs.q, inputs.k)]


def llama(inputs: Inputs) -> Forward:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = llama_rotary(inputs.shape)(inputs.x, torch.arange(inputs.shape.length)[None])
    return lambda: apply_rotary_pos_emb(inputs.q, inputs.k, cos, sin)


PEERS: dict[str, Callable[[Inputs], Forward]] = {
    "transformers Llama": llama,
    "rotary-embedding-torch": rotary_torch,
    "x-transformers rotary": x_transformers,
}


# ---- the target --------------------------------------------------------------------------------------------------------
def rotated(rope: lg.Encoding, tables: Any, q: Tensor, k: Tensor) -> list[Tensor]:
    return [rope.queries(q, tables), rope.keys(k, tables)]


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
        for peer in session.peers_of((*PEERS,), shape):
            ways[peer.name] = ("peer", peer.package, PEERS[peer.name](inputs))
        for passed in ("forward", "forward+backward"):
            calls: dict[str, Call] = {}
            for name, (kind, backend, way) in ways.items():
                both = partial(cloned_twice, inputs) if name == "clone" else partial(forward_and_back, way, inputs)
                calls[name] = (kind, backend, torch.no_grad()(way) if passed == "forward" else both)
            rows += session.compare(calls, "clone", shape, passed, turns, "rotation")
    return rows
