"""The decoder: pre-norm layers over attend(), with one encoding for all layers or one for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from longitude.attention.cache import LongitudeCache, LongitudeCacheLayer, adopt
from longitude.attention.layers import MultiHeadAttention
from longitude.attention.request import as_int, following
from longitude.models.configuration import LongitudeConfig
from longitude.positions.base import Encoding, Positions, canonical, encoding, explicit
from longitude.positions.composed import Composed, of_axes

logger = logging.get_logger(__name__)


class MLP(nn.Module):
    """down(silu(gate x) * up x) for "swiglu", down(gelu(up x)) for "gelu"."""

    def __init__(self, config: LongitudeConfig):
        super().__init__()
        wide = config.intermediate_size
        assert wide is not None
        self.gate = nn.Linear(config.hidden_size, wide, bias=False) if config.hidden_act == "swiglu" else None
        self.up = nn.Linear(config.hidden_size, wide, bias=False)
        self.down = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LongitudeConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = MultiHeadAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            dropout=config.attention_dropout,
            scale=config.attention_scale,
            backend=config.attention_backend,
        )
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = config.hidden_dropout

    def forward(
        self,
        x: Tensor,
        encoding: Encoding,
        tables: Any,
        positions: Positions,
        documents: Tensor | None,
        cache: LongitudeCacheLayer | None,
        memory: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        mixed = self.attention(
            self.attention_norm(x),
            positions=positions,
            documents=documents,
            cache=cache,
            memory=None if memory is None else self.attention_norm(memory),
            encoding=encoding,
            tables=tables,
            return_weights=return_weights,
        )
        mixed, weights = mixed if return_weights else (mixed, None)
        x = x + self.dropped(mixed)
        return x + self.dropped(self.mlp(self.mlp_norm(x))), weights

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


class LongitudePreTrainedModel(PreTrainedModel):
    config_class = LongitudeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Linear layers and embeddings N(0, 1/width of the input), or initializer_range; encodings as they say."""
        if isinstance(module, nn.Linear):
            std = self.config.initializer_range or module.in_features**-0.5
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range or module.embedding_dim**-0.5)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Encoding):
            module.reset_parameters()


