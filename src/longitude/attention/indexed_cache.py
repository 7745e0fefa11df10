"""The cache layers of indexed attention. They need transformers."""

from __future__ import annotations

from longitude.attention.cache import LongitudeCacheLayer
from longitude.attention.latent_cache import LatentCacheLayer


class IndexedCacheLayer(LongitudeCacheLayer):
    """Keys and values as in LongitudeCacheLayer; the column "index_keys" [B, 1, L, index_dim] has the indexer's keys."""

    kind = "indexed"


class IndexedLatentCacheLayer(LatentCacheLayer):
    """Latents as in LatentCacheLayer; the column "index_keys" [B, 1, L, index_dim] has the indexer's keys."""

    kind = "indexed_latent"
