"""Other libraries on the same tensors: each corresponds to one of our encodings.

A peer is timed if its package is installed. `python benchmarks/peers.py CASE` prints the memory of a case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.bench import measurement
from longitude.bench.cases import AttentionShape, Case, Inputs, causal
from longitude.runs.machine import version_of

Forward = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Peer:
    """An implementation in another library that corresponds to one of our encodings.

    name: displayed name. package: its package. make: inputs -> (forward, learned parameters). scores: number of tensors
    [batch, heads, length, length] that forward and backward allocate at a time.
    """

    name: str
    package: str
    make: Callable[[Inputs], tuple[Forward, list[Tensor]]]
    scores: int = 0

    def case(self, inputs: Inputs) -> Case:
        forward, learned = self.make(inputs)
        return Case(self.name, "peer", self.package, forward, [inputs.q, inputs.k, inputs.v, *learned])

    def bytes(self, shape: AttentionShape) -> int:
        """Approximate bytes that forward and backward need beyond those of plain attention."""
        return self.scores * shape.batch * shape.heads * shape.length**2 * shape.torch_dtype.itemsize


def installed() -> dict[str, Peer]:
    """Peers with an installed package, by name."""
    return {peer.name: peer for peer in PEERS if version_of(peer.package) is not None}


def _repeated(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries, for code without groups."""
    times = inputs.shape.heads // inputs.shape.kv_heads
    return inputs.k.repeat_interleave(times, 1), inputs.v.repeat_interleave(times, 1)


# ---- rotations: what is computed once for a length, and q and k rotated by it ------------------------------------------
Rotation = tuple[Callable[[], Any], Callable[[Any], Sequence[Tensor]]]


def x_rotation(inputs: Inputs) -> Rotation:
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    rotary = RotaryEmbedding(inputs.shape.head_dim)
    tables = lambda: rotary.forward_from_seq_len(inputs.shape.length)[0]  # noqa: E731
    return tables, lambda angles: [apply_rotary_pos_emb(x, angles) for x in (inputs.q, inputs.k)]


def rotary_torch(inputs: Inputs) -> Rotation:
    """This library keeps its angles after the first call."""
    from rotary_embedding_torch import RotaryEmbedding

    rotary = RotaryEmbedding(inputs.shape.head_dim, cache_max_seq_len=inputs.shape.length)
    return lambda: None, lambda _: [rotary.rotate_queries_or_keys(x) for x in (inputs.q, inputs.k)]


def llama(inputs: Inputs) -> Rotation:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    shape, positions = inputs.shape, torch.arange(inputs.shape.length)[None]
    config = LlamaConfig(hidden_size=shape.dim, num_attention_heads=shape.heads, max_position_embeddings=shape.length)
    rotary = LlamaRotaryEmbedding(config)
    return lambda: rotary(inputs.x, positions), lambda tables: apply_rotary_pos_emb(inputs.q, inputs.k, *tables)


def rotating(rotation: Callable[[Inputs], Rotation]) -> Callable[[Inputs], tuple[Forward, list[Tensor]]]:
    """Plain attention of q and k that a library rotates."""

    def make(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
        tables, rotate = rotation(inputs)

        def forward() -> list[Tensor]:
            q, k = rotate(tables())
            return [causal(q, k, inputs.v)]

        return forward, []

    return make


# ---- x-transformers --------------------------------------------------------------------------------------------------
def _x_biased(inputs: Inputs, bias: Any) -> tuple[Forward, list[Tensor]]:
    """Attention of x-transformers with a masked bias, by scaled_dot_product_attention."""
    from x_transformers.attend import Attend

    attend, length = Attend(causal=True, flash=True, heads=inputs.shape.heads), inputs.shape.length
    bias = bias.to(inputs.q.dtype)

    def forward() -> list[Tensor]:
        k, v = _repeated(inputs)
        return [attend(inputs.q, k, v, attn_bias=bias(length, length))[0]]

    return forward, list(bias.parameters())


def x_alibi(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    from x_transformers.x_transformers import AlibiPositionalBias

    return _x_biased(inputs, AlibiPositionalBias(heads=inputs.shape.heads, total_heads=inputs.shape.heads))


def x_t5(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    from x_transformers.x_transformers import RelativePositionBias

    shape = inputs.shape
    return _x_biased(inputs, RelativePositionBias(scale=shape.head_dim**0.5, causal=True, heads=shape.heads))


ROTATIONS = {
    "x-transformers rotary": ("x-transformers", x_rotation),
    "rotary-embedding-torch": ("rotary-embedding-torch", rotary_torch),
    "transformers Llama": ("transformers", llama),
}
"""Name -> package, and how it rotates."""
PEERS = (
    Peer("x-transformers ALiBi", "x-transformers", x_alibi, scores=3),
    Peer("x-transformers T5 bias", "x-transformers", x_t5, scores=5),
    *(Peer(name, package, rotating(rotation)) for name, (package, rotation) in ROTATIONS.items()),
)


if __name__ == "__main__":
    measurement.main(sys.argv[1], lambda name, backend, inputs: installed()[name].case(inputs))
