"""Blocks of hierarchical attention, and its state: a window as a ring and blocks as a binary counter.

A node (level, m) is the block of tokens m 2^level .. (m + 1) 2^level - 1. A prefix of `a` tokens is a block for each binary
digit 1 of `a`, largest first. The digit of `level` is the node m = (a >> level) - 1, which is even: a left child.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only

from longitude.attention.merge import merge_attention
from longitude.positions.base import Encoding, OffsetBias
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import wide
from longitude.positions.rotation import RotaryTable

CHUNK = 32  # queries of one matrix product: more of them waste scores, fewer waste time

Merge = Callable[[int, Tensor, Tensor], Tensor]
"""(level, left, right) -> the summaries at `level`, from those of both halves [..., D], one level below."""


def mean(level: int, left: Tensor, right: Tensor) -> Tensor:
    """The average of both halves. Halving is exact, so this is the sum of all tokens divided by their number."""
    return (left + right) * 0.5


MEANS = mean, mean


@dataclass(frozen=True)
class Rule:
    """The options of one call. merges: for keys and for values; the others are as in hierarchical_attention."""

    window: int
    combine: str
    size_term: bool
    scale: float
    merges: tuple[Merge, Merge] = MEANS
    dropout: float = 0.0
    backend: str = "auto"

    def in_blocks(self, count: int) -> int:
        """How many of `count` tokens are in blocks."""
        return max(0, count - self.window)

    def sizes(self, level: Tensor, dtype: torch.dtype) -> Tensor:
        """Added to the scores of blocks of these levels: ln of their number of tokens."""
        return level.to(dtype) * math.log(2) if self.size_term else level.new_zeros((), dtype=dtype)

    def combined(
        self,
        near: tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"] | None],
        far: tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"]],
        gate: Float[Tensor, "B H L"] | None,
    ) -> Float[Tensor, "B H L Dv"]:
        """The sum g near + (1 - g) far, or one softmax over both, by their logsumexps. A query without a block has g = 1."""
        if self.combine == "softmax":
            assert near[1] is not None
            return merge_attention([near[0].to(far[0].dtype), far[0]], [near[1].to(far[1].dtype), far[1]])[0]
        assert gate is not None
        g = gate.to(far[0].dtype).masked_fill(far[1] == -math.inf, 1.0)[..., None]
        return g * near[0] + (1 - g) * far[0]


def weighted(
    scores: Float[Tensor, "... n"], seen: Bool[Tensor, "... n"], dropout: float
) -> tuple[Float[Tensor, "... n"], Float[Tensor, ...]]:
    """Softmax over keys that are seen, and the logsumexp; zeros and -inf where none is."""
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & some, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~some, 0.0)
    return F.dropout(weights, dropout, training=dropout > 0), lse.masked_fill(~some[..., 0], -math.inf)


class Level(NamedTuple):
    """The nodes first, first + 1, ... of one level, first even. ends: positions of each block's first and last token."""

    first: int
    keys: Float[Tensor, "B Hkv n D"]
    values: Float[Tensor, "B Hkv n Dv"]
    ends: Int[Tensor, "B n 2"]


