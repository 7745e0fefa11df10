"""A layer of a Transformers model with our encoding: positions, tables and columns, passed to its attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from longitude.attention.cache import LongitudeCacheLayer
from longitude.attention.documents import places_in
from longitude.attention.length_dependent import later, newest, parted, require_same_past
from longitude.attention.masks import Mask, require_causal
from longitude.attention.operation import raw_request, run, run_parts
from longitude.errors import UsageError
from longitude.hf.masks import StockMask, dense_mask, with_packed
from longitude.models.stock_caches import adopt
from longitude.positions.base import Columns, Encoding
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, explicit

CALL = "longitude_call"
"""The argument by which a layer's call reaches its attention."""
ENCODING = "longitude_encoding"


def encoding_of(attention: nn.Module) -> Composed | None:
    """The encoding that set_positions gave a layer's attention."""
    return attention.__dict__.get(ENCODING)


def attach(attention: nn.Module, encoding: Composed) -> None:
    """Give a layer's attention an encoding, instead of one it may have."""
    if encoding_of(attention) is None:
        attention.register_forward_pre_hook(before, with_kwargs=True)
    attention.__dict__[ENCODING] = encoding  # not as a module: the model has its parameters, once


@dataclass(eq=False)
class PositionEmbeddings:
    """Position embeddings that a model passes to its layers: (cos, sin) of the identity rotation, with positions and tables.

    No tuple, though layers unpack it: hooks of DeepSpeed and accelerate make every tuple again, from its members alone.

    cos_sin: each [1, 1, 1]. positions: those of the call's tokens. tables: those of each encoding for these positions.
    """

    cos_sin: tuple[Tensor, Tensor]
    positions: Positions
    tables: dict[Encoding, Any]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.cos_sin)

    def to(self, device: torch.device | str | int, **how: Any) -> PositionEmbeddings:
        """A copy on a device: accelerate calls it where a model's layers are on several."""
        parts = tree_map_only(
            Tensor, partial(Tensor.to, device=device, **how), (self.cos_sin, self.positions, self.tables)
        )
        return PositionEmbeddings(*parts)


