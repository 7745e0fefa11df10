"""The libraries people use, on the same tensors: each does in its own code what one of our encodings does in ours.

A peer is timed where its package is installed. Whole modules of transformers run between the queries, keys and values that
they are given: their projections are replaced by something that returns those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.bench.cases import AttentionShape, Case, Inputs

Forward = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Peer:
    """name: what is shown. package: of the registry. make: inputs -> (forward, learned parameters). scores: how many
    tensors [batch, heads, length, length] forward and backward hold at once. turn: inputs -> what turns q and k by tables
    that are prepared already.
    """

    name: str
    package: str
    make: Callable[[Inputs], tuple[Forward, list[Tensor]]]
    scores: int = 0
    turn: Callable[[Inputs], Forward] | None = None

    def case(self, inputs: Inputs) -> Case:
        forward, learned = self.make(inputs)
        return Case(self.name, forward, [inputs.q, inputs.k, inputs.v, *learned], self.package, peer=True)

    def bytes(self, work: AttentionShape) -> int:
        """About what forward and backward need beyond what plain attention does."""
        return self.scores * work.score_bytes


def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed() -> dict[str, Peer]:
    """The peers whose package is here, by name."""
    return {peer.name: peer for peer in PEERS if version_of(peer.package) is not None}


def _repeated(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries, for code that knows no groups."""
    times = inputs.work.heads // inputs.work.kv_heads
    return inputs.k.repeat_interleave(times, 1), inputs.v.repeat_interleave(times, 1)


# ---- x-transformers --------------------------------------------------------------------------------------------------
def _x_attend(inputs: Inputs) -> Any:
    from x_transformers.attend import Attend

    return Attend(causal=True, flash=True, heads=inputs.work.heads)


