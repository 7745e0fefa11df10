"""Attention to the near tokens one by one, and to everything before them in blocks: a function and a layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longitude.attention.documents import require_number_per_token
from longitude.attention.heads import Headed, HeadedOptions, join_heads
from longitude.attention.layers.hierarchical_blocks import (
    MEANS,
    Merge,
    Rule,
    State,
    Stream,
    Tokens,
    over_blocks,
    over_tabled_blocks,
    pyramid,
    refusal,
    state_after,
    step,
    window_of,
    with_rows,
)
from longitude.attention.masks import Causal, Documents, Padding, Window
from longitude.attention.mixer import register_mixer
from longitude.attention.operation import raw_request, run
from longitude.attention.request import validate
from longitude.attention.state_mixer import StateInputs, StateMixer, document_flags, without_trivial
from longitude.errors import UsageError, check_choice, check_sizes
from longitude.native.derivatives import readable, with_zero_gradients
from longitude.native.not_finite import nan_in_its_document
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import Positions, as_int, canonical, explicit

if TYPE_CHECKING:
    from longitude.attention.state_cache import StateLayer


def hierarchical_attention(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B Hkv L D"],
    v: Float[Tensor, "B Hkv L Dv"],
    *,
    window: int,
    combine: str = "gate",
    gate: Float[Tensor, "B H L"] | None = None,
    size_term: bool = True,
    merge: str | tuple[Merge, Merge] = "mean",
    encoding: Encoding | Sequence[Encoding] | None = None,
    positions: Positions | None = None,
    documents: Int[Tensor, "B L"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Float[Tensor, "B H L Dv"]:
    """Attention to blocks of growing size: the last `window` tokens individually, earlier tokens in blocks of sizes 2^l.

    For each query t, with a = max(0, t - window + 1):

        near = attention over the tokens a .. t
        far  = softmax over the blocks of a (scale q.K + bias + ln size) V,    blocks: one for each binary digit 1 of a
        out  = g near + (1 - g) far,  g = gate (1 where a = 0);   or one softmax over both

    A block of 2^l tokens begins at a multiple of 2^l. Its key and value are the merge of its two halves, down to the keys and
    values of tokens before any rotation. All its tokens come before the window, so the result is causal.

    A block is rotated after pooling, at its center half way between its first and last token. Half way between two offsets a
    bias is the mean of both. With size_term and "softmax" the result equals full attention if all keys are equal, or if
    window >= L. It takes O(L (window + log L)) time and O(L) memory.

    Args:
        q: [B, H, L, D].
        k: [B, Hkv, L, D].
        v: [B, Hkv, L, Dv].
        window: tokens attended individually, the query's token included.
        combine: "gate", or "softmax" over both parts.
        gate: [B, H, L] in [0, 1], with "gate" only.
        size_term: whether a block counts as its number of tokens.
        merge: "mean", or two functions (level, left, right) -> the merged [..., D], of keys and of values; level counts from 1.
        encoding: rotations and relative position biases.
        positions: as in attend.
        documents: a number per token [B, L]; windows and blocks stay within a run of equal numbers. Negative numbers are
            padding, with outputs of zeros.
        scale: factor of the scores; None: D^-1/2.
        dropout: dropout probability of the weights.
        backend: backend of the near part, as in attend.

    Returns:
        [B, H, L, Dv].

    Raises:
        ValueError: for a window below 1, a gate that is missing, superfluous or of another shape, an encoding that reads tokens
            or adds anything but a bias of the offset, and what attend refuses.
    """
    validate(q, k, v, Causal(), scale, dropout)
    if q.shape[2] != k.shape[2]:
        raise UsageError("", "as many queries as keys", f"{q.shape[2]} and {k.shape[2]}")
    require_rule("hierarchical_attention", window, combine, size_term)
    if not isinstance(merge, tuple):
        check_choice("hierarchical_attention", Literal["mean"], merge=merge)
        merge = MEANS
    rule = Rule(window, combine, size_term, q.shape[3] ** -0.5 if scale is None else scale, merge, dropout, backend)
    if (gate is not None) != (combine == "gate"):
        raise ValueError(
            f"gate: combine={combine!r} expected {'a gate' if combine == 'gate' else 'no gate'}, got {gate!r}"
        )
    if gate is not None and gate.shape != q.shape[:3]:
        raise UsageError("gate", f"[B, H, L] = {list(q.shape[:3])}", list(gate.shape))
    if documents is not None:
        require_number_per_token(documents, q.shape[0], q.shape[2])
    encoding = compose(encoding)
    for member in encoding:
        if (why := refusal(member)) is not None:
            raise ValueError(f"{why}; expected rotations or biases of the offset")
    at = canonical("positions", 0 if positions is None else positions, q.shape[0], q.shape[2], encoding.axes)
    at = explicit(at, q.shape[2], q.device)
    tables = encoding.prepare(at, None, q.dtype)
    reset, valid = (None, None) if documents is None else document_flags(documents)
    inputs = StateInputs(reset, valid, at, encoding, tables, documents, False)
    return attend_tokens(rule, q, k, v, gate, inputs)[0]


def require_rule(who: str, window: int, combine: str, size_term: bool) -> None:
    """ValueError for options that no call supports."""
    check_sizes(who, window=window)
    check_choice(who, bool, size_term=size_term)
    check_choice(who, Literal["gate", "softmax"], combine=combine)


def attend_tokens(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, inputs: StateInputs, state: State | None = None
) -> tuple[Tensor, State | None]:
    """Output for projected q, k, v, and the state after these tokens if a cache keeps it."""
    batch, length = q.shape[0], q.shape[2]
    encoding, reset, valid = inputs.encoding, inputs.reset, inputs.valid
    compiling = in_a_compiler(inputs)
    rotated = encoding.keys(k, inputs.tables) if encoding.transforms else None
    q = encoding.queries(q, inputs.tables) if encoding.transforms else q
    tokens = Tokens(q, k, rotated, v, gate, inputs.one_axis("hierarchical attention").view(-1, length))
    with torch.autocast(q.device.type, enabled=False):
        if inputs.documents is not None and compiling and not inputs.cached:
            return traced(rule, tokens, encoding, inputs.documents), None
        if compiling:
            reset, valid = without_trivial(reset, valid)
        if state is not None and length == 1:
            real = [True] * batch if valid is None else valid[:, 0].tolist()
            begins = [False] * batch if reset is None else reset[:, 0].tolist()
            return step(rule, tokens, encoding, state, real, begins)
        counts = [0] * batch if state is None else state.seen.tolist()
        if reset is None and valid is None and len(set(counts)) == 1:
            before = window_of(state, torch.arange(batch, device=q.device), counts[0]) if state is not None else None
            return attend_rows(rule, tokens, encoding, before, [counts[0] + length] * batch if inputs.cached else None)
        valid = torch.ones(batch, length, dtype=torch.bool, device=q.device) if valid is None else valid
        reset = torch.zeros_like(valid) if reset is None else reset
        out = v.new_zeros(batch, length, q.shape[1], v.shape[3])
        earlier = state  # a row's last run may come in a group before its first one
        for group in groups_of(valid, reset, counts):
            rows = torch.tensor(group.rows, device=q.device)
            before = window_of(earlier, rows, group.before) if earlier is not None and group.before else None
            after = [group.before + n for n in group.lengths] if inputs.cached else None
            part, part_state = attend_rows(rule, group.of(tokens, rows), encoding, before, after)
            out[rows.repeat_interleave(group.real.sum(1)), group.tokens[group.real]] = part.transpose(1, 2)[group.real]
            if part_state is not None and (last := [n for n, is_last in enumerate(group.last) if is_last]):
                state = with_rows(state, [group.rows[n] for n in last], part_state.of(last), batch)
        return out.transpose(1, 2), state


def in_a_compiler(inputs: StateInputs) -> bool:
    """Whether the host cannot read where documents end."""
    return not readable(*(x for x in (inputs.documents, inputs.reset, inputs.valid) if x is not None))


def traced(rule: Rule, tokens: Tokens, encoding: Composed, documents: Int[Tensor, "B L"]) -> Tensor:
    """The output in operations that do not depend on where documents end, as compilers need it."""
    places = tokens.places.expand(len(tokens.q), -1)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    by_heads = tokens.by_heads()
    finite, _, back = nan_in_its_document(2, [*by_heads.values()], (), begins, documents >= 0)
    q, k, rotated, v, gate, _ = tokens._replace(**dict(zip(by_heads, finite, strict=True)))
    mask = Window(rule.window) & Documents(begins.cumsum(1)) & Padding(documents >= 0)
    keys = k if rotated is None else rotated
    r = raw_request(q, keys, v, encoding, None, mask, places, places, rule.scale, rule.dropout, False)
    near = run(r.with_lse() if rule.combine == "softmax" else r, rule.backend)
    far = over_tabled_blocks(rule, q, k, v, places, begins, encoding)
    out, _ = back(rule.combined(near, far, gate), ())
    return out.to(q.dtype)


def attend_rows(
    rule: Rule, tokens: Tokens, encoding: Composed, before: Stream | None, counts: list[int] | None
) -> tuple[Tensor, State | None]:
    """Output of rows with the same number of past tokens; with `counts` also the state after counts[b] tokens of row b."""
    q, k, rotated, v, gate, places = tokens
    stream = Stream(0, k, rotated, v, places)
    if before is not None:
        stream = before.followed_by(stream)
    length, total = q.shape[2], stream.first + stream.keys.shape[2]

    keys = stream.keys if stream.rotated is None else stream.rotated
    q_at, k_at = (as_int(p[0] if len(p) == 1 else p) for p in (places, stream.places))
    mask = Window(rule.window)
    r = raw_request(q, keys, stream.values, encoding, None, mask, q_at, k_at, rule.scale, rule.dropout, False)
    near, lse = run(r.with_lse() if rule.combine == "softmax" else r, rule.backend)

    inside = slice(0, rule.in_blocks(total) - stream.first)
    wide = torch.promote_types(q.dtype, torch.float32)
    ends = stream.places[:, inside, None].expand(-1, -1, 2)
    k, v = stream.keys[:, :, inside].to(wide), stream.values[:, :, inside].to(wide)
    levels = pyramid(k, v, ends, stream.first, stream.blocks, rule.merges)
    state = None if counts is None else state_after(stream, levels, counts, rule.window)
    first = max(0, rule.window - (total - length))  # the first query with a token before its window
    if first >= length:
        return near, state
    prefix = total - length + first - rule.window + 1
    far = over_blocks(rule, q[:, :, first:], places[:, first:], prefix, levels, encoding)
    late = near[:, :, first:], None if lse is None else lse[:, :, first:]
    both = rule.combined(late, far, None if gate is None else gate[:, :, first:])
    return torch.cat([near[:, :, :first], both.to(near.dtype)], 2), state


# ---- documents: each run of tokens of one document is a row of its own, with a window and blocks of its own ------------------
class Group(NamedTuple):
    """Runs of one document each that follow the same number of tokens and are about as long: rows of one call."""

    before: int
    rows: list[int]
    lengths: list[int]
    last: list[bool]  # of its row
    tokens: Int[Tensor, "runs L"]  # the last one repeated to the longest
    beyond: Int[Tensor, "runs L"]  # tokens past the end of its run: 0 within it

    @property
    def real(self) -> Bool[Tensor, "runs L"]:
        return self.beyond == 0

    def of(self, tokens: Tokens, rows: Tensor) -> Tokens:
        """Documents as rows; after a document's end its last token is repeated, at the next positions."""
        at = rows[:, None], self.tokens
        places = tokens.places.expand(len(tokens.q), -1)[at] + self.beyond
        picked = {name: x.transpose(1, 2)[at].transpose(1, 2) for name, x in tokens.by_heads().items()}
        return tokens._replace(**picked, places=places)


