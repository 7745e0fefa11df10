"""A cache layer that keeps the newest tokens only: what a window can still see. It needs transformers, as the cache does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longitude.attention.cache import GrowingBuffer, LongitudeCacheLayer
from longitude.positions.base import Positions


class RollingCacheLayer(LongitudeCacheLayer):
    """Keys, values, positions and columns of the last `keep` tokens; get_seq_length() counts all that passed.

    A call may bring more tokens than it keeps: they all see each other, and `roll` forgets afterwards. Memory is
    O(keep + tokens of one call) while a call runs, and O(keep) between calls.
    """

    kind = "rolling"

    def __init__(self, keep: int, **kwargs: Any):
        self.keep = max(1, keep)  # the last one, too, tells where the next stands
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
            )  # after the largest of all, forgotten ones included
        return super().next_positions()

    def roll(self) -> None:
        """Forget what no later token sees."""
        held, keep = self.held, self.keep
        if held <= keep:
            return
        drop = held - keep
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (
            self._last(room, x, drop) for room, x in zip(self.rooms, (self.keys, self.values), strict=True)
        )
        self.columns = {name: column[:, :, -keep:].clone() for name, column in self.columns.items()}
        if isinstance(self.positions, int):
            self.positions += drop
        else:
            last = self.positions[-keep:] if self.positions.dim() == 1 else self.positions[:, -keep:]
            self.positions = last.clone()
        self.dropped += drop

    def _last(self, room: GrowingBuffer, held: Tensor, drop: int) -> Tensor:
        """The newest of what is held. In a room the window moves on, and is copied only where much is left behind."""
        if held is room.given and room.space is not None and drop < held.shape[2] - drop:
            room.space = room.space[:, :, drop:]
            room.given = held[:, :, drop:]
            return room.given
        room.space = room.given = None  # what is left behind goes with the room
        return held[:, :, drop:].clone()

    def require_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.dropped:
            raise ValueError(
                f"crop: tokens before the last {self.keep} are forgotten and would be seen again; expected a cache used "
                "forward only"
            )
        super().require_crop(tokens_to_remove)