def pyramid(
    keys: Float[Tensor, "B Hkv n D"],
    values: Float[Tensor, "B Hkv n Dv"],
    ends: Int[Tensor, "B n 2"],
    before: int,
    carried: tuple[Tensor, Tensor, Tensor] | None,
    merges: tuple[Merge, Merge],
) -> list[Level]:
    """All levels over the tokens before .. before + n - 1, level 0 being the tokens; `before` tokens precede them.

    carried: the blocks of the digits of `before`: keys [B, Hkv, levels, D], values, ends [B, levels, 2]; None where it is 0.
    """
    levels, stop = [], before + keys.shape[2]
    while stop >> len(levels):
        level = len(levels)
        if before >> level & 1:
            assert carried is not None
            digit = slice(level, level + 1)
            keys = torch.cat([carried[0][:, :, digit], keys], 2)
            values = torch.cat([carried[1][:, :, digit], values], 2)
            ends = torch.cat([carried[2][:, digit].expand(len(ends), -1, -1), ends], 1)
        levels.append(Level((before >> level) & ~1, keys, values, ends))
        keys = merges[0](level + 1, *halves(keys))
        values = merges[1](level + 1, *halves(values))
        left, right = halves(ends)
        ends = torch.stack([left[..., 0], right[..., 1]], -1)
    return levels


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right children along the second dimension from the end; a last one without a sibling is left out."""
    pairs = x.shape[-2] // 2
    left, right = x[..., : 2 * pairs, :].unflatten(-2, (pairs, 2)).unbind(-2)
    return left, right


def refusal(encoding: Encoding) -> str | None:
    """Why an encoding cannot be applied to blocks; None where it can."""
    name = type(encoding).__name__
    if encoding.reads_tokens:
        return f"{name} reads each token, and a block of hierarchical attention is not a token"
    for term in encoding.terms({}):
        if not isinstance(term, OffsetBias):
            return f"{name} adds {type(term).__name__} to scores, and a block of hierarchical attention has only a distance"
    if compose(encoding).regions():
        return f"{name} moves positions by pair of tokens, and a block of hierarchical attention has one position"
    if encoding.rotate_values:
        return f"{name} rotates values, and a block of hierarchical attention pools them without positions"
    if not encoding.stable_keys:
        return f"{name} follows the length of the sequence, and hierarchical attention keeps summaries of one length"
    rotates = type(encoding).queries is not Encoding.queries or type(encoding).keys is not Encoding.keys
    if rotates and not isinstance(encoding.prepare(torch.zeros(1, dtype=torch.long)), RotaryTable):
        return f"{name} prepares no RotaryTable, so hierarchical attention cannot rotate half way between two positions"
    return None


# ---- centers of blocks: half way between the first and the last token, perhaps between two tokens -------------------------
def tables_at(encoding: Composed, twice: Int[Tensor, "B n"], dtype: torch.dtype) -> Any:
    """Tables of an encoding at the half-integer positions twice / 2, between those of encoding.prepare."""
    twice = twice[0] if len(twice) == 1 else twice  # one table for the batch
    neighbours = torch.cat([twice // 2, (twice + 1) // 2], -1)
    if encoding.axes > 1:  # the same number on all axes
        neighbours = neighbours.view(-1, neighbours.shape[-1], 1)
    tables = encoding.prepare(neighbours, None, wide(twice.device))
    dtype = torch.promote_types(dtype, torch.float32)
    return tuple(midway(table, dtype) if isinstance(table, RotaryTable) else table for table in tables)


def midway(table: RotaryTable, dtype: torch.dtype) -> RotaryTable:
    """The rotation by the mean of two angles less than pi apart, one in each half of the table: their sum, normalised."""
    (cos, cos_above), (sin, sin_above) = (x.chunk(2, -2) for x in table)
    sum_of = cos + cos_above, sin + sin_above
    length = torch.hypot(cos, sin) / torch.hypot(*sum_of)
    return RotaryTable(*((x * length).to(dtype) for x in sum_of))


def bias_at(terms: Sequence[OffsetBias], twice: Int[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The sum of biases at the offsets twice / 2 -> [heads, ...]."""
    below, above = twice // 2, (twice + 1) // 2
    return sum((term.at(below) + term.at(above)) / 2 for term in terms).to(dtype)  # type: ignore[union-attr]


def offset_terms(encoding: Composed) -> list[OffsetBias]:
    return [term for term in encoding.terms({}) if isinstance(term, OffsetBias)]


