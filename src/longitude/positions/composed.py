"""Several encodings as one: transforms chain, terms add, columns join."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.native.derivatives import constant_in_graphs
from longitude.positions.base import ENCODINGS, Columns, Encoding, Region, Result, resolved
from longitude.positions.coordinates import Positions, explicit, single_axis
from longitude.positions.terms import RowBias, SinkLogits, Temperature, Term

COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "relative": all,
    "learned": any,
    "causal_only": any,
    "max_length": lambda bounds: min(known) if (known := [x for x in bounds if x is not None]) else None,
    "axes": lambda axes: max([1, *axes]),  # compilers do not follow default=
    "shared": all,
    "stable_keys": all,
    "widens": math.prod,
    "softmax_factor": math.prod,
    "rotate_values": any,
    "carries": any,
    "reads_tokens": any,
    "at_input": any,
    "reads_neighbors": any,
    "reads_ids": any,
    "learns_frequencies": any,
    "columns": lambda columns: frozenset().union(*columns),
    "passing_columns": lambda columns: frozenset().union(*columns),
    "query_columns": lambda columns: frozenset().union(*columns),
    "source": lambda sources: "; ".join(dict.fromkeys(source for source in sources if source)) or None,
}
"""The declared properties, each with the function that combines those of several encodings."""
ATTRIBUTES = attrgetter(*[name for name in COMBINED if not isinstance(getattr(Encoding, name), property)])
"""The values of those that an encoding may change after it is built; its class decides the others."""
FAR = 2**30
"""A position beyond all training lengths, at which encodings that follow the length do so."""


class Composed(Encoding):
    """Several encodings as one: transforms chain, terms add, columns join.

    Args:
        members: any number of encodings; members of a Composed become members.

    Raises:
        ValueError: a member that is no encoding, two temperatures, two sinks, or two that cannot share a cache.
    """

    reads_tokens = at_input = reads_ids = False  # type: ignore[assignment]  (no properties: every layer reads them)

    def __new__(cls, *_: Any) -> Self:
        return nn.Module.__new__(cls)  # without checks of arguments: a graph may build one

    def __init__(self, members: Sequence[Encoding]):
        super().__init__()
        for member in members:
            if not isinstance(member, Encoding):
                raise UsageError("", "encodings", repr(member), "build one by name with lg.encoding(name, ...)")
        members = [member for m in members for member in (m if isinstance(m, Composed) else [m])]
        self.members = nn.ModuleList(members)
        self.each = tuple(members)  # the same, because a look-up in modules costs time in every layer
        for name, combine in COMBINED.items():
            setattr(self, name, combine([getattr(m, name) for m in members]))
        self.adds_terms = any(m.overrides("terms") for m in members)
        terms = [(m, term) for m in members if m.overrides("terms") and not m.reads_tokens for term in m.terms({})]
        for kind, what in ((Temperature, "multiply queries by a temperature"), (SinkLogits, "have a sink")):
            require_one(what, [m for m, term in terms if isinstance(term, kind)])
        # Columns that pass, such as reflections, are multiplied with the queries and keys themselves.
        readers = [m for m, term in terms if term.reads_query] + [m for m in members if m.passing_columns]
        wider = next((m for m in members if m.widens > 1), None)
        others = [m for m in members if m is not wider and (m in readers or m.overrides("queries", "keys"))]
        if wider is not None and others:
            raise ValueError(
                f"{type(wider).__name__} makes queries wider, and {type(others[0]).__name__} changes or reads queries of "
                "the width of a head; use one of them"
            )
        if readers and any(m.overrides("prepare") and m.overrides("queries") for m in members):
            self.relative = False  # vectors of offsets are multiplied with a query that its position has rotated
        names = [name for m in members for name in m.columns]
        require_separate_columns({name for name in names if names.count(name) > 1})
        self.sizes = tuple(
            (type(m).__name__, name, getattr(m, name))
            for m in members
            for name in ("num_heads", "head_dim")
            if hasattr(m, name)
        )  # attention checks the shape of queries by them
        self.following = [m for m in members if m.overrides("length_at")]
        require_one("follow a length", [m for m in self.following if m.length_at(FAR, FAR) is not None])
        self.moving = [m for m in members if m.regions()]
        require_one("move positions", self.moving)
        if self.moving:
            require_separable(type(self.moving[0]).__name__, members, terms)
        self.prepares = any(m.overrides("prepare") for m in members)
        self.transforms = any(m.overrides("queries", "keys") for m in members)
        if self.passing_columns and not self.stable_keys:
            raise ValueError(
                "one of these encodings needs untransformed keys in the cache, and another changes cached keys; use a rotation "
                "that does not follow the length, such as plain rotary or follow='declared'"
            )

    def require_loaded(self, device: torch.device) -> None:
        """UsageError for a parameter on the meta device: a product with it is unwritten memory on others, not an error.

        Layers inside of an encoding are not looked at: offloading gives them their parameters while they are called themselves.
        """
        if not self.learned or device.type == "meta":
            return
        for m in self.each:
            if any(p.is_meta for p in m.parameters(recurse=False)):
                who = f"encoding {type(m).__name__}"
                remedy = "load them, or keep the encoding in memory when a model is offloaded"
                raise UsageError(who, f"parameters on {device}", "parameters on meta", remedy)

    def __iter__(self) -> Iterator[Encoding]:
        return iter(self.each)

    def __call__(self, read: Callable[[], Result]) -> Result:
        # Without parameters there is nothing to bring, and each layer of a decoding step would pay for a module's call.
        return super().__call__(read) if self.learned else read()

    def forward(self, read: Callable[[], Result]) -> Result:
        for member in self.each:
            if member.learned:
                read = partial(member, read)
        return read()

    def embed(
        self, x: Tensor, positions: Tensor, places: Sequence[Tensor | None] = (), documents: Tensor | None = None
    ) -> Tensor:
        """Embed x with all members. places: positions of members that compute them from token ids, else None."""
        for m, places_of_m in zip(self.each, places or [None] * len(self.each), strict=True):
            options = {"documents": documents} if m.reads_neighbors else {}
            x = m.embed(x, of_axes(m, positions) if places_of_m is None else places_of_m, **options)
        return x

    def places(self, ids: Tensor, documents: Tensor | None = None, random_start: bool = False) -> tuple:
        return tuple(m.places(ids, documents, random_start) if m.reads_ids else None for m in self.each)

    def length_at(self, query: Any, newest: Any) -> Any:
        for m in self.following:
            if (length := m.length_at(query, newest)) is not None:
                return length
        return None

    def regions(self) -> tuple[Region, ...]:
        return self.moving[0].regions() if self.moving else ()

    def prepare(
        self,
        positions: Tensor,
        length: int | None = None,
        dtype: torch.dtype = torch.float32,
        move: Callable[[Tensor], Tensor] | None = None,
        center: Tensor | None = None,
    ) -> tuple:
        """Tables of each member.

        move: a region's map of positions, for the member that has regions. center: see `center`, for members that learn
        frequencies.
        """
        tables = []
        for m in self.each:
            options: dict[str, Any] = {"move": move} if move is not None and m in self.moving else {}
            options |= {"center": center} if center is not None and m.learns_frequencies else {}
            tables.append(m.prepare(of_axes(m, positions), length, dtype, **options))
        return tuple(tables)

    def center(self, positions: Positions, count: int, device: torch.device) -> Tensor | None:
        """The middle of the positions, from which gradients of learned frequencies may count; None if they must count from 0.

        Gradients of all angles sum to zero if the scores depend on offsets alone. Rounding leaves a rest, and counted from 0
        a position multiplies it. All queries and keys of a call need the same center.
        """
        if not (self.learns_frequencies and self.relative and torch.is_grad_enabled()):
            return None
        positions = explicit(positions, count, device)
        token = -2 if positions.dim() == 3 else -1
        return (positions.amin(token, keepdim=True) + positions.amax(token, keepdim=True)) // 2

    def queries(self, q: Tensor, prepared: tuple) -> Tensor:
        for m, tables in zip(self.each, prepared, strict=True):
            q = m.queries(q, tables)
        return q

    def keys(self, k: Tensor, prepared: tuple) -> Tensor:
        for m, tables in zip(self.each, prepared, strict=True):
            k = m.keys(k, tables)
        return k

    def queries_and_keys(self, q: Tensor, k: Tensor, prepared: tuple) -> tuple[Tensor, ...]:
        for m, tables in zip(self.each, prepared, strict=True):
            q, k = m.queries_and_keys(q, k, tables)
        return q, k

    def transform_values(self, v: Tensor, prepared: tuple) -> Tensor:
        for m, tables in zip(self.each, prepared, strict=True):
            v = m.transform_values(v, tables)
        return v

    def restore_outputs(self, out: Tensor, prepared: tuple) -> Tensor:
        for m, tables in reversed([*zip(self.each, prepared, strict=True)]):  # undone in reverse
            out = m.restore_outputs(out, tables)
        return out

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        columns: Columns = {}
        carries = []
        for m, before in zip(self.each, carry or [None] * len(self.each), strict=True):
            new, after = m.context(x, before, documents)
            require_separate_columns(columns.keys() & new.keys())
            columns |= new
            carries.append(after)
        return columns, carries

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return tuple([term for m in self.each for term in m.terms(context)])


def require_one(what: str, members: Sequence[Any]) -> None:
    """ValueError if several members do what only one can."""
    if len(members) > 1:
        names = " and ".join(type(m).__name__ for m in members)
        raise ValueError(f"two composed encodings both {what} ({names}); use one of them")


def require_separate_columns(shared: Collection[str]) -> None:
    """ValueError if two members compute columns of one name."""
    if shared:
        raise ValueError(f"two composed encodings both give the columns {sorted(shared)}; use one of them")


def require_separable(moving: str, members: Sequence[Any], terms: Sequence[tuple[Any, Term]]) -> None:
    """ValueError if a member excludes attention in separate parts of the keys, which the encoding named `moving` needs."""
    of_rows = [m for m, term in terms if isinstance(term, RowBias)]
    for m in members:
        if m.length_at(0, 0) is not None or m.rotate_values or m in of_rows:
            how = "follows a length, rotates values or reads whole rows of scores"
            raise ValueError(f"{moving} attends in parts of the keys, and {type(m).__name__} {how}; use one of them")


def of_axes(member: Encoding, positions: Tensor) -> Tensor:
    """Positions for a member; ValueError if it has one axis and the positions have several."""
    if member.axes > 1 or not member.overrides("embed", "prepare"):
        return positions
    return single_axis(type(member).__name__, positions)


@constant_in_graphs
def _load_encodings() -> bool:
    """Import all encodings, because torch.compile cannot trace the imports at the first use of a name."""
    return bool(len(ENCODINGS))


def by_name(label: str, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> Composed:
    """The encoding of a name, or of names joined by +, for these heads; ValueError if it needs more or has parameters."""
    known = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    _load_encodings()
    built = [ENCODINGS[name](**resolved(name, {}, **known)) for name in label.split("+")]
    if learned := next((member for member in built if any(True for _ in member.parameters())), None):
        raise ValueError(
            f"encoding={label!r}: {type(learned).__name__} has parameters, which every call would initialize again; build it "
            "once with lg.encoding(...), train it, and pass it"
        )
    return compose(built).to(device)


def compose(encoding: Encoding | Sequence[Encoding] | None) -> Composed:
    """One Composed for any value of `encoding=`: an encoding, several, or None."""
    match encoding:
        case Composed():
            return encoding
        case Encoding():
            if torch.compiler.is_compiling():
                return Composed([encoding])
            # Cached for decoding steps, not as a submodule, which would be a cycle. A copy has its original's and builds its own.
            key = encoding, ATTRIBUTES(encoding)
            known, composed = getattr(encoding, "_composed", (None, None))
            if composed is None or known is None or known[0] is not encoding or known[1] != key[1]:
                composed = Composed([encoding])
                encoding.__dict__["_composed"] = key, composed
            return composed
        case None:
            return Composed([]) if torch.compiler.is_compiling() else _nothing()
        case list() | tuple():
            return Composed(encoding)
    raise UsageError("", "an Encoding or a list of them", repr(encoding), "build one with lg.encoding(name, ...)")


@lru_cache(maxsize=1)
def _nothing() -> Composed:
    return Composed([])
