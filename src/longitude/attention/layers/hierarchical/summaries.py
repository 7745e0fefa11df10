"""The global branch: each query over the blocks that stand for everything before its window."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.attention.layers.hierarchical.blocks import Level
from longitude.attention.layers.hierarchical.centres import bias_at, offset_terms, tables_at
from longitude.attention.layers.hierarchical.rule import Rule, weighted
from longitude.positions.composed import Composed

CHUNK = 32  # queries of one matrix product: more of them waste scores, fewer waste time


class Chunks(NamedTuple):
    """The prefixes low size .. high size - 1, `size` of them, a power of two, in each chunk.

    The digits of `size` and more are the same for all of a chunk, and so are their blocks; smaller blocks lie inside it.
    """

    size: int
    low: int
    high: int

    def left_children(self, level: int, device: torch.device) -> Int[Tensor, "chunks m"]:
        """Those that prefixes of each chunk may stand on: node 2 j for each j."""
        chunk = torch.arange(self.low, self.high, device=device)[:, None]
        if (inside := self.size >> (level + 1)) > 0:
            return chunk * inside + torch.arange(inside, device=device)
        return chunk * self.size >> (level + 1)

    def stands_on(self, level: int, children: Int[Tensor, "chunks m"]) -> Bool[Tensor, "chunks size m"]:
        """Whether the digit of `level` in a prefix is 1, and which of the left children it means."""
        digits = torch.arange(self.low * self.size, self.high * self.size, device=children.device) >> level
        digits = digits.view(-1, self.size, 1)
        return (digits & 1 == 1) & (digits >> 1 == children[:, None])


class Blocks(NamedTuple):
    """The blocks that the prefixes of each chunk may stand on, m of them from all levels."""

    keys: Float[Tensor, "B Hkv chunks m D"]
    values: Float[Tensor, "B Hkv chunks m Dv"]
    twice: Int[Tensor, "B chunks m"]  # the centre, first + last position
    level: Int[Tensor, " m"]
    used: Bool[Tensor, "chunks size m"]


def gathered(chunks: Chunks, levels: list[Level]) -> Blocks:
    keys, values, twice, level, used = [], [], [], [], []
    for number, own in enumerate(levels):
        if own.keys.shape[2] == 0:  # of a digit that no prefix here has
            continue
        children = chunks.left_children(number, own.keys.device)
        used.append(chunks.stands_on(number, children))
        level.append(torch.full_like(children[0], number))
        # What no prefix here stands on may be missing.
        at = (2 * children - own.first).clamp(0, own.keys.shape[2] - 1).flatten()
        keys.append(own.keys.index_select(2, at).unflatten(2, children.shape))
        values.append(own.values.index_select(2, at).unflatten(2, children.shape))
        twice.append(own.ends.sum(-1).index_select(1, at).unflatten(1, children.shape))
    return Blocks(torch.cat(keys, 3), torch.cat(values, 3), torch.cat(twice, 2), torch.cat(level), torch.cat(used, 2))


def over_blocks(
    rule: Rule,
    q: Float[Tensor, "B H L D"],
    places: Int[Tensor, "B L"],
    first: int,
    levels: list[Level],
    encoding: Composed,
) -> tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"]]:
    """softmax(scale q.K + bias + ln size) V over the blocks of the prefixes first, first + 1, ..., and the logsumexp; float32
    or wider. q is turned already, and stands at `places`; levels: the pyramid over the longest prefix.

    One matrix product for each chunk of prefixes, of which a mask leaves a query one score for each digit 1.
    """
    # A chunk ends within its first query's window: its blocks hold nothing of that query's future, not even behind the mask.
    size = min(CHUNK, 1 << (rule.window.bit_length() - 1))
    chunks = Chunks(size, first // size, (first + q.shape[2] - 1) // size + 1)
    front, number = first - chunks.low * size, chunks.high - chunks.low
    back = number * size - front - q.shape[2]
    blocks = gathered(chunks, levels)
    keys = blocks.keys
    if encoding.transforms:
        tables = tables_at(encoding, blocks.twice.flatten(1), keys.dtype)
        keys = encoding.keys(keys.flatten(2, 3), tables).view(keys.shape)

    def in_chunks(x: Tensor) -> Tensor:
        """[B, H, L, ...] -> [B, Hkv, chunks, H/Hkv, size, ...]: heads that share keys are rows of one product."""
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (front, back)).unflatten(2, (number, size))
        return x.unflatten(1, (keys.shape[1], -1)).transpose(2, 3)

    def in_line(x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, front : front + q.shape[2]]

    rows = in_chunks(q.to(keys.dtype))
    scores = rule.scale * (rows.flatten(3, 4) @ keys.mT).unflatten(3, rows.shape[3:5])
    scores = scores + rule.sizes(blocks.level, scores.dtype)
    if terms := offset_terms(encoding):
        at = F.pad(places, (front, back)).unflatten(1, (number, size))
        bias = bias_at(terms, 2 * at[..., None] - blocks.twice[:, :, None], scores.dtype)  # [H, B, chunks, size, m]
        scores = scores + bias.unflatten(0, (keys.shape[1], -1)).permute(2, 0, 3, 1, 4, 5)
    weights, lse = weighted(scores, blocks.used[:, None], rule.dropout)
    return in_line((weights.flatten(3, 4) @ blocks.values).unflatten(3, rows.shape[3:5])), in_line(lse)
