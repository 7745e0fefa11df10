"""What an encoding is: data about positions. It never touches attention, and attention never learns its name.

Position enters a transformer at the input (`embed`), by transforming queries and keys (`queries`, `keys`), or through the
scores (`terms`). An `Encoding` overrides the one or two methods it needs; the others do nothing.

Words. A *position* is an integer coordinate; *order* is a token's place in its stream. An *offset* is always
query position - key position. A bias is finite for negative offsets too: forbidding the future is the mask's job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from longitude.registry import Registry, options_of, resolve_options

Columns = dict[str, Tensor]
"""What content says about position, per token: name -> [B, heads, tokens, ...]."""

Positions = int | Int[Tensor, " L"] | Int[Tensor, "B L"] | Int[Tensor, "B L axes"]
"""Integer coordinates; an int p means contiguous from p. Where an encoding has several axes, one number stands for all."""


# ---- the six terms: everything an encoding can ask of the scores -----------------------------------------------------
@dataclass(frozen=True)
class OffsetBias:
    """score += at(offset). `at` maps offsets [...] to [heads, ...], in float32 or wider. reach: all offsets of `reach` or more
    have the bias of `reach`; None: each may have its own. of: the module whose parameters, and nothing else that changes, decide
    what `at` says: while they stay, attention without gradients may make its table once.
    """

    at: Callable[[Tensor], Tensor]
    reach: int | None = None
    of: nn.Module | None = None


@dataclass(frozen=True)
class PairBias:
    """score += at(query positions [..., Lq, 1], key positions [..., 1, Lk]) -> [..., heads, Lq, Lk]."""

    at: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Drift:
    """score += level of the query's token - level of the key's token; level [B, heads, tokens], float32 or wider.

    scaled: the difference is multiplied by the scale of the scores, as q.k is.
    """

    level: Tensor
    scaled: bool = False


@dataclass(frozen=True)
class OffsetVectors:
    """score += scale * (query + shift) . keys(offset), and output += sum of weight * values(offset).

    `keys` and `values` map offsets [...] to [..., head_dim] or, one per head, [heads, ..., head_dim]. reach: all offsets of
    `reach` or more have the vectors of `reach`; None: each may have its own.
    """

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor] | None = None
    shift: Tensor | float = 0.0
    reach: int | None = None


@dataclass(frozen=True)
class RowBias:
    """score += of(queries, scaled raw scores, allowed), computed from whole rows of scores [B, heads, Lq, Lk]."""

    of: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Transport:
    """query . H_i H_(i-1) ... H_(j+1) key instead of query . key, where H_t = I - b_t w_t w_t'.

    w [B, heads, tokens, head_dim]; b [B, heads, tokens]; heads may be those of keys. They are of the last tokens among the
    keys; keys before those are carried to there already, as a cache keeps them. chunk: so many tokens at once; any gives
    the same result.
    """

    w: Tensor
    b: Tensor
    chunk: int = 128
    first: int = 0  # order of the first of these tokens; attention sets it


Term = OffsetBias | PairBias | Drift | OffsetVectors | RowBias | Transport


# ---- the contract ----------------------------------------------------------------------------------------------------
class Encoding(nn.Module):
    """Where position enters a transformer. Every method does nothing by default; a class overrides one or two.

    The class attributes are its declared properties; the conformance battery (`longitude.testing`) verifies them.
    """

    relative: bool = True
    """Adding one number to all positions changes nothing."""
    learned: bool = False
    """It has parameters."""
    causal_only: bool = False
    """Its formula has no meaning for keys in the future: a mask must forbid them."""
    max_length: int | None = None
    """Positions 0 .. max_length-1 exist; None: no bound."""
    axes: int = 1
    """Coordinates per token."""
    shared: bool = False
    """One module serves all layers."""
    stable_keys: bool = True
    """A transformed key stays right while the sequence grows, so a cache may keep it."""
    softmax_factor: float = 1.0
    """What its source multiplies the scale of the scores by; a model says so in `scale`, nothing here does."""
    carries: bool = False
    """Its context hands a state from token to token, so that a cache cannot take tokens back."""
    passing_columns: frozenset[str] = frozenset()
    """Columns of which only those of new tokens are needed: a cache lets them pass."""

    model_defaults: ClassVar[Mapping[str, Any]] = {}
    """Required options that a model of our own decides for the user, and writes into its config."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """X [B, L, dim], at the model's input -> the same shape."""
        return x

    def length_at(self, query: Any, newest: Any) -> Any:
        """The length that tables follow, for a query at position `query` whose newest key is at `newest`: ints, or int64
        tensors of one shape, to the same. None: tables follow none, one set serves every query and key.

        Queries of different lengths see the same key through different tables, so keys are kept as they are (stable_keys
        is False), and both are transformed by prepare(positions, length) for each length at which queries stand.
        """
        return None

    def prepare(self, positions: Tensor, length: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """Content-free tables for positions [L] or [B, L], built once per forward, shared by layers, queries and keys.

        With several axes, positions may end in a dimension for them: [L, axes], [B, L, axes]. `length` is what `length_at`
        says, None where nothing is known yet; `dtype` that of the activations.
        """
        return None

    def queries(self, q: Tensor, prepared: Any) -> Tensor:
        """Q [B, H, L, head_dim] -> the same shape."""
        return q

    def keys(self, k: Tensor, prepared: Any) -> Tensor:
        """K [B, Hkv, L, head_dim] -> the same shape."""
        return k

    def context(self, x: Tensor, carry: Any = None, documents: Tensor | None = None) -> tuple[Columns, Any]:
        """X [B, L, dim], the next tokens of a stream -> their columns, and what the tokens after them must know.

        documents [B, L]: tokens of different numbers are of different streams; padding counts as one of its own.
        """
        return {}, carry

    def terms(self, context: Columns) -> tuple[Term, ...]:
        """What is added to or done to the scores, given the columns of all tokens."""
        return ()

    @property
    def at_input(self) -> bool:
        """Whether it acts on the model's input."""
        return type(self).embed is not Encoding.embed

    @property
    def reads_tokens(self) -> bool:
        """Whether it has columns, made of the tokens' content."""
        return type(self).context is not Encoding.context

    def reset_parameters(self) -> None:
        """Give its own parameters their initial values; layers inside it have theirs."""

    def rotate_queries(self, x: Tensor, positions: Positions) -> Tensor:
        """X [..., L, head_dim] as queries at `positions`."""
        return self._rotate(self.queries, x, positions)

    def rotate_keys(self, x: Tensor, positions: Positions) -> Tensor:
        """X [..., L, head_dim] as keys at `positions`."""
        return self._rotate(self.keys, x, positions)

    rotate = rotate_queries

    def _rotate(self, transform: Callable[[Tensor, Any], Tensor], x: Tensor, positions: Positions) -> Tensor:
        if not x.is_floating_point() or x.dim() < 2:
            raise ValueError(f"expected x [..., L, head_dim] of floats, got {x.dtype} {list(x.shape)}")
        if x.dim() > 4 or x.dim() < 4 and isinstance(positions, Tensor) and positions.dim() > 1 and self.axes == 1:
            raise ValueError(f"expected x [B, H, L, head_dim] for positions of several rows, got x {list(x.shape)}")
        positions = canonical("positions", positions, x.shape[0] if x.dim() == 4 else 1, x.shape[-2], self.axes)
        prepared = self.prepare(explicit(positions, x.shape[-2], x.device), dtype=x.dtype)
        if x.dim() == 4:
            return transform(x, prepared)
        return transform(x.reshape(1, -1, *x.shape[-2:]), prepared).reshape(x.shape)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Tensor:
        """Sum of the content-free biases -> [heads, Lq, Lk]. Positions as tensors [L]."""
        i, j = (torch.as_tensor(p) for p in (q_positions, k_positions))
        if i.dim() != 1 or j.dim() != 1:
            raise ValueError(f"expected positions [Lq] and [Lk], got {list(i.shape)} and {list(j.shape)}")
        for name, positions in (("q_positions", i), ("k_positions", j)):
            require_positions(positions, who=name)
        i, j = i.long(), j.long()
        biases = []
        for term in self._content_free("bias"):
            match term:
                case OffsetBias(at):
                    biases.append(at(i[:, None] - j))
                case PairBias(at):
                    biases.append(at(i[:, None], j[None]))
        return torch.stack(biases).sum(0)

    def bias_at(self, offset: Tensor | int) -> Tensor:
        """Sum of the biases that depend on the offset alone -> [heads, *offset.shape]."""
        offset = torch.as_tensor(offset)
        if offset.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"offset: expected integers (int64), got {offset.dtype}")
        offset = offset.long()
        terms = self._content_free("bias_at")
        if any(isinstance(term, PairBias) for term in terms):
            raise ValueError(f"{type(self).__name__} depends on both positions, not on their offset alone; use .bias()")
        return torch.stack([term.at(offset) for term in terms if isinstance(term, OffsetBias)]).sum(0)

    def _content_free(self, asked: str) -> tuple[Term, ...]:
        try:
            terms = self.terms({})
        except KeyError:  # its terms are made of columns
            terms = ()
        if not terms or not all(isinstance(term, OffsetBias | PairBias) for term in terms):
            raise ValueError(f"{type(self).__name__} has no bias that positions alone decide, so no .{asked}()")
        return terms

    def extra_repr(self) -> str:
        names = options_of(type(self))
        return ", ".join(f"{n}={v!r}" for n in names if isinstance(v := getattr(self, n, None), int | float | str))


