"""What all recurrences share: their contract as functions, and their place in a model as layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.attention.documents import begins_of
from longitude.attention.masks import Causal, require_mask
from longitude.attention.mixer import Mixer, MixerInputs, require_no_weights
from longitude.attention.request import following
from longitude.errors import unknown
from longitude.positions.base import Encoding, canonical, explicit
from longitude.positions.composed import compose

if TYPE_CHECKING:
    from longitude.attention.state_cache import StateLayer

MODES = ("parallel", "chunked", "recurrent")
"""Three ways to the same numbers: all pairs or a convolution at once, pieces of chunk_size with a state between them, one token
after the other."""


def require_mode(who: str, mode: str, chunk_size: int) -> None:
    """ValueError for a mode nobody knows, or a chunk of no token."""
    if mode not in MODES:
        raise unknown("mode", mode, MODES, f"{who} gives the same numbers in each.")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"{who}: expected chunk_size of 1 or more tokens, got {chunk_size!r}")


def require_tokens(who: str, **named: tuple[Tensor | None, str]) -> None:
    """ValueError unless each is None or a tensor of floats with the named dimensions, none empty and the same name the same
    size.
    """
    given = {name: (x, dims.split()) for name, (x, dims) in named.items() if x is not None}
    sizes: dict[str, int] = {}
    fine = True
    for x, dims in given.values():
        fine = fine and isinstance(x, Tensor) and x.is_floating_point() and x.dim() == len(dims) and x.numel() > 0
        fine = fine and all(sizes.setdefault(dim, size) == size for dim, size in zip(dims, x.shape, strict=True))
    if not fine:
        wanted = ", ".join(f"{name} [{', '.join(dims)}]" for name, (_, dims) in given.items())
        got = ", ".join(
            f"{name} {list(x.shape)}{'' if x.is_floating_point() else f' of {x.dtype}'}"
            if isinstance(x, Tensor)
            else f"{name} {x!r}"
            for name, (x, _) in given.items()
        )
        raise ValueError(f"{who}: expected floats {wanted}, none empty, got {got}")


def require_flags(who: str, batch: int, length: int, **flags: Tensor | None) -> None:
    """ValueError unless each is None or a bool tensor [B, L]."""
    for name, flag in flags.items():
        if flag is not None and (flag.dtype != torch.bool or flag.shape != (batch, length)):
            raise ValueError(f"{name}: {who} expected bool [{batch}, {length}], got {flag.dtype} {list(flag.shape)}")


def require_state(who: str, state: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """ValueError unless it is None, or a tensor, or a tuple of tensors, of these shapes, by name."""
    if state is None:
        return
    given = (state,) if isinstance(state, Tensor) else state
    if not isinstance(given, tuple) or [x.shape if isinstance(x, Tensor) else None for x in given] != list(
        shapes.values()
    ):
        wanted = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        got = (
            [list(x.shape) if isinstance(x, Tensor) else repr(x) for x in given]
            if isinstance(given, tuple)
            else repr(given)
        )
        raise ValueError(
            f"state: {who} expected {wanted}, got {got}; pass what an earlier call of it returned, or None"
        )


def state_dtype(x: Tensor) -> torch.dtype:
    """States are float32, or float64 where the tokens are."""
    return torch.promote_types(x.dtype, torch.float32)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), x itself above 20 as torch has it. While compiling, in operators of which torch knows how gradients lie in
    memory: of its own, whose gradient takes the layout of what comes in, it assumes another (torch 2.13).
    """
    if torch.compiler.is_compiling():
        return torch.where(x > 20, x, x.clamp(max=20).exp().log1p())
    return torch.nn.functional.softplus(x)


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Initial values; but not over what a checkpoint has filled: transformers marks that, and torch.nn.init heeds it there."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(values)


class RecurrentMixer(Mixer):
    """A mixer whose past is a state of constant size. A class says what one call makes of its tokens, `mix`."""

    growth = "O(1)"

    def mix(
        self,
        x: Float[Tensor, "B L dim"],
        state: Any,
        reset: Bool[Tensor, "B L"] | None,
        valid: Bool[Tensor, "B L"] | None,
        positions: Tensor,
        encoding: Encoding,
        tables: Any,
    ) -> tuple[Tensor, Any]:
        """-> [B, L, dim] and the state after the tokens: a tuple of tensors with the batch in front, float32 or wider.

        state: of the tokens before, None at the beginning. reset: tokens that begin a document and hear nothing before it;
        valid: False for padding, which must leave the state as it is; None where there is neither. positions: [L] or [B, L].
        encoding, tables: for mixers that rotate.
        """
        raise NotImplementedError

    def cache_layer(self) -> StateLayer:
        from longitude.attention.state_cache import StateLayer

        return StateLayer()

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Tensor:
        """As Mixer.forward, through `mix`; a cache keeps the state after this call's tokens."""
        mask, positions, documents, cache = inputs.mask, inputs.positions, inputs.documents, inputs.cache
        dim: int = self.dim  # type: ignore[assignment]  (every one has it)
        if x.dim() != 3 or x.shape[-1] != dim or x.numel() == 0:
            raise ValueError(f"x: expected [B, L, {dim}] with no empty dimension, got {list(x.shape)}")
        require_no_weights(self, inputs.return_weights, inputs.memory)
        require_mask(mask)
        if not (isinstance(mask, Causal) and mask.order is None):
            raise ValueError(
                f"mask: {type(self).__name__} hears what came before in order, and nothing else: expected lg.Causal(), with "
                f"documents and padding as documents=, got {mask!r}"
            )
        encoding, tables = compose(inputs.encoding), inputs.tables
        self.require(encoding)
        past = 0 if cache is None else self.state_layer(cache).seen
        reset = valid = None
        if documents is not None:
            if documents.shape != (x.shape[0], past + x.shape[1]):
                raise ValueError(
                    f"documents: expected {[x.shape[0], past + x.shape[1]]}, cached tokens included, got {list(documents.shape)}"
                )
            reset, valid = _flags(documents, past)
        given = documents if positions is not None else None  # positions that are not given count padding, too
        if positions is None:
            positions = 0 if cache is None else cache.next_positions()
            positions = following(positions, x.shape[1]) if isinstance(positions, Tensor) else positions
        else:
            axes = max(2, positions.shape[-1]) if isinstance(positions, Tensor) and positions.dim() == 3 else 1
            positions = canonical("positions", positions, x.shape[0], x.shape[1], axes)
        name = type(self).__name__
        places = explicit(positions, x.shape[1], x.device)
        if encoding.transforms and tables is None:
            tables = encoding.prepare(places, None, x.dtype)
        out, state = self.mix(x, None if cache is None else cache.read(name), reset, valid, places, encoding, tables)
        if cache is not None:
            cache.write(name, state, x.shape[1], positions, given)
        return out

    def state_layer(self, cache: Any) -> StateLayer:
        """The cache, if it is one that holds states; ValueError otherwise."""
        from longitude.attention.state_cache import StateLayer

        if not isinstance(cache, StateLayer):
            raise ValueError(
                f"cache: {type(self).__name__} expected the StateLayer that its cache_layer() makes, got {type(cache).__name__}"
            )
        return cache


def _flags(documents: Int[Tensor, "B Lk"], past: int) -> tuple[Tensor | None, Tensor | None]:
    """Which of the tokens from `past` on begin a document after another one, and which are no padding, [B, L] each; None
    where none does, or all are.
    """
    reset, valid = begins_of(documents)[:, past:], documents[:, past:] >= 0
    if torch.compiler.is_compiling():
        return reset, valid
    return reset if bool(reset.any()) else None, None if bool(valid.all()) else valid
