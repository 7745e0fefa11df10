"""The cache layer of latent attention: one head of latents and rotary keys, and no values. It needs transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longitude.attention.cache import LongitudeCacheLayer


class LatentCacheLayer(LongitudeCacheLayer):
    """keys [B, 1, L, kv_rank + rope_dim]: each token's latent, then its shared rotary key.

    values [B, 1, L, 0] are a view of them, because values are made of latents. Everything else is LongitudeCacheLayer's.
    """

    kind = "latent"

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, _ = super().update(key_states, value_states, *args, **kwargs)
        self.values = self.keys[..., :0]
        return self.keys, self.values
