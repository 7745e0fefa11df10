"""A cache layer that stores a state of constant size instead of keys and values. It needs transformers, as the cache does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import CacheLayerMixin

from longitude.attention.cache_guard import CropsTogether, of_this_mode
from longitude.attention.documents import last_position
from longitude.errors import UsageError
from longitude.positions.coordinates import Positions


class StateLayer(CropsTogether, CacheLayerMixin):
    """Cache of a recurrent mixer: its state after the last token.

    Attributes:
        state: None before the first token, then the mixer's tuple (or dict) of tensors, batch first.
        seen: Tokens so far, the same for every row.
        newest: Position of the last token that is no padding, on several axes the largest of its document: int, [1] or [B, 1].
        owner: Name of the class that made the state; reading it from another class raises ValueError.
        last: The last token, [B, 1, dim], if a channel mix after the mixer reads it.
        in_place: Whether the mixer overwrites the state that it reads, if gradients are off.
    """

    kind: str = "state"
    is_sliding = False
    is_compileable = False

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.forget()

    def forget(self) -> None:
        self.state: Any = None
        self.last: Tensor | None = None
        self.seen = 0
        self.newest: int | Tensor = -1
        self.owner: str | None = None
        self.ids = None
        self.device: torch.device | None = None  # where its state belongs, once it was moved away

    def read(self, owner: str) -> Any:
        """The state, for the mixer class of that name."""
        if self.owner not in (None, owner):
            raise UsageError("cache", f"a state of {owner}", f"one of {self.owner}", "a cache serves one model only")
        self.state = of_this_mode(self.state)
        return self.state

    def write(self, owner: str, state: Any, tokens: int, positions: Positions, documents: Tensor | None = None) -> None:
        """Replace the state by the one after `tokens` more tokens at `positions`.

        documents [B, Lk]: of all tokens so far, with a negative number for padding; None: one document without padding.
        """
        self.read(owner)
        self.newest = last_position(positions, tokens, documents, self.newest)
        self.state, self.owner, self.seen = state, owner, self.seen + tokens

    def next_positions(self) -> Positions:
        """Default positions of the tokens after these."""
        return self.newest + 1

    def last_positions(self) -> Tensor:
        """Position of the last token: [1] or [B, 1]."""
        return self.newest if isinstance(self.newest, Tensor) else torch.tensor([self.newest])

    # ---- what transformers requires of a layer ----
    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError("cache: a state is written by its mixer; it takes no keys and values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("cache: a state is written by its mixer; it takes no keys and values")

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change_ids(change)
        self.state, self.last = tree_map_only(Tensor, change, (self.state, self.last))
        if isinstance(self.newest, Tensor) and self.newest.dim() == 2:
            self.newest = change(self.newest)

    def reset(self) -> None:
        self.forget()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices])

    def require_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.seen:
            raise ValueError(f"crop: a state of {self.owner} cannot be cropped; expected a cache used forward only")

    def _crop(self, tokens_to_remove: int) -> None:
        """Do nothing: `require_crop` raises if there is anything to remove."""

    def offload(self) -> None:
        """Move the state to the CPU's memory; `prefetch` moves it back."""

        def moved(x: Tensor) -> Tensor:
            self.device = x.device
            return x.to("cpu")

        self.state, self.last = tree_map_only(Tensor, moved, (self.state, self.last))

    def prefetch(self) -> None:
        held = self.state, self.last
        self.state, self.last = tree_map_only(Tensor, lambda x: x.to(self.device or x.device), held)
