"""Checked arguments of an attention layer's call, shared by all layers of a forward that get equal arguments."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.attention.documents import padding_of, require_number_per_token, require_tokens, runs_of
from longitude.attention.length_dependent import later, newest, parted, require_same_past
from longitude.attention.masks import AllOf, Documents, Mask, Padding, is_causal, require_causal, require_mask
from longitude.attention.mixer import MixerInputs
from longitude.attention.operation import Backend, answer, choose_once, raw_request, run_parts
from longitude.attention.request import AllowedPairs, Request
from longitude.attention.sequence_slice import SequenceSlice, slice_of
from longitude.errors import UsageError
from longitude.positions.base import Columns
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, canonical, following, part_of


class Chosen(NamedTuple):
    """Backend that the first layer of a forward chose, reused by all layers with an equal request.

    first: the first layer's request without q, k and v, if the requests of other layers differ only in these.
    """

    backend: Backend
    first: Request | None
    k_positions: Positions


@dataclass(frozen=True)
class Call:
    """Checked arguments of `Mixer.forward`, with defaults filled in.

    Attributes:
        mask: The mask, with documents and padding joined.
        positions, q_positions: Positions of x, and of its queries.
        past: Tokens in the cache.
        length: Tokens of x, memory included.
        remembered: Tokens at the start of x that are memory and have no queries.
        documents: Document numbers of x [B, L].
        padding: Padding of x [B, L, 1]; None: no padding.
        kept: Whether layers share results; False in a compiler, because of its symbolic lengths.
        alike: Whether the requests of layers differ only in q, k and v. Without gradients the first layer's then serves all.
    """

    mask: Mask
    positions: Positions
    q_positions: Positions
    past: int
    length: int
    remembered: int
    documents: Tensor | None
    padding: Tensor | None
    kept: bool
    alike: bool
    found: dict[tuple[int, int, int], AllowedPairs] = field(default_factory=dict)
    chosen: dict[Hashable, Chosen] = field(default_factory=dict)

    @property
    def keys(self) -> int:
        """Tokens in the cache, and those of x."""
        return self.past + self.length

    def pairs(self, batch: int, rows: int, keys: int) -> AllowedPairs:
        """Pairs that the mask allows between the last `rows` tokens and `keys` keys, fewer than all if a cache dropped some."""
        which = batch, rows, keys
        if self.kept and which in self.found:
            return self.found[which]
        mask = self.mask if keys == self.keys else self.mask.since(self.keys - keys)
        pairs = AllowedPairs(mask, batch, rows, keys, keys - rows)
        if self.kept:
            self.found[which] = pairs
        return pairs


def checked_call(x: Tensor, dim: int, encoding: Composed, mask: Mask, inputs: MixerInputs) -> tuple[Tensor, Call]:
    """Tokens that get keys, those of a memory included, and the checked call.

    ValueError for invalid arguments, before the cache changes.
    mask: the mask of the inputs, with the layer's part joined.
    """
    cache, memory, remembered = inputs.cache, inputs.memory, 0
    if memory is not None:
        require_tokens(x, dim)
        if cache is not None or memory.dim() != 3 or memory.shape[::2] != x.shape[::2]:
            with_cache = " and a cache; a cache already holds earlier tokens" if cache is not None else ""
            raise UsageError(
                "memory", f"[{x.shape[0]}, M, {x.shape[2]}] and no cache", f"{list(memory.shape)}{with_cache}"
            )
        x, remembered = torch.cat([memory.detach(), x], 1), memory.shape[1]
    past = cache.get_seq_length() if cache is not None else 0
    if cache is not None and past and cache.keys is not None and cache.keys.shape[0] != x.shape[0]:
        raise UsageError("x", f"a batch of {len(cache.keys)}, as the cache holds", len(x))
    call: Call = inputs.once(
        ("call", encoding, mask, past, dim, x.shape), lambda: _checked(x, dim, encoding, mask, inputs, past, remembered)
    )
    if call.padding is not None:  # zeros, whatever it held
        x = torch.where(call.padding, 0.0, x)
    if cache is not None and past and not encoding.stable_keys:
        now = later(newest(cache.positions, cache.held), newest(call.positions, call.length))
        require_same_past(encoding, cache.max_position, now)
    return x, call


def _checked(
    x: Tensor, dim: int, encoding: Composed, mask: Mask, inputs: MixerInputs, past: int, remembered: int
) -> Call:
    """Validate the arguments of a call and build the `Call` that layers of a forward share."""
    require_tokens(x, dim)
    batch, length = x.shape[:2]
    keys, documents, positions = past + length, inputs.documents, inputs.positions
    require_mask(mask)
    share = slice_of(mask) if isinstance(mask, AllOf | SequenceSlice) else None
    if documents is None and encoding.reads_tokens and any(isinstance(m, Documents | Padding) for m in mask.parts()):
        raise ValueError("mask: the encoding reads the tokens too; pass documents and padding as documents= instead")
    if documents is not None:
        require_number_per_token(documents, batch, keys)
        documents = runs_of(documents)
        mask = mask & Documents(documents) & Padding(documents >= 0)
    if share is not None and (documents is not None or inputs.cache is not None or remembered):
        raise ValueError("mask: a SequenceSlice takes no cache and no memory, and its documents= are the slice's own")
    if positions is None and share is not None:
        positions = share.own_positions(x.device)
    if positions is None:
        positions = inputs.cache.next_positions() if inputs.cache is not None else 0
        if isinstance(positions, Tensor):
            positions = following(positions, length)
    else:
        # A model passes positions with axes to all its layers, those of one axis included.
        axes = encoding.axes
        if isinstance(positions, Tensor) and positions.dim() == 3:
            axes = max(2, positions.shape[-1])
        positions = canonical("positions", positions, batch, length, axes)
    mask.validate(batch, length - remembered, keys)
    require_causal(encoding.causal_only, mask)
    if past:
        mask.require_past(past)
    q_positions = part_of(positions, slice(None), slice(remembered, None)) if remembered else positions
    own = None if documents is None else documents[:, past:]
    kept = not torch.compiler.is_compiling()
    alike = kept and encoding.stable_keys and not encoding.reads_tokens and not torch.is_autocast_enabled(x.device.type)
    padding = None if documents is None else padding_of(documents, length)
    return Call(mask, positions, q_positions, past, length, remembered, own, padding, kept, alike)


def require_past(who: str, mask: Mask) -> None:
    """ValueError unless the mask leaves no key after the query."""
    require_mask(mask)
    if not is_causal(mask):
        raise UsageError(
            f"mask: {who} attends to the past only",
            "Causal() with what else is joined to it by &",
            type(mask).__name__,
            "MultiHeadAttention takes any mask, lg.Band(before, after) among them",
        )


def attended(
    layer: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    call: Call,
    encoding: Any,
    columns: Columns,
    k_positions: Positions,
    scale: float | None,
    weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend from a layer's queries to the keys of cache and call: [B, H, L, Dv], and the weights if requested."""
    q, k, v = qkv
    name, grad, dropout = layer.backend, torch.is_grad_enabled(), layer.dropout if layer.training else 0.0
    key, known = None, None
    if call.kept:
        # Tensors of positions are the same where they are one object, which is kept: no other one gets its id.
        place = k_positions if isinstance(k_positions, int) else -1 - id(k_positions)
        wanted = grad and (1 + (q.requires_grad or k.requires_grad or v.requires_grad))
        key = name, encoding, scale, dropout, weights, wanted, place, q.dtype, q.device, q.shape, k.shape, v.shape
        known = call.chosen.get(key)
    if known is not None and known.first is not None:
        return answer(known.backend, known.first.of_layer(q, k, v))[0], None
    already = encoding.widens if encoding.stable_keys else 1
    pairs, places = call.pairs(q.shape[0], q.shape[2], k.shape[2]), (call.q_positions, k_positions)
    r = raw_request(
        q, k, v, encoding, columns, pairs.mask, *places, scale, dropout, weights, pairs, transformed_by=already
    )
    if not encoding.stable_keys:
        parts = parted(r, encoding, *places)
        if len(parts) > 1 or parts[0].cuts:
            return run_parts(parts, name)
        r = parts[0].request
    shared = key is not None and known is None and call.alike and not grad and not weights
    if shared:
        r.made = {}
    backend = choose_once(r, name) if known is None else known.backend
    if key is not None and known is None:
        first = r.of_layer(None, None, None) if shared else None
        call.chosen[key] = Chosen(backend, first, k_positions)
    return answer(backend, r)
