"""What hierarchical attention keeps of the past: the window as a ring, and the blocks of a binary counter."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longitude.attention.layers.hierarchical.blocks import Level


class State(NamedTuple):
    """After `seen` tokens: the last W of them, token i in slot i mod W, and for each digit 1 of seen - W its block.

    keys as projected, and turned as they are attended to (None where the encoding turns nothing). ends: positions of a
    block's first and last token. Where there is no token or block stand zeros.
    """

    seen: Int[Tensor, " B"]
    keys: Float[Tensor, "B Hkv W D"]
    turned: Float[Tensor, "B Hkv W D"] | None
    values: Float[Tensor, "B Hkv W Dv"]
    places: Int[Tensor, "B W"]
    block_keys: Float[Tensor, "B Hkv levels D"]
    block_values: Float[Tensor, "B Hkv levels Dv"]
    ends: Int[Tensor, "B levels 2"]

    def of(self, rows: list[int]) -> State:
        """The state of these rows."""
        return State(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Stream(NamedTuple):
    """Tokens first, first + 1, ... of rows that agree in `first`, and the blocks of those before: [B, Hkv, levels, D] of keys
    and values, [B, levels, 2] of ends; None where there are none.
    """

    first: int
    keys: Float[Tensor, "B Hkv n D"]
    turned: Float[Tensor, "B Hkv n D"] | None
    values: Float[Tensor, "B Hkv n Dv"]
    places: Int[Tensor, "B n"]
    blocks: tuple[Tensor, Tensor, Tensor] | None = None

    def followed_by(self, new: Stream) -> Stream:
        turned = None if self.turned is None or new.turned is None else torch.cat([self.turned, new.turned], 2)
        keys, values = torch.cat([self.keys, new.keys], 2), torch.cat([self.values, new.values], 2)
        places = torch.cat([self.places, new.places.expand(len(self.places), -1)], 1)
        return Stream(self.first, keys, turned, values, places, self.blocks)


def window_of(state: State, rows: Tensor, count: int) -> Stream:
    """The window of these rows, all of `count` tokens, in order."""
    window = state.keys.shape[2]
    first = max(0, count - window)
    slots = torch.arange(first, count, device=rows.device) % window

    def in_order(x: Tensor) -> Tensor:
        return x.index_select(0, rows).index_select(2, slots)

    return Stream(
        first,
        in_order(state.keys),
        None if state.turned is None else in_order(state.turned),
        in_order(state.values),
        state.places.index_select(0, rows).index_select(1, slots),
        (state.block_keys[rows], state.block_values[rows], state.ends[rows]) if first else None,
    )


def state_after(stream: Stream, levels: list[Level], counts: list[int], window: int) -> State:
    """The state of rows that have heard counts[b] tokens, of a stream that may go on; levels: its pyramid."""
    device, rows = stream.keys.device, torch.arange(len(counts), device=stream.keys.device)
    count = torch.tensor(counts, device=device)
    slots = torch.arange(window, device=device)
    newest = count[:, None] - 1 - (count[:, None] - 1 - slots) % window  # the token in each slot
    there, at = newest >= 0, (newest - stream.first).clamp(0, stream.keys.shape[2] - 1)

    def ring(x: Tensor) -> Tensor:
        found = x.transpose(1, 2)[rows[:, None], at]  # [B, W, heads, D]
        return torch.where(there[..., None, None], found, 0).transpose(1, 2).contiguous()

    before = (count - window).clamp(min=0)
    blocks: tuple[list[Tensor], ...] = [], [], []
    for level in range(max(0, max(counts) - window).bit_length()):
        own = levels[level]
        there_is = (before >> level & 1 == 1) if own.keys.shape[2] else torch.zeros_like(before, dtype=torch.bool)
        node = ((before >> level) - 1 - own.first).clamp(0, max(0, own.keys.shape[2] - 1))
        for found, x in zip(blocks, (own.keys, own.values, own.ends.expand(len(rows), -1, -1)), strict=True):
            picked = x[rows, ..., node, :] if x.shape[-2] else x.new_zeros(*x.shape[:-2], x.shape[-1])
            found.append(torch.where(there_is.view(-1, *[1] * (picked.dim() - 1)), picked, 0))

    def stacked(found: list[Tensor], like: Tensor) -> Tensor:
        return torch.stack(found, -2) if found else like

    wide = torch.promote_types(stream.keys.dtype, torch.float32)
    none = stream.keys.new_zeros(len(counts), stream.keys.shape[1], 0, stream.keys.shape[3], dtype=wide)
    return State(
        count,
        ring(stream.keys),
        None if stream.turned is None else ring(stream.turned),
        ring(stream.values),
        torch.where(there, stream.places.expand(len(rows), -1).gather(1, at), 0),
        stacked(blocks[0], none),
        stacked(blocks[1], none.new_zeros(*none.shape[:3], stream.values.shape[3])),
        stacked(blocks[2], count.new_zeros(len(counts), 0, 2)),
    )


def with_rows(state: State | None, rows: list[int], part: State, batch: int) -> State:
    """The state of a batch, these rows of it replaced by those of `part`; None: the other rows have heard nothing."""
    if rows == list(range(batch)):
        return part
    if state is None:
        state = State(*(None if x is None else x.new_zeros(batch, *x.shape[1:]) for x in part))  # type: ignore[arg-type]
    levels = max(state.ends.shape[1], part.ends.shape[1])
    at = torch.tensor(rows, device=part.seen.device)
    both = zip(grown(state, levels), grown(part, levels), strict=True)
    return State(*(None if x is None or new is None else x.index_copy(0, at, new) for x, new in both))  # type: ignore[arg-type]


def grown(state: State, levels: int) -> State:
    """The same with room for blocks of so many levels."""
    more = levels - state.ends.shape[1]
    return state._replace(
        **{name: F.pad(getattr(state, name), (0, 0, 0, more)) for name in ("block_keys", "block_values", "ends")}
    )