def x_alibi(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    """Its bias is cached, then masked and given to scaled_dot_product_attention."""
    from x_transformers.x_transformers import AlibiPositionalBias

    attend, length = _x_attend(inputs), inputs.work.length
    bias = AlibiPositionalBias(heads=inputs.work.heads, total_heads=inputs.work.heads).to(inputs.q.dtype)

    def forward() -> list[Tensor]:
        k, v = _repeated(inputs)
        return [attend(inputs.q, k, v, attn_bias=bias(length, length))[0]]

    return forward, []


def x_t5(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    from x_transformers.x_transformers import RelativePositionBias

    work, attend = inputs.work, _x_attend(inputs)
    bias = RelativePositionBias(scale=work.head_dim**0.5, causal=True, heads=work.heads).to(inputs.q.dtype)

    def forward() -> list[Tensor]:
        k, v = _repeated(inputs)
        return [attend(inputs.q, k, v, attn_bias=bias(work.length, work.length))[0]]

    return forward, list(bias.parameters())


def x_rotary(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    attend, rotary = _x_attend(inputs), RotaryEmbedding(inputs.work.head_dim)

    def forward() -> list[Tensor]:
        angles, _ = rotary.forward_from_seq_len(inputs.work.length)
        k, v = _repeated(inputs)
        return [attend(apply_rotary_pos_emb(inputs.q, angles), apply_rotary_pos_emb(k, angles), v)[0]]

    return forward, []


# ---- rotary-embedding-torch ------------------------------------------------------------------------------------------
def rotary_torch(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    from rotary_embedding_torch import RotaryEmbedding

    rotary = RotaryEmbedding(inputs.work.head_dim, cache_max_seq_len=inputs.work.length)

    def forward() -> list[Tensor]:
        q, k = (rotary.rotate_queries_or_keys(x) for x in (inputs.q, inputs.k))
        return [_causal(q, k, inputs.v)]

    return forward, []


# ---- transformers ----------------------------------------------------------------------------------------------------
class Given(nn.Module):
    """In the place of a projection: returns what it was given."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def llama(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotary, positions = _llama_rotary(inputs.work), torch.arange(inputs.work.length)[None]

    def forward() -> list[Tensor]:
        cos, sin = rotary(inputs.x, positions)
        return [_causal(*apply_rotary_pos_emb(inputs.q, inputs.k, cos, sin), inputs.v)]

    return forward, []


def _llama_rotary(work: AttentionShape) -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=work.dim, num_attention_heads=work.heads, max_position_embeddings=work.length)
    )


def bloom(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    work, q = inputs.work, inputs.q
    config = BloomConfig(hidden_size=work.dim, n_head=work.heads, hidden_dropout=0.0, attention_dropout=0.0)
    module = BloomAttention(config, layer_idx=0)
    module.dense = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    ones = torch.ones(work.batch, work.length)
    future = torch.full((work.length, work.length), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)[None, None]
    still = torch.zeros((), dtype=q.dtype)

    def forward() -> list[Tensor]:
        k, v = _repeated(inputs)
        fused = torch.stack([q, k, v], 3).transpose(1, 2).flatten(2)  # as its projection would return them
        module.query_key_value = Given(fused)  # pyright: ignore[reportAttributeAccessIssue]
        alibi = build_alibi_tensor(ones, work.heads, q.dtype)
        return [_heads(module(fused, still, alibi, future)[0], work)]

    return forward, []


def mpt(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

    work = inputs.work
    module = MptAttention(MptConfig(d_model=work.dim, n_heads=work.heads, max_seq_len=work.length), layer_idx=0)
    module.out_proj = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    future = torch.ones(work.length, work.length, dtype=torch.bool).triu(1)[None, None]

    def forward() -> list[Tensor]:
        k, v = _repeated(inputs)
        fused = torch.cat([_flat(each) for each in (inputs.q, k, v)], 2)
        module.Wqkv = Given(fused)  # pyright: ignore[reportAttributeAccessIssue]
        alibi = build_mpt_alibi_tensor(work.heads, work.length).to(fused.dtype)
        return [_heads(module(fused, alibi, attention_mask=future)[0], work)]

    return forward, []


def t5(inputs: Inputs) -> tuple[Forward, list[Tensor]]:
    """The bias that its attention computes, masked and given to scaled_dot_product_attention."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    work, q = inputs.work, inputs.q
    config = T5Config(d_model=work.dim, d_kv=work.head_dim, num_heads=work.heads, is_decoder=True)
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(q.dtype)
    future = torch.full((work.length, work.length), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)

    def forward() -> list[Tensor]:
        k, v = _repeated(inputs)
        bias = module.compute_bias(work.length, work.length) + future
        return [F.scaled_dot_product_attention(q, k, v, attn_mask=bias)]

    return forward, [module.relative_attention_bias.weight]


# ---- rotation alone, by tables that are prepared already ---------------------------------------------------------------
def turn_of_x(inputs: Inputs) -> Forward:
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    angles, _ = RotaryEmbedding(inputs.work.head_dim).forward_from_seq_len(inputs.work.length)
    return lambda: [apply_rotary_pos_emb(x, angles) for x in (inputs.q, inputs.k)]


def turn_of_rotary_torch(inputs: Inputs) -> Forward:
    """It keeps its angles after the first call."""
    from rotary_embedding_torch import RotaryEmbedding

    rotary = RotaryEmbedding(inputs.work.head_dim, cache_max_seq_len=inputs.work.length)
    return lambda: [rotary.rotate_queries_or_keys(x) for x in (inputs.q, inputs.k)]


def turn_of_llama(inputs: Inputs) -> Forward:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = _llama_rotary(inputs.work)(inputs.x, torch.arange(inputs.work.length)[None])
    return lambda: apply_rotary_pos_emb(inputs.q, inputs.k, cos, sin)


def _flat(x: Tensor) -> Tensor:
    """[B, H, L, D] -> [B, L, H D]."""
    return x.transpose(1, 2).flatten(2)


def _heads(x: Tensor, work: AttentionShape) -> Tensor:
    """[B, L, H D] -> [B, H, L, D]."""
    return x.unflatten(2, (work.heads, work.head_dim)).transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


PEERS = (
    Peer("x-transformers ALiBi", "x-transformers", x_alibi, scores=3),
    Peer("x-transformers T5 bias", "x-transformers", x_t5, scores=5),
    Peer("x-transformers rotary", "x-transformers", x_rotary, turn=turn_of_x),
    Peer("rotary-embedding-torch", "rotary-embedding-torch", rotary_torch, turn=turn_of_rotary_torch),
    Peer("transformers Llama", "transformers", llama, turn=turn_of_llama),
    Peer("transformers Bloom", "transformers", bloom, scores=4),
    Peer("transformers MPT", "transformers", mpt, scores=4),
    Peer("transformers T5", "transformers", t5, scores=5),
)
