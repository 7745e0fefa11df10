"""hierarchical_attention(): a softmax over the near tokens, and one over blocks of all tokens before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.attention.layers.hierarchical.blocks import Merge, mean, pyramid
from longitude.attention.layers.hierarchical.centres import refusal
from longitude.attention.layers.hierarchical.rule import COMBINES, Rule
from longitude.attention.layers.hierarchical.segments import Group, Tokens, groups_of, tokens_of
from longitude.attention.layers.hierarchical.state import State, Stream, state_after, window_of, with_rows
from longitude.attention.layers.hierarchical.step import step
from longitude.attention.layers.hierarchical.summaries import over_blocks
from longitude.attention.layers.hierarchical.tabled import over_tabled_blocks
from longitude.attention.masks import Causal, Documents, Padding, Window
from longitude.attention.operation import raw_request, run
from longitude.attention.request import as_int, validate
from longitude.errors import unknown
from longitude.positions.base import Encoding, Positions, canonical, check_flags, check_sizes, explicit
from longitude.positions.composed import Composed, compose

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
    """For each query t, with a = max(0, t - window + 1):

        near = attention over the tokens a .. t
        far  = softmax over the blocks of a (scale q.K + bias + ln size) V,    blocks: one for each binary digit 1 of a
        out  = g near + (1 - g) far,  g = gate (1 where a = 0);   or one softmax over both

    A block of 2^l tokens begins at a multiple of 2^l, and is the merge of its two halves, down to the tokens' own keys and
    values, before any rotation: for "mean" K and V are averages. All its tokens come before the window, so nothing is seen
    of the future. O(L (window + log L)) time, O(L) memory.

    combine: "gate", with gate [B, H, L] in [0, 1], or "softmax", without. size_term: a block counts as its number of tokens;
    with it and "softmax", equal keys give full attention exactly, and so does any input where window >= L. merge: "mean", or
    two functions (level, left, right) -> the merged [..., D], of keys and of values; `level` counts from 1.

    encoding: rotations and biases of the offset. A block stands half way between its first and its last token, where it is
    rotated after pooling; half way between two offsets a bias is the mean of both. documents: a number per token; each run
    of equal ones has a window and blocks of its own, negative ones are padding, whose outputs are zeros. positions, scale,
    dropout, backend (of the near part): as in attend.

    Errors: ValueError for a window below 1, a gate that is missing, not asked for or of another shape, an encoding that reads
    tokens or adds anything but a bias of the offset, and whatever attend refuses.
    """
    validate(q, k, v, Causal(), scale, dropout)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"expected as many queries as keys, got {q.shape[2]} and {k.shape[2]}")
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
        raise ValueError(f"gate: expected [B, H, L] = {list(q.shape[:3])}, got {list(gate.shape)}")
    if documents is not None and documents.shape != (q.shape[0], q.shape[2]):
        raise ValueError(f"documents: expected [B, L] = {[q.shape[0], q.shape[2]]}, got {list(documents.shape)}")
    encoding = compose(encoding)
    for member in encoding:
        if (why := refusal(member)) is not None:
            raise ValueError(f"{why}; expected rotations or biases of the offset")
    places = canonical("positions", 0 if positions is None else positions, q.shape[0], q.shape[2], encoding.axes)
    tables = encoding.prepare(explicit(places, q.shape[2], q.device), None, q.dtype)
    return attended(rule, q, k, v, gate, places, encoding, tables, documents)[0]


def require_rule(who: str, window: int, combine: str, size_term: bool, merge: str) -> None:
    """ValueError for options that mean nothing."""
    check_sizes(who, window=window)
    check_flags(who, size_term=size_term)
    if combine not in COMBINES:
        raise unknown("combine", combine, COMBINES, f"{who} puts its branches together by a gate or in one softmax.")
    if merge not in ("mean", "learned"):
        raise unknown(
            "merge", merge, ("mean", "learned"), f"{who} averages both halves of a block, or learns to merge them."
        )


def attended(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    positions: Positions,
    encoding: Composed,
    tables: Any,
    documents: Int[Tensor, "B Lk"] | None = None,
    state: State | None = None,
    keep: bool = False,
) -> tuple[Tensor, State | None]:
    """The output, and the state after these tokens where it is to be kept. q, k, v: as projected; documents: of the tokens
    before, too.
    """
    batch, length = q.shape[0], q.shape[2]
    compiling = in_a_compiler() and not keep  # then nobody may look where documents end
    tokens = None if documents is None or compiling else tokens_of(documents, documents.shape[1] - length)
    turned = encoding.keys(k, tables) if encoding.transforms else None
    q = encoding.queries(q, tables)
    places = explicit(positions, length, q.device).view(-1, length)
    call = Call(q, k, turned, v, gate, places)
    with torch.autocast(q.device.type, enabled=False):
        if documents is not None and compiling:
            return traced(rule, call, encoding, documents), None
        if state is not None and length == 1:
            real = [True] * batch if tokens is None else tokens.real[:, 0].tolist()
            begins = [False] * batch if tokens is None else tokens.begins[:, 0].tolist()
            return step(rule, q, k, turned, v, gate, places, encoding, state, real, begins)
        counts = [0] * batch if state is None else state.seen.tolist()
        if tokens is None and len(set(counts)) == 1:
            before = window_of(state, torch.arange(batch, device=q.device), counts[0]) if state is not None else None
            return heard(rule, call, encoding, before, [counts[0] + length] * batch if keep else None)
        if tokens is None:
            all_real = torch.ones(batch, length, dtype=torch.bool, device=q.device)
            tokens = Tokens(all_real, ~all_real)
        out = v.new_zeros(batch, length, q.shape[1], v.shape[3])
        heard_before = state  # a row's last run may come in a group before its first one
        for group in groups_of(tokens, counts):
            rows = torch.tensor(group.rows, device=q.device)
            before = window_of(heard_before, rows, group.before) if heard_before is not None and group.before else None
            after = [group.before + n for n in group.lengths]
            found, part = heard(rule, call.of(group, rows), encoding, before, after if keep else None)
            out[rows.repeat_interleave(group.real.sum(1)), group.tokens[group.real]] = found.transpose(1, 2)[group.real]
            if part is not None and (last := [n for n, one in enumerate(group.last) if one]):
                state = with_rows(state, [group.rows[n] for n in last], part.of(last), batch)
        return out.transpose(1, 2), state


def in_a_compiler() -> bool:
    return torch.compiler.is_compiling()


class Call(NamedTuple):
    """q and turned are turned already; turned: None where nothing is."""

    q: Float[Tensor, "B H L D"]
    k: Float[Tensor, "B Hkv L D"]
    turned: Float[Tensor, "B Hkv L D"] | None
    v: Float[Tensor, "B Hkv L Dv"]
    gate: Float[Tensor, "B H L"] | None
    places: Int[Tensor, "B L"]

    def of(self, group: Group, rows: Tensor) -> Call:
        """The runs of a group as rows; behind the end of a run its last token is repeated, at positions that go on."""
        at = rows[:, None], group.tokens

        def picked(x: Tensor | None) -> Any:
            return None if x is None else x.transpose(1, 2)[at].transpose(1, 2)

        places = self.places.expand(len(self.q), -1)[at] + group.beyond
        q, k, turned, v, gate = (picked(x) for x in self[:5])
        return Call(q, k, turned, v, gate, places)


def traced(rule: Rule, call: Call, encoding: Composed, documents: Int[Tensor, "B L"]) -> Tensor:
    """The output without a look at documents, as compilers need it."""
    q, k, turned, v, gate, places = call
    places = places.expand(len(q), -1)
    begins = torch.ones_like(documents)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    mask = Window(rule.window) & Documents(begins.cumsum(1)) & Padding(documents >= 0)
    keys = k if turned is None else turned
    r = raw_request(q, keys, v, encoding, None, mask, places, places, rule.scale, rule.dropout, False)
    near = run(r.with_lse() if rule.combine == "softmax" else r, rule.backend)
    far = over_tabled_blocks(rule, q, k, v, places, begins == 1, encoding)
    real = documents[:, None, :, None] >= 0
    return torch.where(real, rule.combined(near, far, gate), 0.0).to(q.dtype)


def heard(
    rule: Rule, call: Call, encoding: Composed, before: Stream | None, counts: list[int] | None
) -> tuple[Tensor, State | None]:
    """The output of rows that go on after the same number of tokens, and, where asked for, the state after counts[b] of row b."""
    q, k, turned, v, gate, places = call
    stream = Stream(0, k, turned, v, places)
    if before is not None:
        stream = before.followed_by(stream)
    length, total = q.shape[2], stream.first + stream.keys.shape[2]

    keys = stream.keys if stream.turned is None else stream.turned
    q_at, k_at = (as_int(p[0] if len(p) == 1 else p) for p in (places, stream.places))
    mask = Window(rule.window)
    r = raw_request(q, keys, stream.values, encoding, None, mask, q_at, k_at, rule.scale, rule.dropout, False)
    near, lse = run(r.with_lse() if rule.combine == "softmax" else r, rule.backend)

    inside = slice(0, rule.entered(total) - stream.first)
    wide = torch.promote_types(q.dtype, torch.float32)
    ends = stream.places[:, inside, None].expand(-1, -1, 2)
    levels = pyramid(
        stream.keys[:, :, inside].to(wide),
        stream.values[:, :, inside].to(wide),
        ends,
        stream.first,
        stream.blocks,
        rule.merges,
    )
    state = None if counts is None else state_after(stream, levels, counts, rule.window)
    first = max(0, rule.window - (total - length))  # the first query with a token before its window
    if first >= length:
        return near, state
    prefix = total - length + first - rule.window + 1
    far = over_blocks(rule, q[:, :, first:], places[:, first:], prefix, levels, encoding)
    late = near[:, :, first:], None if lse is None else lse[:, :, first:]
    both = rule.combined(late, far, None if gate is None else gate[:, :, first:])
    return torch.cat([near[:, :, :first], both.to(near.dtype)], 2), state
