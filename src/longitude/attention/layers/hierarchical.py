"""Attention to the near tokens one by one, and to everything before them in blocks.

A node (level, m) is the block of tokens m 2^level .. (m + 1) 2^level - 1. A prefix of `a` tokens is a block for each binary
digit 1 of `a`, largest first. The digit of `level` is the node m = (a >> level) - 1, which is even: a left child.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from longitude.attention.heads import Headed, HeadedOptions, join_heads
from longitude.attention.masks import Documents, Mask, Padding, Window
from longitude.attention.mixer import register_mixer
from longitude.attention.operation import raw_request, run
from longitude.attention.state_mixer import StateInputs, StateMixer
from longitude.errors import UsageError
from longitude.native.derivatives import readable
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import as_int, single_axis, wide
from longitude.positions.rotation import RotaryTable
from longitude.positions.terms import OffsetBias

CHUNK = 32
"""Prefixes whose queries share a matrix product, a power of two: more of them waste scores, fewer waste time."""


class State(NamedTuple):
    """After `seen` tokens: the newest of them, and a block for each digit 1 of the number of chunks before these.

    Chunks of CHUNK tokens before the window are in blocks; its tokens and those of a chunk that is not full are kept one by one,
    and are the last ones of `keys`; nothing reads others. keys: not rotated, then, if the encoding rotates, rotated.
    """

    seen: Int[Tensor, " B"]
    keys: Float[Tensor, "B Hkv kept D"]
    values: Float[Tensor, "B Hkv kept Dv"]
    places: Int[Tensor, "B 1 kept 1"]
    blocks: Blocks


# ---- attention --------------------------------------------------------------------------------------------------------
def attend_tokens(
    layer: HierarchicalAttention,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B Hkv L D"],
    v: Float[Tensor, "B Hkv L Dv"],
    gate: Float[Tensor, "B H L"],
    inputs: StateInputs,
    state: State | None = None,
) -> tuple[Float[Tensor, "B H L Dv"], State | None]:
    """G near + (1 - g) far for projected q, k, v, and the state after these tokens if a cache keeps it.

    A block begins at a multiple of its size. Its key and value are averages before any rotation, and all its tokens come before
    the window, so the result is causal. It is rotated at its center, half way between its first and last token. Half way
    between two offsets a bias is the mean of both. A query without a block has g = 1. O(L (window + log L)) time, O(L) memory.
    """
    encoding, reset, valid, dtype = inputs.encoding, inputs.reset, inputs.valid, q.dtype
    if encoding.transforms:
        q, k = encoding.queries(q, inputs.tables), torch.cat([k, encoding.keys(k, inputs.tables)], -1)
    places = single_axis("HierarchicalAttention", inputs.positions).view(-1, 1, q.shape[2], 1)
    flags = [x for x in (reset, valid) if x is not None]
    counted = len(flags) == 0 and state is None  # lengths alone decide which blocks there are
    traced = not counted and not inputs.cached and not readable(*flags)
    order = None
    if valid is not None:  # padding behind all tokens, as zeros
        order = valid.logical_not().byte().argsort(dim=1, stable=True)
        real = valid.gather(1, order)
        source = order.masked_fill(~real, -1)
        q, k, v, places = (picked(x, source) for x in (q, k, v, places))
        gate = picked(gate[..., None], source)[..., 0]
        reset, valid = None if reset is None else reset.gather(1, order), real
    with torch.autocast(q.device.type, enabled=False):
        # Where documents begin is not known while compiling: chunks of one token may begin anywhere.
        stream = stream_of(state, (k, v, places), reset, valid, layer.window, 1 if traced else CHUNK)
        out = attend_near(layer, q, stream, encoding, counted)
        far, state = attend_far(layer, q, stream, encoding, counted or traced, state, inputs.cached)
        if far is not None:
            g = gate.to(far[0].dtype).masked_fill(far[1] == -math.inf, 1.0)[..., None]
            out = (g * out + (1 - g) * far[0]).to(dtype)
    if order is not None and inputs.valid is not None:
        out = picked(out, order.argsort(1).masked_fill(~inputs.valid, -1))
    return out, state


class Stream(NamedTuple):
    """The tokens that a state kept, then those of a call, before all padding.

    Slots are places in chunks of tokens. Documents are there one after the other, each from the start of a chunk on.
    """

    size: int  # tokens of a chunk
    held: int  # tokens of the state
    before: Int[Tensor, "#B 1"]  # chunks of a row's first document that only blocks keep
    keys: Float[Tensor, "B Hkv S D"]  # not rotated, then, if the encoding rotates, rotated
    values: Float[Tensor, "B Hkv S Dv"]
    places: Int[Tensor, "#B 1 S 1"]
    there: Bool[Tensor, "#B S"]
    begins: Bool[Tensor, "#B S"]
    number: Int[Tensor, "#B S"]  # of each in its document, from 1 on
    slot: Int[Tensor, "#B S"]
    first_slot: Int[Tensor, "#B S"]  # of its document


def stream_of(
    state: State | None,
    tokens: tuple[Tensor, Tensor, Tensor],
    reset: Bool[Tensor, "B L"] | None,
    real: Bool[Tensor, "B L"] | None,
    window: int,
    size: int,
) -> Stream:
    """The tokens of a state, if there is one, then those of a call: their keys, values and places."""
    (keys, values, places), held = tokens, 0
    rows = len(keys) if state is not None or reset is not None or real is not None else 1
    before = empty = torch.zeros(rows, 1, dtype=torch.long, device=keys.device)
    if state is not None:
        before = (state.seen[:, None] - window).clamp(min=0) // size
        kept = state.seen[:, None] - before * size
        held = int(kept.max())
        empty = held - kept
        first = state.keys.shape[2] - held
        keys = torch.cat([state.keys[:, :, first:], keys], 2)
        values = torch.cat([state.values[:, :, first:], values], 2)
        places = torch.cat([state.places[:, :, first:], places.expand(rows, -1, -1, -1)], 2)
    order = torch.arange(keys.shape[2], device=keys.device)
    there, begins = order >= empty, order == empty
    if real is not None:
        there = there & F.pad(real, (held, 0), value=True)
    if reset is not None:
        begins = begins | F.pad(reset, (held, 0))
    start = torch.where(begins, order, 0).cummax(1).values
    length_before = order - F.pad(start[:, :-1], (1, 0))
    gaps = torch.where(begins & (order > empty), -length_before % size, 0)
    slot = order - empty + gaps.cumsum(1)
    count = order - start + 1 + torch.where(start == empty, before * size, 0)
    return Stream(size, held, before, keys, values, places, there, begins, count, slot, slot - (order - start))


def picked(x: Shaped[Tensor, "#B H n D"], at: Int[Tensor, "#B m"]) -> Shaped[Tensor, "B H m D"]:
    """The entries of x at these places, zeros at negative ones."""
    batch = max(len(x), len(at))
    index = at.clamp(min=0)[:, None, :, None].expand(batch, x.shape[1], -1, x.shape[3])
    return x.expand(batch, -1, -1, -1).gather(2, index).masked_fill_((at < 0)[:, None, :, None], 0)


def source_of(slot: Int[Tensor, "#B S"], use: Bool[Tensor, "#B S"], count: int) -> Int[Tensor, "#B count"]:
    """Which one is in each of the first `count` slots, of those in use; -1: none."""
    at = torch.where(use & (slot < count), slot, count)
    order = torch.arange(slot.shape[1], device=slot.device).expand_as(at)
    return at.new_full((len(at), count + 1), -1).scatter(1, at, order)[:, :count]


def attend_near(
    layer: HierarchicalAttention, q: Float[Tensor, "B H L D"], stream: Stream, encoding: Composed, counted: bool
) -> Float[Tensor, "B H L Dv"]:
    """Attention to the window. counted: whether there is one document without a state."""
    mask: Mask = Window(layer.window)
    alone = stream.there & (stream.first_slot == 0)
    if not counted and not (readable(alone) and bool(alone.all())):
        mask = mask & Documents(stream.begins.cumsum(1)) & Padding(stream.there)
    places = stream.places[:, 0, :, 0]
    q_at, k_at = (as_int(p[0] if len(p) == 1 else p) for p in (places[:, stream.held :], places))
    keys = stream.keys[..., -q.shape[3] :]
    r = raw_request(q, keys, stream.values, encoding, None, mask, q_at, k_at, layer.factor, layer.dropping, False)
    return run(r, layer.backend)[0]


def attend_far(
    layer: HierarchicalAttention,
    q: Float[Tensor, "B H L D"],
    stream: Stream,
    encoding: Composed,
    static: bool,
    state: State | None,
    cached: bool,
) -> tuple[tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"]] | None, State | None]:
    """Attention to the blocks before the window, and its logsumexp; None without blocks. And the state after the tokens.

    static: whether shapes alone decide which blocks are computed.
    """
    size, window, held, length, there = stream.size, layer.window, stream.held, q.shape[2], stream.there
    prefix = (stream.number - window).clamp(min=0)[:, held:]
    end = (stream.slot - (stream.slot - stream.first_slot).clamp(max=window - 1))[:, held:]  # slot after the prefix
    newest = (there.byte().argmax(1, keepdim=True) + there.sum(1, keepdim=True) - 1).clamp(min=0)
    seen = stream.number.gather(1, newest) * there.any(1, keepdim=True)
    complete = (seen - window).clamp(min=0) // size  # chunks that the state keeps as blocks
    if static:
        some, slots, first = length > window, length if size == 1 else length - window + 1, 0
        levels = max(0, (length - window) // size).bit_length()
    else:
        highest = int(torch.maximum(prefix.amax(1, keepdim=True), stream.before * size).max())
        some, slots, first = highest > 0, int(end.max()) + 1, int(end.min()) // size
        levels = (highest // size).bit_length()
    if not some:
        return None, state_after(stream, seen, complete, newest, window, []) if cached else None

    chunks, dtype = -(-slots // size), torch.promote_types(q.dtype, torch.float32)
    of_slot = source_of(stream.slot, there, chunks * size)
    keys, values = (picked(x, of_slot).to(dtype) for x in (stream.keys[..., : q.shape[3]], stream.values))
    tokens = Blocks(keys, values, picked(stream.places.expand(-1, -1, -1, 2), of_slot))
    smaller, whole = chunk_blocks(mapped(lambda x: x.unflatten(2, (chunks, size)), tokens))

    # The chunks whose blocks are needed, the last one for the state: their number in a document, and where its chunk 0 is.
    chunk = torch.arange(chunks, device=q.device)
    begin = torch.where(source_of(stream.slot // size, stream.begins, chunks) >= 0, chunk, 0).cummax(1).values
    begin = torch.cat([begin[:, first:], stream.first_slot.gather(1, newest) // size], 1)
    begin = begin - torch.where(begin == 0, stream.before, 0)
    number = torch.cat([chunk[first:] - begin[:, :-1], complete], 1)
    larger = larger_blocks(whole, None if state is None else state.blocks, stream.before, begin, number, levels)
    state = state_after(stream, seen, complete, newest, window, larger) if cached else None

    blocks, level, visible = of_chunks(smaller, larger, number[:, :-1], first, size)
    q_source = source_of(end, (prefix > 0) & there[:, held:], chunks * size)[:, first * size :]
    grid = (chunks - first, size)
    rows = picked(q.to(dtype), q_source).unflatten(2, grid).unflatten(1, (keys.shape[1], -1)).transpose(2, 3)
    at = picked(stream.places[:, :, held:], q_source).view(-1, *grid)
    out, lse = attend_blocks(layer, rows, blocks, level, visible, at, encoding)
    back = (end - first * size).masked_fill(prefix == 0, -1)
    out, lse = (picked(x.transpose(2, 3).flatten(1, 2).flatten(2, 3), back) for x in (out, lse[..., None]))
    return (out, lse[..., 0].masked_fill((prefix == 0)[:, None], -math.inf)), state


# ---- blocks -----------------------------------------------------------------------------------------------------------
class Blocks(NamedTuple):
    """Blocks, or single tokens, and the positions of their first and last tokens."""

    keys: Float[Tensor, "B Hkv *n D"]
    values: Float[Tensor, "B Hkv *n Dv"]
    ends: Int[Tensor, "#B 1 *n 2"]


def mapped(change: Callable[..., Tensor], *blocks: Blocks) -> Blocks:
    """Apply a function to the keys of all, the values of all, and the ends of all."""
    return Blocks(*(change(*x) for x in zip(*blocks, strict=True)))


def merged(left: Blocks, right: Blocks) -> Blocks:
    """The blocks of two halves each. Halving is exact, so a block is the sum of its tokens divided by their number."""
    ends = torch.stack([left.ends[..., 0], right.ends[..., 1]], -1)
    return Blocks((left.keys + right.keys) * 0.5, (left.values + right.values) * 0.5, ends)


def chunk_blocks(tokens: Blocks) -> tuple[list[Blocks], Blocks]:
    """The left children at each level within chunks [B, Hkv, chunks, size, D], and the whole chunks [B, Hkv, chunks, D]."""
    children: list[Blocks] = []
    while tokens.keys.shape[3] > 1:
        left, right = mapped(lambda x: x[..., ::2, :], tokens), mapped(lambda x: x[..., 1::2, :], tokens)
        children.append(left)
        tokens = merged(left, right)
    return children, mapped(lambda x: x.squeeze(3), tokens)


def larger_blocks(
    chunks: Blocks,
    carried: Blocks | None,
    before: Int[Tensor, "#B 1"],
    begin: Int[Tensor, "#B n"],
    number: Int[Tensor, "#B n"],
    levels: int,
) -> list[Blocks]:
    """For each level from chunks on, the block [B, Hkv, n, D] of a prefix of `number` chunks; zeros where its digit is 0.

    carried: the blocks of the `before` chunks before the first one. begin: chunk 0 of the document of each prefix.
    """
    across = mapped(lambda x: x[:, :, :1], chunks)  # the block with the first chunk in it, which may begin before it
    # As for most single tokens: no new chunk is complete.
    if carried is not None and bool((number == before).all()):
        return [
            mapped(lambda x, level=level: x[:, :, level, None].expand(-1, -1, number.shape[1], -1), carried)
            for level in range(levels)
        ]
    needed = []
    for level in range(levels):
        digit = (before >> level & 1 == 1).view(-1, 1, 1, 1)
        after = ((((before >> level) + 1) << level) - before).clamp(max=chunks.keys.shape[2] - 1)
        left, right = across, mapped(lambda x, after=after: picked(x, after), chunks)
        if carried is not None and level < carried.keys.shape[2]:
            held = mapped(lambda x, level=level: x[:, :, level, None], carried)
            left, right = (
                mapped(lambda x, y, digit=digit: torch.where(digit, x, y), a, b)
                for a, b in ((held, left), (across, right))
            )
        at = (begin + (((number >> level) - 1) << level)).clamp(min=-1) + 1
        at = at.masked_fill(number >> level & 1 == 0, -1)
        needed.append(mapped(lambda x, y, at=at: picked(torch.cat([x, y], 2), at), left, chunks))
        across = merged(left, right)
        # A block from each chunk on: no prefix has one that runs past the end of its document.
        beyond = mapped(lambda x, level=level: x.roll(-(1 << level), 2), chunks)
        chunks = merged(chunks, beyond)
    return needed


def of_chunks(
    smaller: list[Blocks], larger: list[Blocks], number: Int[Tensor, "#B C"], first: int, size: int
) -> tuple[Blocks, Int[Tensor, " m"], Bool[Tensor, "#B 1 C 1 size m"]]:
    """All blocks [B, Hkv, C, m, D] of the chunks from `first` on, their levels, and which prefix sees which."""
    place, seen, nodes = torch.arange(size, device=number.device)[:, None], [], []
    rows, chunks = number.shape
    for n, children in enumerate(smaller):
        nodes.append(mapped(lambda x: x[:, :, first:], children))
        child = torch.arange(size >> (n + 1), device=number.device)
        seen.append(((place >> n & 1 == 1) & (place >> (n + 1) == child)).expand(rows, chunks, -1, -1))
    for n, block in enumerate(larger):
        nodes.append(mapped(lambda x: x[:, :, :-1, None], block))
        seen.append((number >> n & 1 == 1)[..., None, None].expand(-1, -1, size, -1))
    levels = [n for n, part in enumerate(nodes) for _ in range(part.keys.shape[3])]
    blocks = mapped(lambda *x: torch.cat(x, 3), *nodes)
    return blocks, torch.tensor(levels, device=number.device), torch.cat(seen, 3)[:, None, :, None]


def state_after(
    stream: Stream,
    seen: Int[Tensor, "#B 1"],
    complete: Int[Tensor, "#B 1"],
    newest: Int[Tensor, "#B 1"],
    window: int,
    larger: list[Blocks],
) -> State:
    """The state of `seen` tokens up to the newest, of which `complete` chunks are in blocks, the last of each level."""
    kept, total = window + stream.size - 1, stream.keys.shape[2]
    tokens = stream.keys, stream.values, stream.places
    if bool((newest == total - 1).all()):
        keys, values, places = (F.pad(x, (0, 0, kept - total, 0)) for x in tokens)
    else:
        at = newest - kept + 1 + torch.arange(kept, device=seen.device)
        keys, values, places = (picked(x, at) for x in tokens)
    batch, dtype = len(keys), torch.promote_types(keys.dtype, torch.float32)
    if larger:
        blocks = mapped(lambda *x: torch.stack([level[:, :, -1] for level in x], 2), *larger)
    else:
        like = Blocks(keys.to(dtype), values.to(dtype), places.expand(-1, -1, -1, 2))
        blocks = mapped(lambda x: x.new_zeros(*x.shape[:2], 0, x.shape[3]), like)
    places, ends = (x.expand(batch, -1, -1, -1) for x in (places, blocks.ends))
    return State(seen.expand(batch, 1)[:, 0], keys, values, places, blocks._replace(ends=ends))


def weighted(
    scores: Float[Tensor, "... n"], seen: Bool[Tensor, "... n"], dropout: float
) -> tuple[Float[Tensor, "... n"], Float[Tensor, ...]]:
    """Softmax over keys that are seen, and the logsumexp; zeros and -inf where none is."""
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & some, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~some, 0.0)
    return F.dropout(weights, dropout, training=dropout > 0), lse.masked_fill(~some[..., 0], -math.inf)


def attend_blocks(
    layer: HierarchicalAttention,
    rows: Float[Tensor, "B Hkv C R n D"],
    blocks: Blocks,
    level: Int[Tensor, " m"],
    seen: Bool[Tensor, "#B #Hkv C #R #n m"],
    at: Int[Tensor, "#B C n"],
    encoding: Composed,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q.K + bias + ln size) V and its logsumexp, C chunks of n queries over m blocks each.

    rows are rotated, at positions `at`; blocks [B, Hkv, C, m, D] are not.
    """
    keys, values, twice = blocks.keys, blocks.values, blocks.ends[:, 0].sum(-1)  # twice their centers
    if encoding.transforms:
        tables = tables_at(encoding, twice.flatten(1), keys.dtype)
        keys = encoding.keys(keys.flatten(2, 3), tables).view(keys.shape)
    scores = layer.factor * (rows.flatten(3, 4) @ keys.mT).unflatten(3, rows.shape[3:5])
    scores = scores + level.to(scores.dtype) * math.log(2)
    if terms := encoding.terms({}):  # biases of the offset alone, by `refusal`
        bias = bias_at(terms, 2 * at[..., None] - twice[:, :, None], scores.dtype)  # [H, B, C, n, m]
        scores = scores + bias.unflatten(0, (keys.shape[1], -1)).permute(2, 0, 3, 1, 4, 5)
    weights, lse = weighted(scores, seen, layer.dropping)
    return (weights.flatten(3, 4) @ values).unflatten(3, rows.shape[3:5]), lse


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


