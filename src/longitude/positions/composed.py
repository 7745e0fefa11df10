"""Several encodings as one: transforms chain, terms add, columns join."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from longitude.positions.base import Columns, Encoding, Term

DECLARED = (
    "relative", "learned", "causal_only", "max_length", "axes", "shared", "stable_keys", "softmax_factor", "carries",
    "passing_columns",
)  # fmt: skip


class Composed(Encoding):
    """Several encodings as one: transforms chain, terms add, columns join. One encoding, or none, is the short case."""

    reads_tokens = False  # type: ignore[assignment]  (an attribute: every layer reads it)

    def __init__(self, members: Sequence[Encoding]):
        super().__init__()
        for member in members:
            if not isinstance(member, Encoding):
                raise ValueError(f"expected encodings, got {member!r}; build one by name with lg.encoding(name, ...)")
        # Composing is associative: members of members are members.
        members = [one for m in members for one in (m if isinstance(m, Composed) else [m])]
        self.members = nn.ModuleList(members)
        self.relative = all(m.relative for m in members)
        self.learned = any(m.learned for m in members)
        self.causal_only = any(m.causal_only for m in members)
        bounds = [m.max_length for m in members if m.max_length is not None]
        self.max_length = min(bounds) if bounds else None
        self.axes = max([1, *[m.axes for m in members]])
        self.shared = all(m.shared for m in members)
        self.carries = any(m.carries for m in members)
        self.stable_keys = all(m.stable_keys for m in members)
        self.softmax_factor = math.prod([m.softmax_factor for m in members])
        self.reads_tokens = any(m.reads_tokens for m in members)  # pyright: ignore[reportIncompatibleMethodOverride, reportAttributeAccessIssue]
        self.adds_terms = any(type(m).terms is not Encoding.terms for m in members)
        self.sizes = tuple(
            (type(m).__name__, name, getattr(m, name))
            for m in members
            for name in ("num_heads", "head_dim")
            if hasattr(m, name)
        )  # what queries are compared with
        self.prepares = any(type(m).prepare is not Encoding.prepare for m in members)
        self.transforms = any(
            type(m).queries is not Encoding.queries or type(m).keys is not Encoding.keys for m in members
        )
        self.passing_columns = frozenset().union(*(m.passing_columns for m in members))
        if self.passing_columns and not self.stable_keys:
            raise ValueError(
                "one of these encodings needs keys as they came in a cache, and another rewrites them there; use a rotation "
                "that does not follow the length, such as plain rotary or follow='declared'"
            )

    def __iter__(self) -> Iterator[Encoding]:
        return iter(self.members)  # type: ignore[arg-type]

    @property
    def at_input(self) -> bool:
        return any(m.at_input for m in self)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        for m in self:
            x = m.embed(x, of_axes(m, positions))
        return x

    def length_at(self, query: Any, newest: Any) -> Any:
        found = None
        for m in self:
            length = m.length_at(query, newest)
            if length is not None and found is not None:
                raise ValueError("two composed encodings both follow a length; use one of them")
            found = length if found is None else found
        return found

    def prepare(self, positions: Tensor, length: int | None = None, dtype: torch.dtype = torch.float32) -> tuple:
        return tuple(m.prepare(of_axes(m, positions), length, dtype) for m in self)

    def queries(self, q: Tensor, prepared: tuple) -> Tensor:
        for m, tables in zip(self, prepared, strict=True):
            q = m.queries(q, tables)
        return q

    def keys(self, k: Tensor, prepared: tuple) -> Tensor:
        for m, tables in zip(self, prepared, strict=True):
            k = m.keys(k, tables)
        return k

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        columns: Columns = {}
        carries = []
        for m, before in zip(self, carry or [None] * len(self.members), strict=True):
            new, after = m.context(x, before, documents)
            if twice := columns.keys() & new.keys():
                raise ValueError(f"two composed encodings both give the columns {sorted(twice)}; use one of them")
            columns |= new
            carries.append(after)
        return columns, carries

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return tuple(term for m in self for term in m.terms(context))


def of_axes(member: Encoding, positions: Tensor) -> Tensor:
    """Positions as a member takes them: one that measures a single axis needs positions that have one."""
    reads = member.at_input or type(member).prepare is not Encoding.prepare
    if member.axes > 1 or positions.dim() < 3 or not reads:
        return positions
    if positions.shape[-1] > 1:
        raise ValueError(
            f"{type(member).__name__} measures one axis: expected positions [L] or [B, L], got {list(positions.shape)}"
        )
    return positions[..., 0]


def compose(encoding: Encoding | Sequence[Encoding] | None) -> Composed:
    """Whatever a user may write for `encoding=` -> one object."""
    match encoding:
        case Composed():
            return encoding
        case Encoding():
            # Made once: a short decoding step would notice. Not a submodule, for it holds the encoding; and not a copy's.
            now = encoding, tuple(getattr(encoding, name) for name in DECLARED)
            then, composed = getattr(encoding, "_composed", (None, None))
            if composed is None or then is None or then[0] is not encoding or then[1] != now[1]:
                composed = Composed([encoding])
                if not torch.compiler.is_compiling():
                    encoding.__dict__["_composed"] = now, composed
            return composed
        case None:
            return Composed([]) if torch.compiler.is_compiling() else _nothing()
        case list() | tuple():
            return Composed(encoding)
    raise ValueError(f"expected an Encoding or a list of them, got {encoding!r}; build one with lg.encoding(name, ...)")


@lru_cache(maxsize=1)
def _nothing() -> Composed:
    return Composed([])
