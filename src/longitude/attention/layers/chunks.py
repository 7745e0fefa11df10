"""Attention within chunks of a text, and a cache that keeps no more than a chunk."""

from __future__ import annotations

from collections.abc import Sequence

from longitude.attention.documents import places_of
from longitude.attention.layers.window import WindowAttention
from longitude.attention.masks import Mask
from longitude.attention.mixer import MixerInputs, register_mixer
from longitude.attention.patterns import Chunks
from longitude.positions.base import Encoding


@register_mixer("chunks")
class ChunkAttention(WindowAttention):
    """Chunked attention: tokens attend to themselves and to earlier tokens in the same chunk of `size` tokens.

    x [B, L, dim] -> [B, L, dim] in O(L size) time. Chunks are counted in each document, from its first token that is no
    padding, as in Llama 4's layers with rotation. Its cache layer keeps the last size - 1 tokens.

    Args:
        dim, num_heads, num_kv_heads, encoding: As in MultiHeadAttention.
        size: Tokens of a chunk.
        head_dim, bias, dropout, scale, backend: As in MultiHeadAttention.

    Raises:
        ValueError: As in MultiHeadAttention, and for a size below 1.

    Source:
        Meta AI 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence/
    """

    shares_sequence = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        size: int,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__(
            dim, num_heads, num_kv_heads, encoding,
            size=size, head_dim=head_dim, bias=bias, dropout=dropout, scale=scale, backend=backend,
        )  # fmt: skip
        self.window_mask = Chunks(size)

    def products(self, keys: float) -> float:
        return super().products(min(keys, (self.size + 1) / 2))  # half a chunk is before a token

    def joined_mask(self, inputs: MixerInputs) -> Mask:
        return self.window_mask if inputs.documents is None else Chunks(self.size, places_of(inputs.documents))
