"""Attention as a layer: projections, an encoding, a cache, and attend() between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.attention.cache_guard import of_this_mode, unchanged_if_refused
from longitude.attention.layers.base import called
from longitude.attention.length_dependent import parted, whole
from longitude.attention.masks import Causal, Mask
from longitude.attention.mixer import Mixer, register_mixer
from longitude.attention.operation import raw_request, require_backend, run
from longitude.attention.request import part_of, require_options
from longitude.positions.base import Encoding, Positions, check_sizes, explicit
from longitude.positions.composed import compose

if TYPE_CHECKING:
    from longitude.attention.cache import LongitudeCacheLayer


@register_mixer("attention")
class MultiHeadAttention(Mixer):
    """Self-attention with num_kv_heads heads of keys and values, each serving num_heads / num_kv_heads heads of queries
    (Vaswani et al. 2017; grouped heads: Ainslie et al. 2023).

    x [B, L, dim] -> [B, L, dim]. The projected vectors are split into heads of head_dim = dim / num_heads (or as said).
    num_kv_heads = num_heads is multi-head, 1 is multi-query, between them grouped-query attention. dropout acts on the
    weights, in training. scale is head_dim**-0.5 unless said. What an encoding does at a model's input
    is not done here: call its embed(x, positions) there.
    """

    scores = True
    rotates = True
    bidirectional = True
    has_weights = True
    caches = ("keys and values",)  # what a cache may hold

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes("MultiHeadAttention", dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"expected num_kv_heads to divide num_heads, got {num_kv_heads} and {num_heads}")
        if head_dim is not None:
            check_sizes("MultiHeadAttention", head_dim=head_dim)
        require_backend(backend)
        require_options(scale, dropout)
        if head_dim is None and dim % num_heads:
            raise ValueError(f"expected num_heads to divide dim, got {num_heads} and {dim}; or say head_dim")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim or dim // num_heads
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.q_proj = nn.Linear(dim, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, dim, bias=bias)
        self.encoding = compose(encoding)

    def cache_layer(self) -> LongitudeCacheLayer:
        from longitude.attention.cache import LongitudeCacheLayer

        return LongitudeCacheLayer()

    def require_cache(self, cache: Any) -> None:
        """ValueError unless it is None or holds what this mixer looks at: another mixer's state would not do."""
        if cache is not None and getattr(cache, "holds", None) not in self.caches:
            raise ValueError(
                f"cache: {type(self).__name__} expected the {type(self.cache_layer()).__name__} that its cache_layer() makes, "
                f"got {getattr(cache, 'owner', None) or type(cache).__name__}"
            )

    def forward(
        self,
        x: Float[Tensor, "B L dim"],
        *,
        mask: Mask = Causal(),  # noqa: B008 (frozen)
        positions: Positions | None = None,
        documents: Int[Tensor, "B Lk"] | None = None,
        cache: LongitudeCacheLayer | None = None,
        memory: Float[Tensor, "B M dim"] | None = None,
        encoding: Encoding | None = None,
        tables: Any = None,
        return_weights: bool = False,
    ) -> Any:
        """-> [B, L, dim]; with return_weights also the weights [B, H, L, Lk].

        positions: of x, an int to count from, [L] or [B, L]; None continues the cache. documents: a number per token,
        cached ones included; a run of one number is a document, tokens see their own only, and nobody sees a negative number:
        padding. cache: keeps
        this call's tokens and lets x see those before. memory: the layer's input at an earlier segment, which x sees and no
        gradient enters (Dai et al. 2019); positions and documents are then of both together. encoding, tables: an encoding
        and its prepared tables held by a model for all its layers, instead of the layer's own.
        """
        encoding = compose(encoding) if encoding is not None else self.encoding
        self.require_cache(cache)
        call = called(x, self.q_proj.in_features, encoding, mask, positions, documents, cache, memory)
        x, mask, positions, length = call.x, call.mask, call.positions, call.x.shape[1]
        heads = x.shape[0], length, -1, self.head_dim
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        if encoding.stable_keys:
            if tables is None:
                tables = encoding.prepare(explicit(positions, length, x.device), None, q.dtype)
            q, k = encoding.queries(q, tables), encoding.keys(k, tables)
        columns, carry = encoding.context(x, of_this_mode(cache.carry) if cache is not None else None, call.documents)
        k_positions = positions
        with unchanged_if_refused(cache):
            if cache is not None:
                k, v, columns = cache.extend(k, v, positions, columns, carry, encoding)
                k_positions = cache.positions
                if k.shape[2] < call.keys:  # the cache forgets what nobody sees any more
                    mask = mask.since(call.keys - k.shape[2])

            if call.remembered:  # the memory asks nothing
                q, positions = q[:, :, call.remembered :], part_of(positions, slice(None), slice(call.remembered, None))
            dropout = self.dropout if self.training else 0.0
            q, v = q.to(k.dtype), v.to(k.dtype)  # a cache may hold keys in a wider dtype
            r = raw_request(
                q, k, v, encoding, columns, mask, positions, k_positions, self.scale, dropout, return_weights
            )
            parts = whole(r) if encoding.stable_keys else parted(r, encoding, positions, k_positions)
            out, weights = run(parts, self.backend)
        out = out.to(x.dtype)
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return (out, weights) if return_weights else out
