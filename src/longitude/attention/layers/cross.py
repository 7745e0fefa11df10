"""Cross-attention: a decoder's tokens ask, an encoder's output answers. No positions, no causality, keys and values made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longitude.attention.masks import NoMask, Padding
from longitude.attention.operation import attend, require_backend
from longitude.attention.request import require_options
from longitude.positions.base import check_sizes

if TYPE_CHECKING:
    from longitude.attention.cache import DynamicLayer


class CrossAttention(nn.Module):
    """softmax(scale W_q x . W_k s) W_v s, then W_o: queries of x [B, L, dim], keys and values of a source s [B, S, kv_dim]
    (Vaswani et al. 2017).

    Heads, scale, dropout and backend as in MultiHeadAttention: num_kv_heads heads of keys and values, each serving
    num_heads / num_kv_heads heads of queries; dropout acts on the weights, in training; scale is head_dim**-0.5 unless said.
    kv_dim: width of the source, dim unless said. Query and source have no common order, so there is no encoding and no
    causality here: every query sees every valid token of the source.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        kv_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kv_dim = dim if kv_dim is None else kv_dim
        check_sizes("CrossAttention", dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads, kv_dim=kv_dim)
        if num_heads % num_kv_heads:
            raise ValueError(f"expected num_kv_heads to divide num_heads, got {num_kv_heads} and {num_heads}")
        if dim % num_heads:
            raise ValueError(f"expected num_heads to divide dim, got {num_heads} and {dim}")
        require_backend(backend)
        require_options(scale, dropout)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(kv_dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(kv_dim, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(dim, dim, bias=bias)

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
        """-> [B, L, dim]; with return_weights also the weights [B, H, L, S].

        valid: True or 1 for tokens of the source, False or 0 for its padding; a row without any gives zeros (and o_proj's
        bias). cache: an empty one takes the keys and values of the source; a filled one has them, the source is not read
        again, and may be left out.
        """
        dim, kv_dim = self.q_proj.in_features, self.k_proj.in_features
        if x.dim() != 3 or x.shape[-1] != dim or x.numel() == 0:
            raise ValueError(f"x: expected [B, L, {dim}] with no empty dimension, got {list(x.shape)}")
        if source is not None and (source.dim() != 3 or source.shape[::2] != (len(x), kv_dim) or source.numel() == 0):
            raise ValueError(
                f"source: expected [{len(x)}, S, {kv_dim}] with no empty dimension, got {list(source.shape)}"
            )
        q = self.heads(self.q_proj(x))
        k, v = self.keys_and_values(source, cache, len(x))
        if valid is not None and valid.shape != (len(x), k.shape[2]):
            raise ValueError(
                f"valid: expected [{len(x)}, {k.shape[2]}], one per token of the source, got {list(valid.shape)}"
            )
        out = attend(
            q.to(k.dtype), k, v,
            mask=NoMask() if valid is None else Padding(valid),
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
            backend=self.backend,
        )  # fmt: skip
        out, weights = out if return_weights else (out, None)
        out = self.o_proj(out.to(x.dtype).transpose(1, 2).flatten(2))
        return (out, weights) if return_weights else out

    def keys_and_values(self, source: Tensor | None, cache: DynamicLayer | None, batch: int) -> tuple[Tensor, Tensor]:
        """[B, Hkv, S, head_dim] each: out of a filled cache, else made of the source and left in the cache."""
        if cache is not None and (not hasattr(cache, "keys") or hasattr(cache, "kind")):
            raise ValueError(
                "cache: CrossAttention expected the DynamicLayer that its cache_layer() makes, got "
                f"{getattr(cache, 'owner', None) or type(cache).__name__}"
            )
        if cache is None or not cache.get_seq_length():
            if source is None:
                raise ValueError(
                    "source: expected [B, S, kv_dim], or a cache that holds its keys and values, got neither"
                )
            k, v = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
            return (k, v) if cache is None else cache.update(k, v)
        k, v = cache.keys, cache.values
        assert isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
        expected = batch, self.num_kv_heads, k.shape[2] if source is None else source.shape[1], self.head_dim
        if k.shape != expected:
            raise ValueError(
                f"cache: expected keys {list(expected)} of this layer's source, got {list(k.shape)}; a cache serves one source"
            )
        return k, v

    def heads(self, projected: Tensor) -> Tensor:
        """[B, L, heads * head_dim] -> [B, heads, L, head_dim]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
