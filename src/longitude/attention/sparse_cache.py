"""The cache layer of sparse attention: keys and values of three branches, and the summaries of blocks. It needs transformers."""

from __future__ import annotations

from longitude.attention.cache import LongitudeCacheLayer


class SparseCacheLayer(LongitudeCacheLayer):
    """keys, values [B, 3 Hkv, L, head_dim]: those of blocks, which are not rotated, of chosen blocks, and of the window.

    columns "block_keys" and "block_values" [B, Hkv, L, head_dim]: at the last token of each block its summary, zeros elsewhere.
    """

    kind = "sparse"
