"""Cross-attention: queries of a decoder, keys and values of an encoder's output, computed once; no positions, no causality."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.attention.documents import require_tokens
from longitude.attention.heads import Headed, join_heads
from longitude.attention.masks import NoMask, Padding
from longitude.errors import UsageError

if TYPE_CHECKING:
    from longitude.attention.cache import DynamicLayer


class CrossAttention(Headed):
    """Cross-attention of a sequence x to a source s: W_o softmax(scale W_q x . W_k s) W_v s.

    The two have no common order, so there is no encoding and no causality: queries attend to all valid tokens of the source.

    Args:
        dim: width of x and of the output.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; None: num_heads.
        kv_dim: width of the source; None: dim.
        head_dim, bias, dropout, scale, backend: as in MultiHeadAttention.

    Raises:
        ValueError: for sizes that do not fit.

    Source:
        Vaswani et al. 2017, arXiv 1706.03762, https://arxiv.org/abs/1706.03762
    """

    def cache_layer(self) -> DynamicLayer:
        """An empty cache of the source's keys and values."""
        from longitude.attention.cache import DynamicLayer

        return DynamicLayer()

    def forward(
        self,
        x: Float[Tensor, "B L dim"],
        source: Float[Tensor, "B S kv_dim"] | None = None,
        *,
        valid: Bool[Tensor, "B S"] | Int[Tensor, "B S"] | None = None,
        cache: DynamicLayer | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attend to the source, or to the keys and values of it in a cache.

        Args:
            x: [B, L, dim].
            source: [B, S, kv_dim]; may be left out with a filled cache.
            valid: True or 1 for tokens of the source, False or 0 for its padding, [B, S]; a row without any gives zeros (and
                o_proj's bias).
            cache: an empty one stores the keys and values of the source; a filled one provides them, and source is not read.
            return_weights: return the weights, too.

        Returns:
            [B, L, dim]; with return_weights also the weights [B, H, L, S].

        Raises:
            ValueError: for shapes that do not fit, another mixer's cache, or neither source nor filled cache.
        """
        dim, kv_dim = self.q_proj.in_features, self.k_proj.in_features
        require_tokens(x, dim)
        if source is not None and (source.dim() != 3 or source.shape[::2] != (len(x), kv_dim) or source.numel() == 0):
            raise UsageError("source", f"[{len(x)}, S, {kv_dim}] with no empty dimension", list(source.shape))
        q = self.queries(x)
        k, v = self.of_source(source, cache, len(x))
        if valid is not None and valid.shape != (len(x), k.shape[2]):
            expected = [len(x), k.shape[2]]
            raise UsageError("valid", f"{expected}, one per token of the source", list(valid.shape))
        mask = NoMask() if valid is None else Padding(valid)
        out = self.attend(q.to(k.dtype), k, v, mask=mask, return_weights=return_weights)
        out, weights = out if isinstance(out, tuple) else (out, None)
        out = self.o_proj(join_heads(out.to(x.dtype)))
        return (out, weights) if return_weights else out

    def of_source(self, source: Tensor | None, cache: DynamicLayer | None, batch: int) -> tuple[Tensor, Tensor]:
        """[B, Hkv, S, head_dim] each: those of a filled cache, else projected from the source and cached."""
        if cache is not None and (not hasattr(cache, "keys") or hasattr(cache, "kind")):
            got = getattr(cache, "owner", None) or type(cache).__name__
            raise UsageError("cache: CrossAttention", "the DynamicLayer that its cache_layer() makes", got)
        if cache is None or not cache.get_seq_length():
            if source is None:
                raise UsageError("source", "[B, S, kv_dim], or a cache with its keys and values", "neither")
            k, v = self.keys_and_values(source)
            return (k, v) if cache is None else cache.update(k, v)
        k, v = cache.keys, cache.values
        assert isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
        expected = batch, self.num_kv_heads, k.shape[2] if source is None else source.shape[1], self.head_dim
        if k.shape != expected:
            keys = f"keys {list(expected)} of this layer's source"
            raise UsageError("cache", keys, list(k.shape), "a cache serves one source")
        return k, v
