"""Attention over a sliding window, and a cache that keeps no more than the window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from jaxtyping import Float
from torch import Tensor

from longitude.attention.documents import places_of
from longitude.attention.heads import AttendOptions
from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.masks import Chunks, Mask, Window
from longitude.attention.mixer import MixerInputs, register_mixer
from longitude.errors import UsageError
from longitude.positions.base import Encoding

if TYPE_CHECKING:
    from longitude.attention.cache import RollingCacheLayer


@register_mixer("window")
class WindowAttention(MultiHeadAttention):
    """Attention to a window of `size` keys: the token itself and the size - 1 before it.

    x [B, L, dim] -> [B, L, dim] in O(L size) time. Its cache layer keeps the last size - 1 tokens, however long the
    sequence: O(size) memory and time per token.

    Args:
        dim, num_heads, num_kv_heads, encoding: As in MultiHeadAttention.
        size: Keys per query.
        head_dim, bias, dropout, scale, backend, qk_norm, qk_norm_eps, xsa, output_gate, softcap, short_conv, conv_kernel: As in
            MultiHeadAttention.

    Raises:
        ValueError: As MultiHeadAttention, and for a size below 1.

    Source:
        Child et al. 2019, arXiv:1904.10509, https://arxiv.org/abs/1904.10509; Beltagy et al. 2020, arXiv:2004.05150,
        https://arxiv.org/abs/2004.05150.
    """

    bidirectional = False
    cache_kinds = ("full", "rolling")
    growth = "O(1)"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        size: int,
        **options: Unpack[AttendOptions],
    ):
        super().__init__(dim, num_heads, num_kv_heads, encoding, **options)
        self.size = size

    def products(self, keys: float) -> float:
        return super().products(min(keys, self.size))

    def cache_layer(self) -> RollingCacheLayer:  # with a size
        from longitude.attention.cache import RollingCacheLayer

        return RollingCacheLayer(self.size - 1)

    def mask_of(self, inputs: MixerInputs) -> Mask:
        """The mask with the window joined by &."""
        return inputs.step.once(type(self).masked, super().mask_of(inputs), inputs.documents, self.size)

    @staticmethod
    def masked(mask: Mask, documents: Tensor | None, size: int) -> Mask:
        """The mask of a call with that of the layer."""
        return mask & Window(size)

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        """Mix tokens as MultiHeadAttention does; the cache then drops tokens that left the window.

        `documents` covers all tokens so far, [B, Lk]; weights cover the keys that the cache still stores. A LongitudeCacheLayer,
        which drops nothing, works too.
        """
        need = self.size - 1
        if getattr(inputs.cache, "kind", None) == "rolling" and inputs.cache.keep < need:
            expected, got = f"a layer that keeps {need} tokens or more", f"one that keeps {inputs.cache.keep}"
            raise UsageError("cache", expected, got, "self.cache_layer() makes one")
        return super().mix_tokens(x, inputs)

    def extra_repr(self) -> str:
        return f"size={self.size}"


@register_mixer("chunks")
class ChunkAttention(WindowAttention):
    """Attention within chunks of `size` tokens: a token attends to itself and to the earlier tokens of its chunk.

    x [B, L, dim] -> [B, L, dim] in O(L size) time. Chunks are counted in each document, from its first token after padding, as
    in the layers of Llama 4 with rotation. Its cache layer keeps the last size - 1 tokens.

    Args:
        dim, num_heads, num_kv_heads, encoding: As in MultiHeadAttention.
        size: Tokens of a chunk.
        head_dim, bias, dropout, scale, backend, qk_norm, qk_norm_eps, xsa, output_gate, softcap, short_conv, conv_kernel: As in
            MultiHeadAttention.

    Raises:
        ValueError: As MultiHeadAttention, and for a size below 1.

    Source:
        Meta AI 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence/
    """

    def products(self, keys: float) -> float:
        return super().products(min(keys, (self.size + 1) / 2))  # on average, half a chunk precedes a token

    @staticmethod
    def masked(mask: Mask, documents: Tensor | None, size: int) -> Mask:
        return mask & Chunks(size, None if documents is None else places_of(documents))
