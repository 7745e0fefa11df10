"""One token after others: it takes its slot in the ring, and who leaves the window enters the binary counter."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only

from longitude.attention.layers.hierarchical.centres import bias_at, offset_terms, tables_at
from longitude.attention.layers.hierarchical.rule import Rule, weighted
from longitude.attention.layers.hierarchical.state import State, grown
from longitude.positions.composed import Composed


def step(
    rule: Rule,
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B Hkv 1 D"],
    turned: Float[Tensor, "B Hkv 1 D"] | None,
    v: Float[Tensor, "B Hkv 1 Dv"],
    gate: Float[Tensor, "B H 1"] | None,
    places: Int[Tensor, "B 1"],
    encoding: Composed,
    state: State,
    real: list[bool],
    begins: list[bool],
) -> tuple[Float[Tensor, "B H 1 Dv"], State]:
    """The output, and the state with this token in it, which may be written where the old one was: O(window + log count), and
    at most one more merge for each token, in the long run. q and turned are turned already; rows that are not real stay as
    they are; those that begin a document forget first.
    """
    counts = [0 if new else count for new, count in zip(begins, state.seen.tolist(), strict=True)]
    state = taken_in(rule, k, turned, v, places, owned(state), counts, real, begins)
    counts = [count + now for count, now in zip(counts, real, strict=True)]

    wide, heads = torch.promote_types(q.dtype, torch.float32), (k.shape[1], -1)
    rows = q.to(wide)[:, :, 0].unflatten(1, heads)  # [B, Hkv, H/Hkv, D]
    count, terms = state.seen[:, None], offset_terms(encoding)

    def over(keys: Tensor, values: Tensor, twice: Tensor, seen: Tensor, more: Tensor | float) -> tuple[Tensor, Tensor]:
        scores = rule.scale * (rows @ keys.to(wide).mT) + more
        if terms:
            scores = scores + bias_at(terms, 2 * places - twice, wide).unflatten(0, heads).permute(2, 0, 1, 3)
        weights, lse = weighted(scores, seen[:, None, None], rule.dropout)
        return (weights @ values.to(wide)).flatten(1, 2)[:, :, None], lse.flatten(1, 2)[:, :, None]

    held = slice(0, min(rule.window, max(counts)))
    slots = torch.arange(held.stop, device=q.device)
    keys = state.keys if state.turned is None else state.turned
    near = over(keys[:, :, held], state.values[:, :, held], 2 * state.places[:, held], slots < count, 0.0)
    levels = [n for n in range(state.ends.shape[1]) if any(rule.entered(c) >> n & 1 for c in counts)]
    if not levels:
        return near[0].to(q.dtype), state
    level = torch.tensor(levels, device=q.device)
    twice, block_keys = state.ends[:, level].sum(-1), state.block_keys[:, :, level]
    if encoding.transforms:
        block_keys = encoding.keys(block_keys, tables_at(encoding, twice, wide))
    seen = (count - rule.window).clamp(min=0) >> level & 1 == 1
    far = over(block_keys, state.block_values[:, :, level], twice, seen, rule.sizes(level, wide))
    return rule.combined(near, far, gate).to(q.dtype), state


def owned(state: State) -> State:
    """A state that may be written in place: no backward holds it."""
    return tree_map_only(Tensor, torch.clone, state) if torch.is_grad_enabled() else state


def taken_in(
    rule: Rule,
    k: Tensor,
    turned: Tensor | None,
    v: Tensor,
    places: Tensor,
    state: State,
    counts: list[int],
    real: list[bool],
    begins: list[bool],
) -> State:
    """The state with one more token in the rows that are real; counts: without it."""
    if any(begins):
        tree_map_only(
            Tensor, lambda x: x.index_fill_(0, _index([b for b, new in enumerate(begins) if new], x), 0), state
        )
    now = [row for row, one in enumerate(real) if one]
    if leaving := [row for row in now if counts[row] >= rule.window]:
        state = entered(rule, state, leaving, [counts[row] - rule.window for row in leaving])
    rows, slots = _index(now, k), _index([counts[row] % rule.window for row in now], k)
    for ring, new in ((state.keys, k), (state.turned, turned), (state.values, v)):
        if ring is not None and new is not None:
            ring[rows, :, slots] = new[rows, :, 0].to(ring.dtype)
    state.places[rows, slots] = places.expand(len(real), 1)[rows, 0]
    state.seen[rows] += 1
    return state


def entered(rule: Rule, state: State, rows: list[int], before: list[int]) -> State:
    """The state after the oldest token in the window of these rows became a block of one. before: tokens in blocks already.

    Adding one to a binary number: as long as a digit is 1, both blocks of its level become one of the next.
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
