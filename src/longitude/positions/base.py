"""The interface of position encodings. An encoding returns data about positions and is independent of attention.

Position enters a transformer at the input (`embed`), by transforming queries and keys (`queries`, `keys`, with the tables of
`prepare`), or through the scores (`terms`). An `Encoding` overrides the methods it needs; the others do nothing.
Methods that few encodings need are in `Extras`.

Terms: a *position* is an integer coordinate; *order* is a token's index in its sequence. An *offset* is always
query position - key position. A bias is finite for negative offsets too: the mask hides the future.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from longitude.errors import UsageError
from longitude.positions.coordinates import Positions, canonical, explicit, floor_divide, require_positions, within
from longitude.positions.linear import FullPrecision
from longitude.positions.terms import OffsetBias, PairBias, Term
from longitude.registry import Checked, Factory, Registry, options_of, resolve_options

Result = TypeVar("Result")
Columns = dict[str, Tensor]
"""Content-dependent tensors of an encoding, per token: name -> [B, heads, tokens, ...]."""


@dataclass(frozen=True)
class Region:
    """Pairs of queries and keys for which an encoding uses the positions queries(i) for i, and keys(j) for j.

        first <= floor(i / block) - floor(j / block) <= last

    The regions of an encoding are disjoint, and every pair that a causal mask allows is in one. Attention runs in each region,
    over a part of the keys, and results are merged by their logsumexp.

    Args:
        queries: maps positions [...] to the positions used to rotate queries, integers or float64 [...].
        keys: maps positions [...] to the positions used to rotate keys.
        first: smallest difference; None: unbounded.
        last: largest difference; None: unbounded.
        block: number of consecutive positions that share an index; 1: the difference is the offset.
    """

    queries: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    first: int | None = None
    last: int | None = None
    block: int = 1

    def holds(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether pairs of positions, broadcast against each other, are in the region."""
        ago = i - j if self.block == 1 else floor_divide(i, self.block) - floor_divide(j, self.block)
        return within(ago, self.first, self.last)


# ---- the contract ----------------------------------------------------------------------------------------------------
class Extras(Checked, FullPrecision):
    """What few encodings need. Every encoding has it, and by default it does nothing; read `Encoding` first."""

    widens: int = 1
    """Factor by which it widens queries and keys (PoPE); the scale of the scores stays that of the original width."""
    softmax_factor: float = 1.0
    """Factor for the scale of the scores (DeepSeek's YaRN). Latent attention applies it; with other layers pass `scale`."""
    rotate_values: bool = False
    """Whether it transforms values too, and outputs back."""
    reads_neighbors: bool = False
    """Whether `embed` reads tokens on both sides, for encoders; it takes documents=, runs [B, L], negative for padding."""
    columns: frozenset[str] = frozenset()
    """Names of the columns that it computes from content; two encodings of a list have none in common."""
    passing_columns: frozenset[str] = frozenset()
    """Names of columns needed only for new tokens: a cache does not keep them, and rewrites its keys by them."""
    query_columns: frozenset[str] = frozenset()
    """Names of columns that only a token's own query reads: a cache does not keep them."""
    carries: bool = False
    """Whether its columns depend on a state passed from token to token, so that a cache cannot be cropped."""

    def places(self, ids: Tensor, documents: Tensor | None = None, random_start: bool = False) -> Any:
        """Compute from token ids the positions that `embed` gets instead of the model's (Abacus, Coupled).

        Args:
            ids: [B, L], from the first token of each row on.
            documents: document numbers [B, L]; negative for padding.
            random_start: whether an encoding may draw a random start, as in training.

        Returns:
            Integers [B, L]; a token's position depends only on it and earlier tokens.
        """
        raise NotImplementedError

    def queries_and_keys(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, ...]:
        """Transform q and k of the same tokens, in one pass where that is cheaper than two."""
        return self.queries(q, prepared), self.keys(k, prepared)  # type: ignore[attr-defined]

    def transform_values(self, v: Tensor, prepared: Any) -> Tensor:
        """Transform values v [B, Hkv, L, head_dim] at the positions of the keys; the shape stays the same."""
        return v

    def restore_outputs(self, out: Tensor, prepared: Any) -> Tensor:
        """Transform outputs [B, H, L, head_dim] back at the positions of the queries; the shape stays the same."""
        return out

    def length_at(self, query: Any, newest: Any) -> Any:
        """Return the length that tables depend on, for a query at position `query` and its newest key at position `newest`.

        Queries of different lengths need different tables for the same key. Keys are therefore cached untransformed, and
        queries and keys are transformed by prepare(positions, length) once for each length. stable_keys is False then.

        Args:
            query: int, or int64 tensor.
            newest: int, or int64 tensor of the same shape.

        Returns:
            An int or tensor, as the arguments; None: tables do not depend on length, one set serves every query and key.
        """
        return None

    def regions(self) -> tuple[Region, ...]:
        """Return disjoint regions of all pairs, if positions depend on the pair of query and key (ReRoPE).

        `prepare` then gets a keyword `move`, the map of positions of a region; stable_keys is False.
        """
        return ()

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        """Compute the columns of the next tokens of a sequence from their content (FoX, PaTH, Inkling).

        Args:
            x: [B, L, dim].
            carry: the carry returned by the call for the previous tokens; None for the first tokens.
            documents: document numbers [B, L]; padding counts as a separate document.

        Returns:
            Their columns, and the carry for the tokens after them.
        """
        return {}, None

    @classmethod
    def extended(cls, options: Mapping[str, Any], scheme: Any, original: int, length: int) -> Mapping[str, Any] | None:
        """Options of the same class for more positions, without training.

        Args:
            options: all options of the trained encoding.
            scheme: a scheme of lg.scaling; Linear is position interpolation, for tables too.
            original: number of positions in training.
            length: number of positions needed.

        Returns:
            The options; unchanged if they have no maximum length; None if the scheme does not extend the encoding.
        """
        return options


