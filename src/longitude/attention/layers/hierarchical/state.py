"""State of hierarchical attention: the window as a ring, the blocks as a binary counter, and its update by one token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only

from longitude.attention.layers.hierarchical.blocks import Level, Rule, bias_at, offset_terms, tables_at, weighted
from longitude.positions.composed import Composed


class Tokens(NamedTuple):
    """Projections of the tokens of a call. q is rotated; k is not; rotated: rotated keys, None without rotation."""

    q: Float[Tensor, "B H L D"]
    k: Float[Tensor, "B Hkv L D"]
    rotated: Float[Tensor, "B Hkv L D"] | None
    v: Float[Tensor, "B Hkv L Dv"]
    gate: Float[Tensor, "B H L"] | None
    places: Int[Tensor, "B L"]


class State(NamedTuple):
    """After `seen` tokens: the last W of them, token i in slot i mod W, and for each digit 1 of seen - W its block.

    keys are not rotated; rotated: rotated keys, None if the encoding rotates nothing. ends: positions of a block's first and
    last token. Slots without a token, and levels without a block, are zeros.
    """

    seen: Int[Tensor, " B"]
    keys: Float[Tensor, "B Hkv W D"]
    rotated: Float[Tensor, "B Hkv W D"] | None
    values: Float[Tensor, "B Hkv W Dv"]
    places: Int[Tensor, "B W"]
    block_keys: Float[Tensor, "B Hkv levels D"]
    block_values: Float[Tensor, "B Hkv levels Dv"]
    ends: Int[Tensor, "B levels 2"]

    def of(self, rows: list[int]) -> State:
        """The state of these rows."""
        return State(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Stream(NamedTuple):
    """Tokens first, first + 1, ... of rows with the same `first`, and the blocks of earlier tokens.

    blocks: keys and values [B, Hkv, levels, D], ends [B, levels, 2]; None if there are none.
    """

    first: int
    keys: Float[Tensor, "B Hkv n D"]
    rotated: Float[Tensor, "B Hkv n D"] | None
    values: Float[Tensor, "B Hkv n Dv"]
    places: Int[Tensor, "B n"]
    blocks: tuple[Tensor, Tensor, Tensor] | None = None

    def followed_by(self, new: Stream) -> Stream:
        rotated = None if self.rotated is None or new.rotated is None else torch.cat([self.rotated, new.rotated], 2)
        keys, values = torch.cat([self.keys, new.keys], 2), torch.cat([self.values, new.values], 2)
        places = torch.cat([self.places, new.places.expand(len(self.places), -1)], 1)
        return Stream(self.first, keys, rotated, values, places, self.blocks)


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
        None if state.rotated is None else in_order(state.rotated),
        in_order(state.values),
        state.places.index_select(0, rows).index_select(1, slots),
        (state.block_keys[rows], state.block_values[rows], state.ends[rows]) if first else None,
    )


def state_after(stream: Stream, levels: list[Level], counts: list[int], window: int) -> State:
    """The state of rows after counts[b] tokens of a stream, which may have more; levels: the pyramid of its blocks."""
    device, rows = stream.keys.device, torch.arange(len(counts), device=stream.keys.device)
    count = torch.tensor(counts, device=device)
    slots = torch.arange(window, device=device)
    newest = count[:, None] - 1 - (count[:, None] - 1 - slots) % window  # the token in each slot
    there, at = newest >= 0, (newest - stream.first).clamp(0, stream.keys.shape[2] - 1)

    def ring(x: Tensor) -> Tensor:
        tokens = x.transpose(1, 2)[rows[:, None], at]  # [B, W, heads, D]
        return torch.where(there[..., None, None], tokens, 0).transpose(1, 2).contiguous()

    before = (count - window).clamp(min=0)
    blocks: tuple[list[Tensor], ...] = [], [], []
    for level in range(max(0, max(counts) - window).bit_length()):
        own = levels[level]
        there_is = (before >> level & 1 == 1) if own.keys.shape[2] else torch.zeros_like(before, dtype=torch.bool)
        node = ((before >> level) - 1 - own.first).clamp(0, max(0, own.keys.shape[2] - 1))
        for every, x in zip(blocks, (own.keys, own.values, own.ends.expand(len(rows), -1, -1)), strict=True):
            picked = x[rows, ..., node, :] if x.shape[-2] else x.new_zeros(*x.shape[:-2], x.shape[-1])
            every.append(torch.where(there_is.view(-1, *[1] * (picked.dim() - 1)), picked, 0))

    def stacked(every: list[Tensor], none: Tensor) -> Tensor:
        return torch.stack(every, -2) if every else none

    wide = torch.promote_types(stream.keys.dtype, torch.float32)
    none = stream.keys.new_zeros(len(counts), stream.keys.shape[1], 0, stream.keys.shape[3], dtype=wide)
    return State(
        count,
        ring(stream.keys),
        None if stream.rotated is None else ring(stream.rotated),
        ring(stream.values),
        torch.where(there, stream.places.expand(len(rows), -1).gather(1, at), 0),
        stacked(blocks[0], none),
        stacked(blocks[1], none.new_zeros(*none.shape[:3], stream.values.shape[3])),
        stacked(blocks[2], count.new_zeros(len(counts), 0, 2)),
    )


def with_rows(state: State | None, rows: list[int], part: State, batch: int) -> State:
    """The state of a batch, these rows of it replaced by those of `part`; None: the other rows are empty."""
    if rows == list(range(batch)):
        return part
    if state is None:
        state = State(*(None if x is None else x.new_zeros(batch, *x.shape[1:]) for x in part))  # type: ignore[arg-type]
    levels = max(state.ends.shape[1], part.ends.shape[1])
    at = torch.tensor(rows, device=part.seen.device)
    both = zip(grown(state, levels), grown(part, levels), strict=True)
    return State(*(None if x is None or new is None else x.index_copy(0, at, new) for x, new in both))  # type: ignore[arg-type]


def grown(state: State, levels: int) -> State:
    """Pad a state with room for blocks of this many levels."""
    more = levels - state.ends.shape[1]
    names = "block_keys", "block_values", "ends"
    return state._replace(**{name: F.pad(getattr(state, name), (0, 0, 0, more)) for name in names})


# ---- one token ----------------------------------------------------------------------------------------------------------
def step(
    rule: Rule, token: Tokens, encoding: Composed, state: State, real: list[bool], begins: list[bool]
) -> tuple[Float[Tensor, "B H 1 Dv"], State]:
    """The output, and the state with this token, which may be written in place: O(window + log count), and about one merge.

    Rows that are not real are unchanged; those that begin a document start from an empty state.
    """
    q, places = token.q, token.places
    counts = [0 if new else count for new, count in zip(begins, state.seen.tolist(), strict=True)]
    state = with_token(rule, token, writable(state), counts, real, begins)
    counts = [count + now for count, now in zip(counts, real, strict=True)]

    wide, heads = torch.promote_types(q.dtype, torch.float32), (token.k.shape[1], -1)
    rows = q.to(wide)[:, :, 0].unflatten(1, heads)  # [B, Hkv, H/Hkv, D]
    count, terms = state.seen[:, None], offset_terms(encoding)

    def over(keys: Tensor, values: Tensor, twice: Tensor, seen: Tensor, more: Tensor | float) -> tuple[Tensor, Tensor]:
        scores = rule.scale * (rows @ keys.to(wide).mT) + more
        if terms:
            scores = scores + bias_at(terms, 2 * places - twice, wide).unflatten(0, heads).permute(2, 0, 1, 3)
        weights, lse = weighted(scores, seen[:, None, None], rule.dropout)
        return (weights @ values.to(wide)).flatten(1, 2)[:, :, None], lse.flatten(1, 2)[:, :, None]

    used = slice(0, min(rule.window, max(counts)))
    slots = torch.arange(used.stop, device=q.device)
    keys = state.keys if state.rotated is None else state.rotated
    near = over(keys[:, :, used], state.values[:, :, used], 2 * state.places[:, used], slots < count, 0.0)
    levels = [n for n in range(state.ends.shape[1]) if any(rule.in_blocks(c) >> n & 1 for c in counts)]
    if not levels:
        return near[0].to(q.dtype), state
    level = torch.tensor(levels, device=q.device)
    twice, block_keys = state.ends[:, level].sum(-1), state.block_keys[:, :, level]
    if encoding.transforms:
        block_keys = encoding.keys(block_keys, tables_at(encoding, twice, wide))
    seen = (count - rule.window).clamp(min=0) >> level & 1 == 1
    far = over(block_keys, state.block_values[:, :, level], twice, seen, rule.sizes(level, wide))
    return rule.combined(near, far, token.gate).to(q.dtype), state


def writable(state: State) -> State:
    """A state that may be written in place: one that no backward keeps."""
    return tree_map_only(Tensor, torch.clone, state) if torch.is_grad_enabled() else state


def with_token(
    rule: Rule, token: Tokens, state: State, counts: list[int], real: list[bool], begins: list[bool]
) -> State:
    """The state with one more token in the rows that are real; counts: without it."""
    k = token.k
    if any(begins):
        fresh = _index([row for row, new in enumerate(begins) if new], k)
        tree_map_only(Tensor, lambda x: x.index_fill_(0, fresh, 0), state)
    now = [row for row, one in enumerate(real) if one]
    if leaving := [row for row in now if counts[row] >= rule.window]:
        state = with_block(rule, state, leaving, [counts[row] - rule.window for row in leaving])
    rows, slots = _index(now, k), _index([counts[row] % rule.window for row in now], k)
    for ring, new in ((state.keys, k), (state.rotated, token.rotated), (state.values, token.v)):
        if ring is not None and new is not None:
            ring[rows, :, slots] = new[rows, :, 0].to(ring.dtype)
    state.places[rows, slots] = token.places.expand(len(real), 1)[rows, 0]
    state.seen[rows] += 1
    return state


def with_block(rule: Rule, state: State, rows: list[int], before: list[int]) -> State:
    """The state with the oldest window token of these rows as a block of one token. before: tokens already in blocks.

    It increments a binary counter: while a digit is 1, both blocks of its level merge into a block of the next level.
    """
    at, slots = _index(rows, state.keys), _index([a % rule.window for a in before], state.keys)
    dtype = state.block_keys.dtype
    key, value = state.keys[at, :, slots].to(dtype), state.values[at, :, slots].to(dtype)
    ends = state.places[at, slots][:, None].expand(-1, 2)
    level = 0
    while rows:
        if level == state.ends.shape[1]:
            state = grown(state, level + 1)
        stay = [n for n, a in enumerate(before) if not a >> level & 1]
        on = [n for n, a in enumerate(before) if a >> level & 1]
        for blocks, new in ((state.block_keys, key), (state.block_values, value), (state.ends[:, None], ends[:, None])):
            here = at[stay] if on else at
            blocks[here, :, level] = new[stay] if on else new
            blocks[here, :, :level] = 0
        rows, before = [rows[n] for n in on], [before[n] for n in on]
        if on:
            at = at[on]
            key = rule.merges[0](level + 1, state.block_keys[at, :, level], key[on])
            value = rule.merges[1](level + 1, state.block_values[at, :, level], value[on])
            ends = torch.stack([state.ends[at, level, 0], ends[on][:, 1]], -1)
        level += 1
    return state


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=like.device)
