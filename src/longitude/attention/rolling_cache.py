"""A cache layer that keeps the newest tokens only: the keys of a window. It needs transformers, as the cache does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longitude.attention.cache import GrowingBuffer, LongitudeCacheLayer
from longitude.positions.coordinates import Positions


class RollingCacheLayer(LongitudeCacheLayer):
    """Keys, values, positions and columns of the last `keep` tokens; get_seq_length() counts all that passed.

    A call may have more tokens than it keeps: they are all keys of each other, and `roll` drops them afterwards. Memory is
    O(keep + tokens of one call) while a call runs, and O(keep) between calls.

    Args:
        keep: Number of tokens to keep.
    """

    kind = "rolling"

    def __init__(self, keep: int, **kwargs: Any):
        self.keep = max(1, keep)  # positions continue from the last one
        super().__init__(**kwargs)

    def forget(self) -> None:
        super().forget()
        self.dropped = 0

    def get_seq_length(self) -> int:
        return self.dropped + self.held

    def next_positions(self) -> Positions:
        if self.dropped and isinstance(self.positions, Tensor) and self.positions.dim() == 3:
            return (
                torch.as_tensor(self.max_position).view(-1, 1, 1) + 1
            )  # after the largest of all, dropped ones included
        return super().next_positions()

    def roll(self) -> None:
        """Drop tokens that no later token attends to."""
        held, keep = self.held, self.keep
        if held <= keep:
            return
        drop = held - keep
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (
            self._last(buffer, x, drop) for buffer, x in zip(self.buffers, (self.keys, self.values), strict=True)
        )
        self.columns = {name: column[:, :, -keep:].clone() for name, column in self.columns.items()}
        if isinstance(self.positions, int):
            self.positions += drop
        else:
            last = self.positions[-keep:] if self.positions.dim() == 1 else self.positions[:, -keep:]
            self.positions = last.clone()
        self.dropped += drop

    def _last(self, buffer: GrowingBuffer, held: Tensor, drop: int) -> Tensor:
        """The newest of the held tokens. In a buffer the window moves on; it is copied only if much is dropped."""
        if held is buffer.given and buffer.space is not None and drop < held.shape[2] - drop:
            buffer.space = buffer.space[:, :, drop:]
            buffer.given = held[:, :, drop:]
            return buffer.given
        buffer.space = buffer.given = None  # dropped keys are freed with their buffer
        return held[:, :, drop:].clone()

    def require_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.dropped:
            raise ValueError(
                f"crop: tokens before the last {self.keep} are dropped and would be keys again; expected a cache used "
                "forward only"
            )
        super().require_crop(tokens_to_remove)