class Encoding(Extras):
    """Base class of position encodings. Every method does nothing by default; a subclass overrides those it needs.

    The class attributes declare its properties; the laws of `longitude.testing` verify them.
    """

    relative: bool = True
    """Whether adding a constant to all positions changes nothing."""
    learned: bool = False
    """Whether it has parameters."""
    causal_only: bool = False
    """Whether its formula is undefined for keys in the future, so that a mask must hide them."""
    max_length: int | None = None
    """Number of positions, 0 .. max_length-1; None: no bound."""
    axes: int = 1
    """Number of coordinates per token."""
    shared: bool = False
    """Whether a single module serves all layers."""
    stable_keys: bool = True
    """Whether a transformed key stays valid as the sequence grows, so that a cache may keep it."""
    learns_frequencies: bool = False
    """Whether its angles are positions times learned numbers; `prepare` then has a keyword `center`."""
    score_tables: tuple[str, ...] = ()
    """Names of parameters that are added directly to scores, or to queries and keys (lg.parameter_groups)."""
    full_precision: tuple[str, ...] = ()
    """Names of its direct parameters that stay float32 or wider when the module is moved, cast or loaded."""
    source: str | None = None
    """Papers of the encoding: authors and year with a link, joined by "; "."""

    model_defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of required options for models of this package, which write them into their config; the user may set others."""

    def forward(self, read: Callable[[], Result]) -> Result:
        """Return read(), which reads parameters of this module.

        Offloading and sharding give a module its parameters while it is called, so models read them inside of such calls.
        """
        return read()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add position to the model's input x [B, L, dim]; the shape stays the same."""
        return x

    def prepare(self, positions: Tensor, length: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """Content-free tables, built once per forward, shared by layers, queries and keys.

        Args:
            positions: [L] or [B, L]; with several axes also [L, axes] or [B, L, axes].
            length: return value of `length_at`; None if it is unknown.
            dtype: dtype of the activations.
        """
        return None

    def queries(self, q: Tensor, prepared: Any) -> Tensor:
        """Transform queries q [B, H, L, head_dim] -> [B, H, L, widens * head_dim]."""
        return q

    def keys(self, k: Tensor, prepared: Any) -> Tensor:
        """Transform keys k [B, Hkv, L, head_dim] -> [B, Hkv, L, widens * head_dim]."""
        return k

    def terms(self, context: Columns) -> tuple[Term, ...]:
        """Terms that attention adds or applies to the scores, from the columns of all tokens."""
        return ()

    @property
    def at_input(self) -> bool:
        """Whether it acts on the model's input."""
        return self.overrides("embed")

    @property
    def reads_ids(self) -> bool:
        """Whether it computes positions from the token ids."""
        return self.overrides("places")

    @property
    def reads_tokens(self) -> bool:
        """Whether it computes columns from the tokens' content."""
        return self.overrides("context")

    def reset_parameters(self) -> None:
        """Initialize its direct parameters; layers inside it have a reset_parameters of their own."""

    def rotate_queries(self, x: Tensor, positions: Positions) -> Tensor:
        """Transform x [..., L, head_dim] as queries at `positions`."""
        return self._rotate(self.queries, x, positions)

    def rotate_keys(self, x: Tensor, positions: Positions) -> Tensor:
        """Transform x [..., L, head_dim] as keys at `positions`."""
        return self._rotate(self.keys, x, positions)

    rotate = rotate_queries

    def _rotate(self, transform: Callable[[Tensor, Any], Tensor], x: Tensor, positions: Positions) -> Tensor:
        if not x.is_floating_point() or x.dim() < 2:
            raise UsageError("", "x [..., L, head_dim] of floats", f"{x.dtype} {list(x.shape)}")
        if x.dim() > 4 or x.dim() < 4 and isinstance(positions, Tensor) and positions.dim() > 1 and self.axes == 1:
            raise UsageError("", "x [B, H, L, head_dim] for positions of several rows", f"x {list(x.shape)}")
        positions = canonical("positions", positions, x.shape[0] if x.dim() == 4 else 1, x.shape[-2], self.axes)
        prepared = self.prepare(explicit(positions, x.shape[-2], x.device), dtype=x.dtype)
        if x.dim() == 4:
            return transform(x, prepared)
        return transform(x.reshape(1, -1, *x.shape[-2:]), prepared).reshape(x.shape)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Tensor:
        """Sum of the biases that positions alone decide.

        Args:
            q_positions: integers [Lq].
            k_positions: integers [Lk].

        Returns:
            [heads, Lq, Lk].

        Raises:
            ValueError: it has no such bias, or positions have another shape or dtype.
        """
        i, j = (torch.as_tensor(p) for p in (q_positions, k_positions))
        if i.dim() != 1 or j.dim() != 1:
            raise UsageError("", "positions [Lq] and [Lk]", f"{list(i.shape)} and {list(j.shape)}")
        require_positions(i, who="q_positions")
        require_positions(j, who="k_positions")
        i, j = i.long()[:, None], j.long()[None]
        biases = [t.at(i - j) if isinstance(t, OffsetBias) else t.at(i, j) for t in self._content_free("bias")]
        return torch.stack(biases).sum(0)

    def bias_at(self, offset: Tensor | int) -> Tensor:
        """Sum of the biases that depend on the offset alone.

        Args:
            offset: query position - key position, integers [...].

        Returns:
            [heads, ...].

        Raises:
            ValueError: it has no such bias, or offsets are no integers.
        """
        offset = torch.as_tensor(offset)
        if offset.dtype not in (torch.int64, torch.int32):
            raise UsageError("offset", "integers (int64)", offset.dtype)
        terms = self._content_free("bias_at")
        if any(isinstance(term, PairBias) for term in terms):
            raise ValueError(f"{type(self).__name__} depends on both positions, not on their offset alone; use .bias()")
        return torch.stack([term.at(offset.long()) for term in terms if isinstance(term, OffsetBias)]).sum(0)

    def _content_free(self, method: str) -> tuple[OffsetBias | PairBias, ...]:
        try:
            terms = self.terms({})
        except KeyError:  # its terms are made of columns
            terms = ()
        biases = tuple(term for term in terms if isinstance(term, OffsetBias | PairBias))
        if not biases or len(biases) < len(terms):
            raise ValueError(f"{type(self).__name__} has no bias that positions alone decide, so no .{method}()")
        return biases

    def overrides(self, *methods: str) -> bool:
        """Whether its class overrides any of these methods."""
        return any(getattr(type(self), method) is not getattr(Encoding, method) for method in methods)

    def extra_repr(self) -> str:
        values = {n: getattr(self, n, None) for n in options_of(type(self))}
        return ", ".join(f"{n}={v!r}" for n, v in values.items() if isinstance(v, int | float | str | tuple))


# ---- the registry ----------------------------------------------------------------------------------------------------
ENCODINGS = Registry("encoding", "lg.list_encodings()", ["longitude.positions"])


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator that registers a class, or a function that builds an encoding, under a name.

    Args:
        name: name for `encoding`, configs and the command line.

    Returns:
        The decorator, which returns the class or function unchanged.

    Raises:
        ValueError: the name is taken by another.
    """
    return ENCODINGS.register(name)


def list_encodings() -> list[str]:
    """The names of all registered encodings, sorted.

    Returns:
        Names that `encoding` accepts.
    """
    return list(ENCODINGS)


def encoding(name: str, **options: Any) -> Encoding:
    """Build a registered encoding by name, such as lg.encoding("alibi", num_heads=8).

    Args:
        name: one of `list_encodings()`.
        **options: options of its class, such as num_heads or head_dim.

    Returns:
        The encoding, a torch.nn.Module.

    Raises:
        ValueError: an unknown name or option, or a missing one.
    """
    return ENCODINGS[name](**resolved(name, options))


def resolved(name: str, options: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """All options of an encoding: from `options`, from the `known` sizes of the model, or defaults."""
    return resolve_options(name, ENCODINGS[name], options, known, "lg.encoding")
