"""The one cache layer for all encodings. It needs transformers (the `models` extra); nothing else in this room does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from longitude.positions.base import Columns, Positions, explicit


class LongitudeCacheLayer(DynamicLayer):
    """Keys, values and what an encoding must know about the tokens that passed.

    keys [B, Hkv, L, head_dim], rotated where a rotated key stays right, raw otherwise; values [B, Hkv, L, head_dim];
    positions of the keys, an int where they count up from it, else [L] or [B, L]; columns, per token [B, heads, L, ...];
    carry, the O(1) rest of a context (a convolution's tail, a last sum), every tensor of it with the batch in front.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.forget()

    def forget(self) -> None:
        self.positions: Positions = 0
        self.columns: Columns = {}
        self.carry: Any = None

    def next_positions(self) -> Positions:
        """Where tokens after the cached ones stand if nothing else is said: an int, or [..., 1] + 1, 2, ..."""
        if isinstance(self.positions, int):
            return self.positions + self.get_seq_length()
        return self.positions[..., -1:] + 1

    def extend(
        self, k: Tensor, v: Tensor, positions: Positions, columns: Columns, carry: Any
    ) -> tuple[Tensor, Tensor, Columns]:
        """Append the tokens of one call -> keys, values and columns of all; self.positions then covers all, too."""
        past, new = self.get_seq_length(), k.shape[2]
        if not past:
            self.positions = positions
        elif not (
            isinstance(positions, int) and isinstance(self.positions, int) and positions == self.positions + past
        ):
            before, after = explicit(self.positions, past, k.device), explicit(positions, new, k.device)
            if before.dim() != after.dim():
                before, after = (p.expand(k.shape[0], -1) for p in (before, after))
            self.positions = torch.cat([before, after], -1)
        k, v = self.update(k, v)
        if past:
            columns = {name: torch.cat([self.columns[name], column], 2) for name, column in columns.items()}
        self.columns, self.carry = columns, carry
        return k, v, columns

    def _map(self, keys: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch to everything beside keys and values."""
        self.columns = {name: keys(column) for name, column in self.columns.items()}
        self.carry = tree_map_only(Tensor, keys, self.carry)
        if isinstance(self.positions, Tensor) and self.positions.dim() == 2:
            self.positions = keys(self.positions)

    def reset(self) -> None:
        super().reset()
        self.forget()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map(lambda x: x[indices])

    def crop(self, tokens_to_remove: int) -> None:
        held: list[Tensor] = []
        tree_map_only(Tensor, held.append, self.carry)
        if tokens_to_remove and held:
            raise ValueError(
                "crop: the encoding carries a state that cannot be taken back; expected a cache used forward only"
            )
        super().crop(tokens_to_remove)
        keep = self.get_seq_length()
        self.columns = {name: column[:, :, :keep] for name, column in self.columns.items()}
        if isinstance(self.positions, Tensor):
            self.positions = self.positions[..., :keep]


class LongitudeCache(Cache):
    """A cache of LongitudeCacheLayer, one per layer of a model."""

    def __init__(self, num_layers: int):
        super().__init__(layers=[LongitudeCacheLayer() for _ in range(num_layers)])


def adopt(cache: Cache, num_layers: int) -> Cache:
    """Give an empty cache, such as generate() makes, our layers, in place; a filled one must have them already."""
    if all(isinstance(layer, LongitudeCacheLayer) for layer in cache.layers) and len(cache.layers) == num_layers:
        return cache
    if cache.get_seq_length():
        raise ValueError(
            f"past_key_values: expected an empty cache or a LongitudeCache, got a filled {type(cache).__name__}"
        )
    if getattr(cache, "offloading", False) or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise ValueError(
            f"past_key_values: expected a LongitudeCache or a plain DynamicCache, got {type(cache).__name__}; "
            "static, sliding, quantized and offloaded caches cannot hold what encodings keep"
        )
    cache.layers[:] = [LongitudeCacheLayer() for _ in range(num_layers)]
    return cache
