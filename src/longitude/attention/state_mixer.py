"""Base class of recurrent mixers: a forward that checks its arguments and carries a state instead of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.attention.documents import begins_of, require_number_per_token, require_tokens
from longitude.attention.mixer import Mixer, MixerInputs, require_cache, require_no_weights, require_plain
from longitude.native.derivatives import readable
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import Positions, canonical, explicit, following

if TYPE_CHECKING:
    from longitude.attention.cache import StateLayer

NO_ENCODING = compose(None)
"""Built once, because every call of a mixer without an encoding reads it."""


class StateInputs(NamedTuple):
    """The arguments of one call besides x and the state.

    reset: True for tokens that begin a document; valid: False for padding. Each is None if there are no such tokens.
    positions: [L] or [B, L], with axes [B, L, axes]. tables: encoding.prepare of them, None if it rotates nothing.
    documents: [B, Lk] as passed to forward, cached tokens included. cached: whether the state after the tokens is needed.
    """

    reset: Bool[Tensor, "B L"] | None
    valid: Bool[Tensor, "B L"] | None
    positions: Int[Tensor, ...]
    encoding: Composed
    tables: Any
    documents: Int[Tensor, "B Lk"] | None
    cached: bool


class StateMixer(Mixer):
    """Recurrent mixer. Subclasses implement `mix`; a subclass with an attribute `encoding` applies it by default."""

    dim: int

    def mix(self, x: Float[Tensor, "B L dim"], state: Any, inputs: StateInputs) -> tuple[Tensor, Any]:
        """Return the output [B, L, dim] and the state after the tokens.

        state: the state after the previous tokens, None at the beginning: tensors, batch first, float32 or wider.
        """
        raise NotImplementedError

    def cache_layer(self) -> StateLayer:
        """An empty StateLayer, for transformers' Cache(layers=[...])."""
        from longitude.attention.cache import StateLayer

        return StateLayer()

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Tensor:
        """Mix tokens as Mixer.forward does, through `mix`; a cache keeps the state after this call's tokens."""
        name, cache, encoding = type(self).__name__, inputs.cache, inputs.encoding
        require_tokens(x, self.dim)
        require_no_weights(self, inputs.return_weights)
        require_plain(self, inputs.mask, "mixes each token with all before it in its document")
        require_cache(self, cache, ("state",))
        if encoding is None:
            encoding = getattr(self, "encoding", NO_ENCODING)
        else:
            self.require(encoding)
        past = 0 if cache is None else cache.seen
        batch, length, _ = x.shape
        positions = inputs.positions
        if positions is None:
            positions = 0 if cache is None else cache.next_positions()
            positions = following(positions, length) if isinstance(positions, Tensor) else positions
        reads = inputs.documents, positions, past, batch, length, x.device
        reset, valid, positions, every = inputs.step.once(_flags_and_positions, *reads)
        tables = inputs.tables
        if encoding.transforms and tables is None:
            tables = encoding.prepare(every, None, x.dtype)
        x = x if valid is None else torch.where(valid[..., None], x, 0.0)
        state = None if cache is None else cache.read(name)
        state_inputs = StateInputs(reset, valid, every, encoding, tables, inputs.documents, cache is not None)
        out, state = self.mix(x, state, state_inputs)
        if cache is not None:
            # Default positions count padding, too.
            cache.write(name, state, length, positions, None if inputs.positions is None else inputs.documents)
        return out


def _flags_and_positions(
    documents: Tensor | None, positions: Positions, past: int, batch: int, length: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Positions, Tensor]:
    """Reset, valid, and positions as a cache gets them and as a tensor: the same for all layers of a forward."""
    reset, valid = None, None
    if documents is not None:
        require_number_per_token(documents, batch, past + length)
        reset, valid = document_flags(documents, past)
    axes = max(2, positions.shape[-1]) if isinstance(positions, Tensor) and positions.dim() == 3 else 1
    positions = canonical("positions", positions, batch, length, axes)
    return reset, valid, positions, explicit(positions, length, device)


def document_flags(documents: Int[Tensor, "B Lk"], past: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """Reset and valid of the tokens from `past` on, [B, L] each; None if no token begins a document, or none is padding."""
    reset, valid = begins_of(documents)[:, past:], documents[:, past:] >= 0
    if not readable(documents):
        return reset, valid
    return reset if bool(reset.any()) else None, None if bool(valid.all()) else valid
