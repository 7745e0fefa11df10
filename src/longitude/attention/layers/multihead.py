"""Attention as a layer: projections, an encoding, a cache, and attend() between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor, nn

from longitude.attention.cache_guard import CacheKind, of_this_mode
from longitude.attention.layers.base import checked_call
from longitude.attention.length_dependent import parted
from longitude.attention.masks import Mask
from longitude.attention.mixer import Mixer, MixerInputs, register_mixer
from longitude.attention.operation import raw_request, require_backend, run, run_parts
from longitude.attention.request import require_options
from longitude.positions.base import Encoding, check_sizes, explicit
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
    cache_kinds: tuple[CacheKind, ...] = ("full",)

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
            raise ValueError(f"expected num_heads to divide dim, got {num_heads} and {dim}; or pass head_dim=")
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim = head_dim or dim // num_heads
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
        if cache is not None and getattr(cache, "kind", None) not in self.cache_kinds:
            raise ValueError(
                f"cache: {type(self).__name__} expected the {type(self.cache_layer()).__name__} that its cache_layer() makes, "
                f"got {getattr(cache, 'owner', None) or type(cache).__name__}"
            )

    def mask_of(self, inputs: MixerInputs) -> Mask:
        """The mask of a call, with what the layer itself adds."""
        return inputs.mask

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        encoding = self.encoding if inputs.encoding is None else inputs.encoding
        cache = inputs.cache
        self.require_cache(cache)
        x, call = checked_call(x, self.dim, encoding, self.mask_of(inputs), inputs)
        heads = x.shape[0], call.length, -1, self.head_dim
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        if encoding.stable_keys and encoding.transforms:
            tables = inputs.tables
            if tables is None:
                tables = encoding.prepare(explicit(call.positions, call.length, x.device), None, q.dtype)
            q, k = encoding.queries(q, tables), encoding.keys(k, tables)
        columns, carry = {}, None
        if encoding.reads_tokens:
            columns, carry = encoding.context(x, None if cache is None else of_this_mode(cache.carry), call.documents)
        k_positions = call.positions
        if cache is not None:
            k, v, columns = cache.extend(k, v, call.positions, columns, carry, encoding)
            k_positions = cache.positions
        if q.dtype != k.dtype or v.dtype != k.dtype:  # a cache may hold keys in a wider one
            q, v = q.to(k.dtype), v.to(k.dtype)
        if call.remembered:
            q = q[:, :, call.remembered :]
        pairs = call.pairs(x.shape[0], q.shape[2], k.shape[2])
        dropout = self.dropout if self.training else 0.0
        places = call.q_positions, k_positions
        r = raw_request(
            q, k, v, encoding, columns, pairs.mask, *places, self.scale, dropout, inputs.return_weights, pairs
        )
        if encoding.stable_keys:
            out, weights = run(r, self.backend)
        else:
            out, weights = run_parts(parted(r, encoding, *places), self.backend)
        out = self.o_proj(out.to(x.dtype).transpose(1, 2).flatten(2))
        return (out, weights) if inputs.return_weights else out