# ---- the registry ----------------------------------------------------------------------------------------------------
ENCODINGS = Registry("encoding", "lg.list_encodings()", ["longitude.positions"])
register = ENCODINGS.register


def list_encodings() -> list[str]:
    """The names of all registered encodings."""
    return list(ENCODINGS)


encodings = list_encodings  # its first name, which is kept


def encoding(name: str, **options: Any) -> Encoding:
    """Build a registered encoding by name: lg.encoding("alibi", num_heads=8)."""
    return ENCODINGS[name](**resolved(name, options))


def resolved(name: str, options: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """Every option of an encoding written out: from `options`, from what is `known` of the model, or its default."""
    return resolve_options(name, options_of(ENCODINGS[name]), options, known, "lg.encoding")


# ---- positions -------------------------------------------------------------------------------------------------------
def explicit(positions: Positions, length: int, device: torch.device | None = None) -> Tensor:
    """Positions as a tensor: an int p becomes p, p+1, ... [length]; a tensor stays."""
    if isinstance(positions, int):
        return torch.arange(positions, positions + length, device=device)
    return positions


def canonical(name: str, positions: Positions, batch: int, length: int, axes: int = 1) -> Positions:
    """Positions as the house passes them on: an int, [L], [B, L]; or with several axes [B | 1, L, axes | 1], so that a
    dimension is never mistaken for another. ValueError for any other shape, for no integers, and for negative ones.
    """
    if isinstance(positions, bool) or not isinstance(positions, int | Tensor):
        raise ValueError(
            f"{name}: expected integers of 0 or more, as a tensor or one int to count from, got {positions!r}"
        )
    if isinstance(positions, int):
        if positions < 0:
            raise ValueError(f"{name}: expected integers of 0 or more, got {positions}")
        return positions
    shape = tuple(positions.shape)
    if axes > 1 and shape == (length, axes) == (batch, length):
        raise ValueError(
            f"{name}: {list(shape)} may mean [B, L] or [L, axes] here; say [{batch}, {length}, 1] or [1, {length}, {axes}]"
        )
    if axes > 1 and shape == (length, axes):
        positions = positions[None]
    elif axes > 1 and shape in ((batch, length), (1, length)):
        positions = positions[..., None]
    elif shape not in ((length,), (batch, length), (1, length)) and not (
        axes > 1 and len(shape) == 3 and shape[0] in (1, batch) and shape[1] == length and shape[2] in (1, axes)
    ):
        with_axes = f", or with axes [{length}, {axes}] or [{batch}, {length}, {axes}]" if axes > 1 else ""
        raise ValueError(f"{name}: expected [{length}] or [{batch}, {length}]{with_axes}, got {list(shape)}")
    require_positions(positions, who=name)
    return positions[0] if positions.dim() == 2 and positions.shape[0] == 1 else positions


def require_positions(positions: Tensor, max_length: int | None = None, who: str = "positions") -> None:
    """Integers, none negative, none beyond a table.

    Values raise a ValueError in eager mode on the CPU; under torch.compile and on accelerators, where looking would stop
    the machine, they become an asynchronous assertion.
    """
    if positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{who}: expected integer positions (int64), got {positions.dtype}; scale angles, not positions"
        )
    fine = positions >= 0 if max_length is None else (positions >= 0) & (positions < max_length)
    bound = f"expected positions 0 .. {max_length - 1}" if max_length else "expected positions of 0 or more"
    if torch.compiler.is_compiling() or positions.device.type != "cpu":
        torch._assert_async(fine.all(), f"{who}: {bound}")  # pyright: ignore[reportPrivateImportUsage]
    elif not bool(fine.all()):
        raise ValueError(f"{who}: {bound}, got {int(positions.min())} .. {int(positions.max())}")


def wide(device: torch.device) -> torch.dtype:
    """float64 where the device has it, else float32: the dtype of angles, slopes and fixed biases."""
    return torch.float32 if device.type == "mps" else torch.float64


def check_positive(who: str, **numbers: float) -> None:
    """ValueError unless every number is above zero."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ValueError(f"{who}: expected {name} above 0, got {number!r}")


def check_flags(who: str, **given: bool) -> None:
    """ValueError unless every one is True or False: any other text would count as True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{who}: expected {name} to be True or False, got {value!r}")


def check_sizes(who: str, **numbers: int) -> None:
    """ValueError unless every number is an int above zero."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{who}: expected {name} to be an int of 1 or more, got {number!r}")