@dataclass
class LayerCall:
    """Positions, tables and columns of a call's tokens; k_positions and columns are those of all keys after a cache update."""

    encoding: Composed
    positions: Positions
    k_positions: Positions
    tables: tuple[Any, ...] | None
    columns: Columns
    carry: Any
    cached: bool = False

    def keys(self, key: Tensor) -> Tensor:
        """Keys as a cache stores them: transformed if a transformed key stays valid."""
        return self.encoding.keys(key, self.tables) if self.tables is not None else key

    def values(self, value: Tensor) -> Tensor:
        return self.encoding.transform_values(value, self.tables) if self.tables is not None else value

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float | None,
        dropout: float,
        weights: bool,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from projected q [B, H, L, D] to all k, v [B, Hkv, Lk, D]: [B, H, L, D], and the weights if requested.

        sinks: sinks of the model, logits [H]. softcap: cap of its products.
        """
        dtype, head_dim = q.dtype, q.shape[3]
        if self.tables is not None:
            if self.cached:  # its keys are the cache's
                q = self.encoding.queries(q, self.tables)
            else:
                q, k = self.encoding.queries_and_keys(q, k, self.tables)
                v = self.values(v)
        q, v = q.to(k.dtype), v.to(k.dtype)  # a cache may store keys in a wider dtype
        # The encoding's softmax_factor is not applied: a model that needs it has it in its own scale.
        scale = head_dim**-0.5 if scale is None else scale
        require_causal(self.encoding.causal_only, mask)
        places = self.positions, self.k_positions
        r = raw_request(
            q, k, v, self.encoding, self.columns, mask, *places, scale, dropout, weights, sinks=sinks,
            transformed_by=q.shape[3] // head_dim, softcap=softcap,
        )  # fmt: skip
        if self.encoding.stable_keys:
            out, weights_ = run(r)
            out = out if self.tables is None else self.encoding.restore_outputs(out, self.tables)
        else:
            out, weights_ = run_parts(parted(r, self.encoding, *places))
        return out.to(dtype), weights_


class StockCacheLayer(LongitudeCacheLayer):
    """Our cache layer in an unmodified model, which only calls `update`; `before` first sets `arriving` for the encoding."""

    arriving: LayerCall | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        call, self.arriving = self.arriving, None
        if call is None:  # from `extend`
            return super().update(key_states, value_states, *args, **kwargs)
        k, v, call.columns = self.extend(
            call.keys(key_states), call.values(value_states), call.positions, call.columns, call.carry, call.encoding
        )
        call.k_positions, call.cached = self.positions, True
        return k, v


def before(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a layer's attention: it adds a LayerCall, made from the arguments, for the attention function."""
    encoding = encoding_of(attention)
    assert encoding is not None
    x = args[0] if args else kwargs["hidden_states"]
    embeddings, mask = kwargs.get("position_embeddings"), kwargs.get("attention_mask")
    if (backend := attention.config._attn_implementation) != "longitude":
        raise ValueError(
            f"set_positions: the encoding needs attn_implementation='longitude', and the model was set to {backend!r}"
        )
    if not isinstance(embeddings, PositionEmbeddings):
        raise ValueError(
            f"set_positions: {type(attention).__name__} is not called with the model's position embeddings"
        )
    cache = kwargs.get("layer_past", kwargs.get("cache"))
    layer: Any = None if cache is None else adopted(cache, attention.config).layers[attention.layer_idx]
    past = 0 if layer is None else layer.get_seq_length()
    if not isinstance(mask, StockMask):
        mask = dense_mask(mask, len(x), x.shape[1], past + x.shape[1])
        kwargs = {**kwargs, "attention_mask": mask}
        if encoding.reads_tokens:
            raise ValueError(
                "attention_mask: the encoding reads the tokens too, and a mask [B, 1, L, keys] does not tell documents and "
                "padding; expected attention_mask [B, tokens] of 0 and 1, and position_ids that start over"
            )
    if past + x.shape[1] != mask.keys:
        raise UsageError("attention_mask", f"{past + x.shape[1]} tokens, cached ones included", mask.keys)
    if layer is not None and past and not encoding.stable_keys:
        now = later(newest(layer.positions, past), newest(embeddings.positions, x.shape[1]))
        require_same_past(encoding, layer.max_position, now)
    packed = with_packed(mask, kwargs, len(x), x.shape[1])
    positions = embeddings.positions
    if packed is not mask:  # positions continued from document to document
        assert packed.streams is not None
        positions = explicit(positions, x.shape[1], x.device).expand(len(x), -1)
        starts = torch.arange(x.shape[1], device=x.device) - places_in(packed.streams)
        positions = positions - positions.gather(1, starts)
        kwargs, mask = {**kwargs, "attention_mask": packed}, packed
    new_streams = None if mask.streams is None else mask.streams[:, past:]
    columns, carry = encoding(partial(encoding.context, x, None if layer is None else layer.carry, new_streams))
    tables = None
    if encoding.stable_keys and not encoding.learns_frequencies:
        tables = tuple(embeddings.tables[member] for member in encoding)
    elif encoding.stable_keys:
        place = embeddings.positions, x.shape[1], x.device
        center = encoding.center(*place) if layer is None else layer.center_of(encoding, *place)
        tables = encoding(partial(encoding.prepare, explicit(*place), None, x.dtype, center=center))
    call = LayerCall(encoding, positions, positions, tables, columns, carry)
    if layer is not None:
        layer.arriving = call
    return args, {**kwargs, CALL: call}


def adopted(cache: Any, config: Any) -> Any:
    """The cache with our layers. ValueError for one that offloads: its layers would be read before they are fetched."""
    if cache.offloading:
        raise UsageError(
            "cache", "one in the memory of its device", "one that offloads", "leave cache_implementation out"
        )
    return adopt(cache, [StockCacheLayer] * config.num_hidden_layers, "arriving")
