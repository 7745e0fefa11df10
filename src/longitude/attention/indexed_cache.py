"""The cache layer of indexed attention. It needs transformers."""

from __future__ import annotations

from longitude.attention.cache import LongitudeCacheLayer


class IndexedCacheLayer(LongitudeCacheLayer):
    """Keys and values as in LongitudeCacheLayer; the column "index_keys" [B, 1, L, index_dim] holds the indexer's keys."""

    kind = "indexed"