class LongitudeModel(LongitudePreTrainedModel):
    """Tokens [B, L] -> hidden states [B, L, hidden_size]."""

    embed_tokens: nn.Embedding
    encoding_of_layer: tuple[Composed, ...]

    def __init__(self, config: LongitudeConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False

        # Encodings live here, one module for all layers where they are shared, and layers are handed theirs.
        members: list[Encoding] = []
        shared: dict[str, Encoding] = {}
        of_layer: list[Composed] = []
        for specs in config.layer_specs():
            own = []
            for spec in specs:
                key = json.dumps(spec, sort_keys=True)
                member = shared[key] if key in shared else encoding(**spec)
                if key not in shared:
                    members.append(member)
                if member.shared:
                    shared[key] = member
                own.append(member)
            of_layer.append(Composed(own))
        self.encodings = nn.ModuleList(members)
        self.encoding_of_layer = tuple(of_layer)  # a tuple, so that nothing is registered twice
        self.axes = max(composed.axes for composed in of_layer)
        if any(one.at_input and one not in set(of_layer[0]) for member in members for one in Composed([member])):
            raise ValueError("encodings: one that acts on the model's input must stand in the first layer")
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        memories: Sequence[Tensor] | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """memories: for each layer its input at an earlier segment [B, M, hidden_size], as output_hidden_states gives them;
        masks and documents then cover both segments."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        x = inputs_embeds * self.config.embedding_scale
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and memories is None
        if self.gradient_checkpointing and self.training and (use_cache or past_key_values is not None):
            logger.warning_once("gradient checkpointing makes layers twice, so this call goes without a cache")
            use_cache, past_key_values = False, None
        cache = None
        if past_key_values is not None:
            cache = adopt(past_key_values, len(self.layers))
        elif use_cache:
            cache = LongitudeCache(len(self.layers))
        past = cache.get_seq_length() if cache is not None else 0
        if memories is not None:
            past = self.require_memories(memories, cache, position_ids)
        streams = streams_of(attention_mask, document_ids, x.shape[0], past + x.shape[1], x.device)
        remembered = 0 if memories is None else past
        positions = as_int(self.positions_of(position_ids, streams, cache, x.shape[0], remembered + x.shape[1]))

        places = explicit(positions, remembered + x.shape[1], x.device)
        length, own = x.shape[1], places[remembered:] if places.dim() == 1 else places[:, remembered:]
        x = self.encoding_of_layer[0].embed(x, own)
        if x.shape[1] != length:
            raise ValueError(
                f"the encoding cuts {length} tokens to {x.shape[1]}; cut input_ids, masks and labels first, with its truncate()"
            )
        distinct = {member for composed in self.encoding_of_layer for member in composed}
        tables = {m: m.prepare(of_axes(m, places), None, x.dtype) for m in distinct if m.stable_keys}
        hidden_states, attentions = [x], []
        for i, layer in enumerate(self.layers):
            own = self.encoding_of_layer[i]
            x, weights = layer(
                x,
                own,
                tuple(tables[member] for member in own) if own.stable_keys else None,
                positions,
                streams,
                None if cache is None else cache.layers[i],
                None if memories is None else memories[i],
                bool(output_attentions),
            )
            hidden_states.append(x)
            attentions.append(weights)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=(*hidden_states[:-1], x) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )

    def require_memories(self, memories: Sequence[Tensor], cache: Cache | None, position_ids: Tensor | None) -> int:
        """The length of what is remembered."""
        if len(memories) < len(self.layers):
            raise ValueError(f"memories: expected {len(self.layers)}, one for each layer, got {len(memories)}")
        if cache is not None or position_ids is not None:
            raise ValueError("memories: expected neither a cache nor position_ids beside them; say use_cache=False")
        return memories[0].shape[1]

    def positions_of(
        self, position_ids: Tensor | None, streams: Tensor | None, cache: Cache | None, batch: int, length: int
    ) -> Positions:
        """Positions of the new tokens: as said, else each token's place in its own document, padding not counted."""
        if position_ids is not None:
            if self.axes > 1 and tuple(position_ids.shape) == (batch, length):  # one number for all axes
                position_ids = position_ids[..., None]
            return canonical("position_ids", position_ids, batch, length, self.axes)
        first = None if cache is None else cache.layers[0]
        assert isinstance(first, LongitudeCacheLayer | None)
        if streams is not None:
            cached = None if first is None else first.positions
            places = places_after(streams, cached if isinstance(cached, Tensor) else None)[:, -length:]
            return places[..., None] if self.axes > 1 else places
        onward = 0 if first is None else first.next_positions()
        return onward if isinstance(onward, int) else following(onward, length)


def streams_of(
    attention_mask: Tensor | None, document_ids: Tensor | None, batch: int, keys: int, device: torch.device
) -> Tensor | None:
    """Which stream each token belongs to, cached ones included, [B, Lk]: its document, or -1 for padding. None: all one."""
    for name, given in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if given is not None and given.shape != (batch, keys):
            raise ValueError(
                f"{name}: expected [{batch}, {keys}], one per token, cached ones included, got {list(given.shape)}"
            )
    # A mask of ones is no mask. Looking would break a compiled graph, so there it stays.
    if attention_mask is not None and not torch.compiler.is_compiling() and bool(attention_mask.all()):
        attention_mask = None
    if document_ids is not None and not torch.compiler.is_compiling() and bool((document_ids < 0).any()):
        raise ValueError("document_ids: expected numbers of 0 or more; say padding in attention_mask")
    if attention_mask is None:
        return document_ids
    if attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask: expected 1 for tokens and 0 for padding, of int or bool, got {attention_mask.dtype}"
        )
    streams = torch.zeros(batch, keys, dtype=torch.long, device=device) if document_ids is None else document_ids
    streams = streams.masked_fill(attention_mask == 0, -1)
    if not torch.compiler.is_compiling():
        require_runs(streams)
    return streams


def require_runs(streams: Tensor) -> None:
    """ValueError where padding stands between two tokens of one stream: places and contexts have no meaning across it."""
    real, order = streams >= 0, torch.arange(streams.shape[1], device=streams.device).expand_as(streams)
    before = torch.where(real, order, -1).cummax(1).values[:, :-1]  # the nearest token before each
    goes_on = (before >= 0) & (streams.gather(1, before.clamp(min=0)) == streams[:, 1:])
    if bool((real[:, 1:] & ~real[:, :-1] & goes_on).any()):
        raise ValueError(
            "attention_mask: padding stands between tokens of one sequence; expected it at one side, "
            "on the left where a cache goes on"
        )


def places_in(streams: Tensor) -> Tensor:
    """Each token's place in its own run of streams [B, L] -> [B, L]; 0 for padding."""
    order = torch.arange(streams.shape[1], device=streams.device).expand_as(streams)
    return (order - starts_of(streams)).masked_fill(streams < 0, 0)


def starts_of(streams: Tensor) -> Tensor:
    """Where each token's own run of streams [B, L] begins -> [B, L]."""
    order = torch.arange(streams.shape[1], device=streams.device).expand_as(streams)
    first = torch.ones_like(streams, dtype=torch.bool)
    first[:, 1:] = streams[:, 1:] != streams[:, :-1]
    return torch.where(first, order, 0).cummax(1).values


def places_after(streams: Tensor, cached: Tensor | None) -> Tensor:
    """`places_in`, but for the run that cached positions [past], [B, past] or [B, past, axes] end in: what follows stands
    behind the largest of them, whatever they were said to be, images among them."""
    places = places_in(streams)
    if cached is None:
        return places
    cached = cached[None, :, None] if cached.dim() == 1 else cached[..., None] if cached.dim() == 2 else cached
    starts, past = starts_of(streams), cached.shape[1]
    last = starts[:, past - 1, None]
    largest = cached.amax(-1).expand(len(streams), -1).masked_fill(starts[:, :past] != last, -1).amax(1, keepdim=True)
    return places + (largest - places[:, past - 1, None]).where(starts == last, 0)