def bias_at(terms: Sequence[Any], twice: Int[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The sum of biases at the offsets twice / 2 -> [heads, ...]."""
    below, above = twice // 2, (twice + 1) // 2
    return sum((term.at(below) + term.at(above)) / 2 for term in terms).to(dtype)  # type: ignore[union-attr]


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
    if not encoding.stable_keys:
        return f"{name} follows the length of the sequence, and hierarchical attention keeps summaries of one length"
    rotates = type(encoding).queries is not Encoding.queries or type(encoding).keys is not Encoding.keys
    if rotates and not isinstance(encoding.prepare(torch.zeros(1, dtype=torch.long)), RotaryTable):
        return f"{name} prepares no RotaryTable, so hierarchical attention cannot rotate half way between two positions"
    return None


# ---- the layer -----------------------------------------------------------------------------------------------------------
@register_mixer("hierarchical")
class HierarchicalAttention(StateMixer, Headed):
    """Attention to blocks of growing size: the last `window` tokens individually, earlier tokens in blocks of sizes 2^l.

        near = attention over the last tokens,   far = softmax over the blocks (scale q.K + bias + ln size) V
        out  = g near + (1 - g) far,   g = sigmoid(W_g x + b_g) for each head, b_g = 2 at the start

    Each binary digit 1 of the number of tokens before the window is a block of that power of two tokens, their average.
    Its cache is a state of the window and about log2 L blocks.

    Args:
        dim: width of x and of the output.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; None: num_heads.
        encoding: rotations and relative position biases.
        window: tokens attended individually, the query's token included.
        head_dim, bias, dropout, scale: as in MultiHeadAttention.
        backend: backend of the near part, as in attend.

    Raises:
        ValueError: for sizes that do not fit, unknown options, or an encoding that cannot be applied to blocks.

    Source:
        defined here, in docs/mixers.md; not a published method
    """

    scores = True
    rotates = True
    growth = "O(log N)"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        window: int = 256,
        bias: bool = False,
        **options: Unpack[HeadedOptions],
    ):
        super().__init__(dim, num_heads, num_kv_heads, bias=bias, **options)
        self.window = window
        self.gate_proj = nn.Linear(dim, num_heads, bias=False)
        self.gate_bias = nn.Parameter(torch.empty(num_heads))
        self.encoding = compose(encoding)
        self.require(self.encoding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gate opens to the window: sigmoid(2) = 0.88."""
        nn.init.constant_(self.gate_bias, 2.0)

    def products(self, keys: float) -> float:
        seen = min(keys, self.window + math.log2(max(1, keys)))  # the near tokens, and about a block for each doubling
        return 2 * seen * self.num_heads * self.head_dim

    def refuses(self, encoding: Encoding) -> str | None:
        return super().refuses(encoding) or refusal(encoding)

    def mix(self, x: Tensor, state: State | None, inputs: StateInputs) -> tuple[Tensor, State | None]:
        self.require_state(state, len(x), inputs.encoding)
        q, (k, v) = self.queries(x), self.keys_and_values(x)
        opening = self.gate_proj(x) + self.gate_bias
        gate = opening.to(torch.promote_types(opening.dtype, torch.float32)).sigmoid().transpose(1, 2)
        out, state = attend_tokens(self, q, k, v, gate, inputs, state)
        return self.o_proj(join_heads(out.to(q.dtype))), state

    @property
    def far_from(self) -> int:
        return self.window

    def require_state(self, state: State | None, batch: int, encoding: Composed) -> None:
        """ValueError for a state of another batch, window, size or encoding."""
        expected = [batch, self.num_kv_heads, self.window + CHUNK - 1, self.head_dim * (1 + encoding.transforms)]
        if state is not None and list(state.keys.shape) != expected:
            kind = f"keys {expected} of this batch, window and head_dim, twice as wide if an encoding rotates"
            raise UsageError("cache: HierarchicalAttention", kind, list(state.keys.shape))