def groups_of(valid: Bool[Tensor, "B L"], reset: Bool[Tensor, "B L"], counts: list[int]) -> list[Group]:
    """Group runs of documents by length, so that padding at most doubles the tokens. counts: earlier tokens of each row."""
    runs = defaultdict(list)
    for row, count in enumerate(counts):
        places = valid[row].nonzero().flatten()
        cuts = reset[row, places].nonzero().flatten().tolist()
        parts = places.tensor_split(cuts)
        for n, part in enumerate(parts):
            if len(part):
                before = count if n == 0 else 0
                runs[before, len(part).bit_length()].append((row, part, n == len(parts) - 1))
    groups = []
    for (before, _), group_runs in runs.items():
        rows, parts, last = zip(*group_runs, strict=True)
        lengths = [len(part) for part in parts]
        padded = torch.stack([torch.cat([p, p[-1:].expand(max(lengths) - len(p))]) for p in parts])
        ends = torch.tensor(lengths, device=padded.device)[:, None] - 1
        beyond = (torch.arange(max(lengths), device=padded.device) - ends).clamp(min=0)
        groups.append(Group(before, list(rows), lengths, list(last), padded, beyond))
    return groups


# ---- the layer -----------------------------------------------------------------------------------------------------------
class LearnedMerge(nn.Module):
    """A_l [left; right], l = 1 .. levels: one matrix for each level, for all blocks and heads. Higher levels average.

    The parameter is the difference from the average, 0 at the start: weight decay pulls back to the average.
    """

    def __init__(self, levels: int, head_dim: int):
        super().__init__()
        self.change = nn.Parameter(torch.zeros(levels, head_dim, 2 * head_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.change)

    def forward(self, level: int, left: Tensor, right: Tensor) -> Tensor:
        average = (left + right) * 0.5
        if level > len(self.change):
            return average
        return average + torch.cat([left, right], -1) @ self.change[level - 1].to(left.dtype).T


@register_mixer("hierarchical")
class HierarchicalAttention(StateMixer, Headed):
    """Attention to blocks of growing size: the last `window` tokens individually, earlier tokens in blocks of sizes 2^l.

        near = attention over the last tokens,   far = softmax over the blocks (scale q.K + bias + ln size) V
        out  = g near + (1 - g) far,   g = sigmoid(W_g x + b_g);   or one softmax over both

    Each binary digit 1 of the number of tokens before the window is a block of that power of two tokens, the merge of its
    halves. `hierarchical_attention` has the definition. Its cache is a state of the window and about log2 L blocks.

    Args:
        dim: width of x and of the output.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; None: num_heads.
        encoding: rotations and relative position biases.
        window: tokens attended individually, the query's token included.
        combine: "gate": g = sigmoid(W_g x + b_g) for each head, b_g = 2 at the start; or "softmax".
        size_term: whether a block counts as its number of tokens.
        merge: "mean", or "learned": a block is A_l [left; right] of its halves, the average at the start, with one matrix per
            level for keys and one for values.
        merge_levels: number of levels with learned matrices, for blocks of up to 2^merge_levels tokens. Higher levels average.
            Levels that no training sequence was long enough to use average, too, over what lower levels learned to merge.
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
        combine: str = "gate",
        size_term: bool = True,
        merge: str = "mean",
        merge_levels: int = 12,
        bias: bool = False,
        **options: Unpack[HeadedOptions],
    ):
        super().__init__(dim, num_heads, num_kv_heads, bias=bias, **options)
        require_rule("HierarchicalAttention", window, combine, size_term)
        check_choice("HierarchicalAttention", Literal["mean", "learned"], merge=merge)
        self.window, self.combine, self.size_term = window, combine, size_term
        self.gate_proj = nn.Linear(dim, num_heads, bias=False) if combine == "gate" else None
        self.gate_bias = nn.Parameter(torch.empty(num_heads)) if combine == "gate" else None
        learned = merge == "learned"
        self.merge_keys, self.merge_values = (
            LearnedMerge(merge_levels, self.head_dim) if learned else None for _ in range(2)
        )
        self.encoding = compose(encoding)
        self.require(self.encoding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gate opens to the window, sigmoid(2) = 0.88, and blocks are averages."""
        if self.gate_bias is not None:
            nn.init.constant_(self.gate_bias, 2.0)
        for merge in (self.merge_keys, self.merge_values):
            if merge is not None:
                merge.reset_parameters()

    def products(self, keys: float) -> float:
        seen = min(keys, self.window + math.log2(max(1, keys)))  # the near tokens, and about a block for each doubling
        return 2 * seen * self.num_heads * self.head_dim

    def cache_layer(self) -> StateLayer:
        from longitude.attention.state_cache import StateLayer

        return StateLayer(in_place=True)

    def refuses(self, encoding: Encoding) -> str | None:
        return super().refuses(encoding) or refusal(encoding)

    def rule(self) -> Rule:
        learned = self.merge_keys is not None and self.merge_values is not None
        merges: tuple[Merge, Merge] = (self.merge_keys, self.merge_values) if learned else MEANS  # type: ignore[assignment]
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        dropout = self.dropout if self.training else 0.0
        return Rule(self.window, self.combine, self.size_term, scale, merges, dropout, self.backend)

    def mix(self, x: Tensor, state: State | None, inputs: StateInputs) -> tuple[Tensor, State | None]:
        self.require_state(state, len(x), inputs.encoding)
        q, (k, v), gate = self.queries(x), self.keys_and_values(x), None
        if self.gate_proj is not None and self.gate_bias is not None:
            opening = self.gate_proj(x) + self.gate_bias
            gate = opening.to(torch.promote_types(opening.dtype, torch.float32)).sigmoid().transpose(1, 2)
        out, state = attend_tokens(self.rule(), q, k, v, gate, inputs, state)
        out = with_zero_gradients(out, self.far_parameters())  # sequences within the window use no block
        return self.o_proj(join_heads(out.to(q.dtype))), state

    @property
    def far_from(self) -> int:
        return self.window

    def far_parameters(self) -> list[nn.Parameter]:
        """Parameters that only sequences longer than the window use: those of the gate and the merges."""
        gate = [*self.gate_proj.parameters(), self.gate_bias] if self.gate_proj is not None else []
        merges = [merge.change for merge in (self.merge_keys, self.merge_values) if merge is not None]
        return [p for p in (*gate, *merges) if p is not None]

    def require_state(self, state: State | None, batch: int, encoding: Composed) -> None:
        """ValueError for a state of another batch, window, size or encoding."""
        expected = [batch, self.num_kv_heads, self.window, self.head_dim]
        if state is not None and list(state.keys.shape) != expected:
            raise UsageError(
                "cache: HierarchicalAttention",
                f"a state with keys [B, Hkv, window, head_dim] = {expected}",
                list(state.keys.shape),
            )
        if state is not None and (state.rotated is not None) != encoding.transforms:
            got = "one that rotates" if encoding.transforms else "one that does not rotate"
            raise UsageError("cache: HierarchicalAttention", "the encoding of cached tokens", got, "make a new cache")