# ---- attention over blocks -----------------------------------------------------------------------------------------------
def attend_blocks(
    rule: Rule,
    rows: Float[Tensor, "B Hkv C R n D"],
    keys: Float[Tensor, "B Hkv C m D"],
    values: Float[Tensor, "B Hkv C m Dv"],
    twice: Int[Tensor, "#B C m"],
    level: Int[Tensor, " m"],
    seen: Bool[Tensor, "#B #Hkv C #R #n m"],
    at: Int[Tensor, "#B C n"],
    encoding: Composed,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q.K + bias + ln size) V and its logsumexp, C chunks of n queries over m blocks each.

    rows are rotated, at positions `at`; keys are not, with centers twice / 2.
    """
    if encoding.transforms:
        tables = tables_at(encoding, twice.flatten(1), keys.dtype)
        keys = encoding.keys(keys.flatten(2, 3), tables).view(keys.shape)
    scores = rule.scale * (rows.flatten(3, 4) @ keys.mT).unflatten(3, rows.shape[3:5])
    scores = scores + rule.sizes(level, scores.dtype)
    if terms := offset_terms(encoding):
        bias = bias_at(terms, 2 * at[..., None] - twice[:, :, None], scores.dtype)  # [H, B, C, n, m]
        scores = scores + bias.unflatten(0, (keys.shape[1], -1)).permute(2, 0, 3, 1, 4, 5)
    weights, lse = weighted(scores, seen, rule.dropout)
    return (weights.flatten(3, 4) @ values).unflatten(3, rows.shape[3:5]), lse


class Chunks(NamedTuple):
    """The prefixes of low * size .. high * size - 1 tokens, in chunks of `size` prefixes, a power of two.

    Prefixes of a chunk share the binary digits from `size` up, and so these blocks; smaller blocks are inside the chunk.
    """

    size: int
    low: int
    high: int

    def left_children(self, level: int, device: torch.device) -> Int[Tensor, "chunks m"]:
        """Left children [chunks, m] at a level, node 2 j for each j, that prefixes of each chunk may use."""
        chunk = torch.arange(self.low, self.high, device=device)[:, None]
        if (inside := self.size >> (level + 1)) > 0:
            return chunk * inside + torch.arange(inside, device=device)
        return chunk * self.size >> (level + 1)

    def used(self, level: int, children: Int[Tensor, "chunks m"]) -> Bool[Tensor, "chunks size m"]:
        """Whether the digit of `level` in a prefix is 1 and its block is this left child."""
        digits = torch.arange(self.low * self.size, self.high * self.size, device=children.device) >> level
        digits = digits.view(-1, self.size, 1)
        return (digits & 1 == 1) & (digits >> 1 == children[:, None])


def over_blocks(
    rule: Rule,
    q: Float[Tensor, "B H L D"],
    places: Int[Tensor, "B L"],
    first: int,
    levels: list[Level],
    encoding: Composed,
) -> tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"]]:
    """Attention over the blocks of the prefixes first, first + 1, ..., and the logsumexp; float32 or wider.

    q is rotated, at `places`; levels: the pyramid over the longest prefix. A chunk of prefixes is one matrix
    product, and a mask then keeps one score per query and digit 1.
    """
    # A chunk ends within its first query's window, so its blocks hold no token after that query, not even masked ones.
    size = min(CHUNK, 1 << (rule.window.bit_length() - 1))
    chunks = Chunks(size, first // size, (first + q.shape[2] - 1) // size + 1)
    front, number = first - chunks.low * size, chunks.high - chunks.low
    back = number * size - front - q.shape[2]
    by_level = []
    for n, level in enumerate(levels):
        if level.keys.shape[2] == 0:  # no prefix here has this digit
            continue
        children = chunks.left_children(n, level.keys.device)
        at = (2 * children - level.first).clamp(0, level.keys.shape[2] - 1).flatten()  # unused blocks may be missing
        centers = level.ends.sum(-1).index_select(1, at).unflatten(1, children.shape)
        keys, values = (x.index_select(2, at).unflatten(2, children.shape) for x in (level.keys, level.values))
        by_level.append((keys, values, centers, torch.full_like(children[0], n), chunks.used(n, children)))
    joined = zip(zip(*by_level, strict=True), (3, 3, 2, 0, 2), strict=True)
    keys, values, twice, level, used = (torch.cat(x, dim) for x, dim in joined)

    def in_chunks(x: Tensor) -> Tensor:
        """[B, H, L, ...] -> [B, Hkv, chunks, H/Hkv, size, ...]: heads that share keys are rows of one product."""
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (front, back)).unflatten(2, (number, size))
        return x.unflatten(1, (keys.shape[1], -1)).transpose(2, 3)

    def in_order(x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, front : front + q.shape[2]]

    at = F.pad(places, (front, back)).unflatten(1, (number, size))
    rows = in_chunks(q.to(keys.dtype))
    out, lse = attend_blocks(rule, rows, keys, values, twice, level, used[:, None], at, encoding)
    return in_order(out), in_order(lse)


def over_tabled_blocks(
    rule: Rule,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B Hkv L D"],
    v: Float[Tensor, "B Hkv L Dv"],
    places: Int[Tensor, "B L"],
    begins: Bool[Tensor, "B L"],
    encoding: Composed,
) -> tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"]]:
    """`over_blocks` for all tokens of documents that start at `begins`, in a fixed sequence of operations for compilers.

    For each size, it computes the blocks that start at every token. A query picks those of its prefix. O(L log L) memory.
    """
    batch, length = q.shape[0], q.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    order = torch.arange(length, device=q.device).expand(batch, -1)
    start = torch.where(begins, order, 0).cummax(1).values
    prefix = (order - start - rule.window + 1).clamp(min=0)

    keys, values = k.to(dtype), v.to(dtype)
    by_level = []
    levels = max(1, (length - rule.window).bit_length()) if length > rule.window else 1
    for level in range(levels):
        first = (start + (((prefix >> level) - 1) << level)).clamp(0, length - 1)
        last = (first + (1 << level) - 1).clamp(max=length - 1)

        def at(x: Tensor, first: Tensor = first) -> Tensor:
            return x.gather(2, first[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

        center, digit = places.gather(1, first) + places.gather(1, last), prefix >> level & 1 == 1
        by_level.append((at(keys), at(values), center, digit))
        half = 1 << level  # no query picks what is beyond the end
        keys = rule.merges[0](level + 1, keys, keys.roll(-half, 2))
        values = rule.merges[1](level + 1, values, values.roll(-half, 2))

    joined = zip(zip(*by_level, strict=True), (3, 3, 2, 2), strict=True)  # [B, Hkv, L, levels, D] and [B, L, levels]
    keys, values, twice, seen = (torch.stack(x, dim) for x, dim in joined)
    rows = q.to(dtype).unflatten(1, (keys.shape[1], -1)).transpose(2, 3).unsqueeze(4)  # [B, Hkv, L, H/Hkv, 1, D]
    level, seen = torch.arange(levels, device=q.device), seen[:, None, :, None, None]
    out, lse = attend_blocks(rule, rows, keys, values, twice, level, seen, places[..., None], encoding)
    return out.squeeze(4).transpose(2, 3).flatten(1, 2), lse.squeeze(4).transpose(2, 3).flatten(1, 2)


# ---- the state -----------------------------------------------------------------------------------------------------------
class Tokens(NamedTuple):
    """Projections of the tokens of a call. q is rotated; k is not; rotated: rotated keys, None without rotation."""

    q: Float[Tensor, "B H L D"]
    k: Float[Tensor, "B Hkv L D"]
    rotated: Float[Tensor, "B Hkv L D"] | None
    v: Float[Tensor, "B Hkv L Dv"]
    gate: Float[Tensor, "B H L"] | None
    places: Int[Tensor, "B L"]

    def by_heads(self) -> dict[str, Tensor]:
        """The tensors with heads, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None and name != "places"}


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
        nodes = levels[level]
        there_is = (before >> level & 1 == 1) if nodes.keys.shape[2] else torch.zeros_like(before, dtype=torch.bool)
        node = ((before >> level) - 1 - nodes.first).clamp(0, max(0, nodes.keys.shape[2] - 1))
        for every, x in zip(blocks, (nodes.keys, nodes.values, nodes.ends.expand(len(rows), -1, -1)), strict=True):
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
    now = [row for row, is_real in enumerate(real) if is_real]
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
