"""hierarchical_attention(): a softmax over the near tokens, and one over blocks of all tokens before them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.attention.documents import require_number_per_token
from longitude.attention.layers.hierarchical.blocks import (
    COMBINES,
    Merge,
    Rule,
    mean,
    over_blocks,
    over_tabled_blocks,
    pyramid,
    refusal,
)
from longitude.attention.layers.hierarchical.state import State, Stream, Tokens, state_after, step, window_of, with_rows
from longitude.attention.masks import Causal, Documents, Padding, Window
from longitude.attention.operation import raw_request, run
from longitude.attention.request import validate
from longitude.attention.state_mixer import StateInputs, document_flags, without_trivial
from longitude.errors import UsageError, check_flags, check_sizes, unknown
from longitude.native.derivatives import readable
from longitude.not_finite import nan_in_its_document
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import Positions, as_int, canonical, explicit

MERGES = {"mean": (mean, mean)}


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
    require_rule("hierarchical_attention", window, combine, size_term, "mean" if isinstance(merge, tuple) else merge)
    rule = Rule(
        window, combine, size_term, q.shape[3] ** -0.5 if scale is None else scale,
        MERGES[merge] if isinstance(merge, str) else merge, dropout, backend,
    )  # fmt: skip
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


def require_rule(who: str, window: int, combine: str, size_term: bool, merge: str) -> None:
    """ValueError for unknown options."""
    check_sizes(who, window=window)
    check_flags(who, size_term=size_term)
    if combine not in COMBINES:
        raise unknown("combine", combine, COMBINES, f"{who} combines its branches by a gate or in one softmax.")
    if merge not in ("mean", "learned"):
        known = ("mean", "learned")
        raise unknown("merge", merge, known, f"{who} averages both halves of a block, or learns to merge them.")


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
            if part_state is not None and (last := [n for n, one in enumerate(group.last) if one]):
                state = with_rows(state, [group.rows[n] for n in last], part_state.of(last), batch)
        return out.transpose(1, 2), state


def in_a_compiler(inputs: StateInputs) -> bool:
    """Whether the host cannot read where documents end."""
    return not readable(*(x for x in (inputs.documents, inputs.reset, inputs.valid) if x is not None))


def traced(rule: Rule, tokens: Tokens, encoding: Composed, documents: Int[Tensor, "B L"]) -> Tensor:
    """The output in operations that do not depend on where documents end, as compilers need it."""
    places = tokens.places.expand(len(tokens.q), -1)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    given = [x for x in tokens[:-1] if x is not None]
    found, _, back = nan_in_its_document(2, given, (), begins, documents >= 0)
    clean = iter(found)
    q, k, rotated, v, gate, _ = Tokens._make([*(x if x is None else next(clean) for x in tokens[:-1]), places])
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
        picked: list[Any] = [None if x is None else x.transpose(1, 2)[at].transpose(1, 2) for x in tokens[:-1]]
        return Tokens._make([*picked, places])


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
    for (before, _), found in runs.items():
        rows, parts, last = zip(*found, strict=True)
        lengths = [len(part) for part in parts]
        padded = torch.stack([torch.cat([p, p[-1:].expand(max(lengths) - len(p))]) for p in parts])
        ends = torch.tensor(lengths, device=padded.device)[:, None] - 1
        beyond = (torch.arange(max(lengths), device=padded.device) - ends).clamp(min=0)
        groups.append(Group(before, list(rows), lengths, list(last), padded, beyond))
    return groups
