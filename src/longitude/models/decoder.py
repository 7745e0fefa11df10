"""The decoder: blocks over one stream of tokens, with one encoding for all or one for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from longitude.attention.cache import LongitudeCache
from longitude.attention.documents import in_order, places_after, streams_of, without_gaps
from longitude.attention.masks import Causal, Mask
from longitude.attention.mixer import MIXERS, Mixer, MixerInputs
from longitude.attention.request import Step
from longitude.errors import UsageError
from longitude.models.blocks import Block, norm
from longitude.models.configuration import LongitudeConfig
from longitude.models.inputs import (
    DecoderInputs,
    documents_in,
    ids_so_far,
    places_of,
    require_embeds,
    with_names,
)
from longitude.models.stock_caches import adopt, renames_cache
from longitude.positions.base import Encoding, encoding
from longitude.positions.composed import Composed
from longitude.positions.coordinates import Positions, as_int, canonical, explicit, following
from longitude.positions.linear import FullPrecision

logger = logging.get_logger(__name__)


class LongitudePreTrainedModel(PreTrainedModel):
    config_class = LongitudeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["cache"]
    written_by = "LongitudeForCausalLM"
    """Name of the model class with compatible checkpoints: the same layers under the same mask."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **named: Any) -> Any:
        """Load a checkpoint as in transformers, except those of other kinds of models, and pickle files.

        Args:
            arguments: As in transformers.
            named: As in transformers; use_safetensors is True by default.

        Returns:
            The model; with output_loading_info=True also the loading info.

        Raises:
            ValueError: If the checkpoint is of another kind of model, for example an encoder's for a decoder.
            OSError: If there is no model.safetensors.
        """
        named.setdefault("use_safetensors", True)
        loaded = super().from_pretrained(*arguments, **named)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        kinds = {kind.__name__: kind.written_by for kind in kinds_of(LongitudePreTrainedModel)}
        for name in model.config.architectures or ():
            if kinds.get(name, cls.written_by) != cls.written_by:
                raise UsageError(
                    f"from_pretrained: {cls.__name__}",
                    f"a checkpoint of {cls.written_by}",
                    f"one of {name}",
                    f"load it with lg.{kinds[name]}",
                )
        return loaded

    def also_returned(self, inputs: Any) -> tuple[bool, bool]:
        """Whether to return hidden states and attentions, from the call's arguments, else from the config."""
        states, weights = inputs.get("output_hidden_states"), inputs.get("output_attentions")
        states = self.config.output_hidden_states if states is None else states
        weights = self.config.output_attentions if weights is None else weights
        return bool(states), bool(weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Linear layers and embeddings N(0, 1/width of the input), or initializer_range; encodings by reset_parameters."""
        if isinstance(module, nn.Linear):
            std = self.config.initializer_range or module.in_features**-0.5
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range or module.embedding_dim**-0.5)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm | Encoding | Mixer):
            module.reset_parameters()


def kinds_of(kind: type[LongitudePreTrainedModel]) -> Iterator[type[LongitudePreTrainedModel]]:
    """All direct and indirect subclasses."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from kinds_of(subclass)


def built_by_layer(layers: Iterable[Sequence[dict[str, Any]]]) -> list[list[Encoding]]:
    """The encodings of each layer; layers with equal specs of a `shared` encoding have one module."""
    shared: dict[str, Encoding] = {}
    built: list[list[Encoding]] = []
    for specs in layers:
        built.append([])
        for spec in specs:
            key = json.dumps(spec, sort_keys=True)
            member = shared[key] if key in shared else encoding(**spec)
            if member.shared:
                shared[key] = member
            built[-1].append(member)
    return built


class Call(NamedTuple):
    """The arguments of one forward call, as each layer needs them.

    Attributes:
        mask: Which keys a query may attend to.
        positions: Positions of the new tokens.
        streams: Document number of each token [B, Lk], -1 for padding; None if all tokens are one document.
        cache: Filled or empty; None without one.
        order: Order of the new tokens [B, L] in the layers, if padding between them was moved in front.
        ids: Ids of all tokens [B, Lk], if an encoding reads them.
    """

    mask: Mask
    positions: Positions
    streams: Tensor | None
    cache: Any
    order: Tensor | None
    ids: Tensor | None


class Source(NamedTuple):
    """Source of cross-attention: states [B, S, D], valid [B, S], False for padding, and a cache of keys and values."""

    states: Tensor | None = None
    valid: Tensor | None = None
    cache: Any = None


class LongitudeModel(LongitudePreTrainedModel):
    """Tokens [B, L] -> hidden states [B, L, hidden_size].

    Subclasses differ in `mask`, and in whether their blocks have cross-attention, `cross`.

    Args:
        config: The model's configuration.

    Raises:
        ValueError: For an encoding that no mixer of the model supports.
    """

    mask: Mask = Causal()
    cross = False
    embed_tokens: nn.Embedding
    encoding_of_layer: tuple[Composed, ...]

    def __init__(self, config: LongitudeConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_norm = norm(config) if config.embedding_norm else None
        self.layers = nn.ModuleList(Block(config, mixer, self.cross) for mixer in config.layer_mixers())
        self.norm = norm(config) if config.norm_position != "post" else nn.Identity()
        self.embedding_scale, self.hidden_dropout = config.embedding_scale, config.hidden_dropout
        self.gradient_checkpointing = False

        # Encodings are modules of the model, not of its layers, which are passed theirs; a shared one is for all layers.
        built = built_by_layer(config.layer_specs())
        members = dict.fromkeys(member for of_layer in built for member in of_layer)
        by_layer = self.taken([Composed(of_layer) for of_layer in built])
        used = {member for composed in by_layer for member in composed}
        self.encodings = nn.ModuleList(m for m in members if used.intersection(Composed([m])))  # a preset has members
        self.share_encodings(by_layer)
        # transformers reads this attribute when it loads a model in 16 bits.
        precise = (m for m in self.modules() if isinstance(m, FullPrecision))
        self._keep_in_fp32_modules_strict = {
            name for m in precise for name in m.full_precision if name in m._parameters
        }
        self.axes = max(composed.axes for composed in by_layer)
        if any(m.at_input and m not in set(by_layer[0]) for member in members for m in Composed([member])):
            raise ValueError("encodings: one that acts on the model's input must stand in the first layer")
        two_sided = [type(m).__name__ for composed in by_layer for m in composed if m.reads_neighbors]
        if two_sided and isinstance(self.mask, Causal):
            got = f"{two_sided[0]}, which reads tokens on both sides"
            raise UsageError("encodings", "those of a decoder", got, "build an encoder, as lg.LongitudeForMaskedLM")
        self.post_init()

    def share_encodings(self, by_layer: Sequence[Composed]) -> None:
        """Give each layer its encoding; layers with the same members share one object."""
        distinct: dict[tuple[Encoding, ...], Composed] = {}
        # a tuple, so that nothing is registered twice
        self.encoding_of_layer = tuple(distinct.setdefault(tuple(composed), composed) for composed in by_layer)

    def taken(self, by_layer: list[Composed]) -> list[Composed]:
        """Each layer's encoding, without the members that its mixer does not support if one encoding is for all layers.

        ValueError for a member that no mixer supports, and for a layer's own encoding if its mixer does not support it.
        """
        mixers = self.mixers
        if self.config.encodings is not None:
            for mixer, composed in zip(mixers, by_layer, strict=True):
                mixer.require(composed)
            return by_layer
        for members in zip(*by_layer, strict=True):
            if all(mixer.refuses(member) for mixer, member in zip(mixers, members, strict=True)):
                mixers[0].require(Composed([members[0]]))
        return [
            Composed([member for member in composed if mixer.refuses(member) is None])
            for mixer, composed in zip(mixers, by_layer, strict=True)
        ]

    @renames_cache
    @can_return_tuple
    @with_names(DecoderInputs)
    def forward(
        self, input_ids: Tensor | None = None, *, source: Source | None = None, **inputs: Unpack[DecoderInputs]
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the stack.

        Args:
            input_ids: Tokens [B, L]; or inputs_embeds.
            source: What cross-attention reads.
            inputs: As in DecoderInputs.

        Returns:
            transformers' output with last_hidden_state [B, L, hidden_size].

        Raises:
            ValueError: For inputs that do not fit the model or each other.
        """
        inputs_embeds = inputs.get("inputs_embeds")
        if (input_ids is None) == (inputs_embeds is None) and not self.cross:
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"expected either input_ids or inputs_embeds, got {got}")
        output_hidden_states, output_attentions = self.also_returned(inputs)
        if output_attentions:
            self.require_weights()
        x = self._embedded(input_ids, inputs_embeds)
        call = self._call_of(x, input_ids, inputs, output_attentions)
        x, tables = self._positioned(x if call.order is None else in_order(x, call.order), call)
        x, hidden_states, attentions, cross_attentions = self._run(
            x, call, tables, source or Source(), output_hidden_states, output_attentions
        )
        if call.order is not None:
            places = call.order.argsort(1)
            x = in_order(x, places)
            hidden_states = [in_order(states, places) for states in hidden_states]
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            cache=call.cache,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
            cross_attentions=tuple(cross_attentions) if output_attentions and self.cross else None,
        )

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Tokens [B, L] or their embeddings [B, L, D] -> embeddings [B, L, D], scaled and normalized, without positions."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        else:
            require_embeds("inputs_embeds", inputs_embeds, self.config, getattr(self, "embed_tokens", None))
        x: Tensor = inputs_embeds if self.embedding_scale == 1 else inputs_embeds * self.embedding_scale  # type: ignore[operator]
        return x if self.embed_norm is None else self.embed_norm(x)

    def _call_of(self, x: Tensor, input_ids: Tensor | None, inputs: DecoderInputs, output_attentions: bool) -> Call:
        """Arguments of `forward` -> a Call, with a new cache if one is asked for."""
        batch, length = x.shape[:2]
        position_ids, cache, use_cache = inputs.get("position_ids"), inputs.get("cache"), inputs.get("use_cache")
        # position_ids that start over mark documents in decoders of one stream, as in transformers
        restarts = isinstance(self.mask, Causal) and not self.cross
        documents = documents_in(inputs, batch, length, restarts)
        if documents is not None and inputs.get("document_ids") is None:
            use_cache = False  # whatever the config says: a cache would not keep these documents apart
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.recomputes(cache, use_cache):
            use_cache, cache = False, None
        if cache is not None:
            cache = adopt(cache, self.cache_layers)
        elif use_cache:
            cache = LongitudeCache([make() for make in self.cache_layers])
        past = cache.get_seq_length() if cache is not None else 0
        mask, order = inputs.get("attention_mask"), None
        streams = streams_of(mask, documents, batch, past + length, x.device)
        if streams is not None:
            streams, order = without_gaps(streams, past)
        if order is not None:
            if output_attentions:
                raise ValueError("attention_mask: padding is between tokens; expected none with output_attentions")
            position_ids, input_ids = (None if t is None else in_order(t, order) for t in (position_ids, input_ids))
        positions = self.positions_of(position_ids, streams, cache, batch, length)
        ids = None
        if input_ids is not None and self.encoding_of_layer[0].reads_ids:
            ids = ids_so_far(input_ids, cache, past)
        return Call(self.mask, as_int(positions), streams, cache, order, ids)

    def _positioned(self, x: Tensor, call: Call) -> tuple[Tensor, dict[Composed, Any]]:
        """The input of the first layer, [B, L, D], and the tables of each encoding.

        Tables are None for an encoding with keys that depend on the query.
        """
        length = x.shape[1]
        places = explicit(call.positions, length, x.device)
        first, places_of_member = self.encoding_of_layer[0], ()
        if first.reads_ids:
            random_start = self.training and call.cache is None
            places_of_member = places_of(first, call.ids, call.streams, length, random_start)
        if first.at_input:
            x = first(partial(first.embed, x, places, places_of_member, call.streams))
        x = F.dropout(x, self.hidden_dropout) if self.training and self.hidden_dropout else x
        return x, {
            composed: composed(partial(composed.prepare, places, None, x.dtype))
            if composed.stable_keys and not composed.learns_frequencies
            else None
            for composed in dict.fromkeys(self.encoding_of_layer)
        }

    def _run(
        self,
        x: Tensor,
        call: Call,
        tables: dict[Composed, Any],
        source: Source,
        output_states: bool,
        output_attentions: bool,
    ) -> tuple[Tensor, list[Any], list[Any], list[Any]]:
        """The layers and the last norm.

        Returns:
            The output [B, L, D]; if wanted, the input of each layer and the output; each layer's weights; and its weights over
            the source.
        """
        hidden_states, attentions, cross_attentions = [], [], []
        step = Step()
        caches = [cache for cache in (call.cache, source.cache) if cache is not None]
        offloaded = [cache for cache in caches if cache.offloading]
        weighs = [mixer.has_weights for mixer in self.mixers] if output_attentions else None
        if call.cache is not None and self.encoding_of_layer[0].reads_ids:
            vars(call.cache.layers[0])["ids"] = call.ids
        for i, layer in enumerate(self.layers):
            if output_states:
                hidden_states.append(x)
            for cache in offloaded:
                cache.layers[i].prefetch()
            encoding = self.encoding_of_layer[i]
            inputs = MixerInputs(
                call.mask,
                call.positions,
                call.streams,
                None if call.cache is None else call.cache.layers[i],
                encoding=encoding,
                tables=tables[encoding],
                return_weights=weighs is not None and weighs[i],
                step=step,
            )
            cross = None if source.cache is None else source.cache.layers[i]
            x, weights, cross_weights = encoding(
                partial(layer, x, inputs, source.states, source.valid, cross, output_attentions)
            )
            for cache in offloaded:
                cache.layers[i].offload()
            attentions.append(weights)
            cross_attentions.append(cross_weights)
        x = self.norm(x)
        return x, [*hidden_states, x] if output_states else [], attentions, cross_attentions

    def recomputes(self, cache: Cache | None, use_cache: bool | None) -> bool:
        """Whether the call has no cache because backward computes layers twice. ValueError for a cache with tokens."""
        if not (self.gradient_checkpointing and self.training):
            return False
        if cache is not None and (tokens := cache.get_seq_length()):
            expected = "an empty cache or none with gradient checkpointing in training, which computes layers twice"
            raise UsageError("cache", expected, f"one of {tokens} tokens", "call gradient_checkpointing_disable()")
        if use_cache or cache is not None:
            logger.warning_once("gradient checkpointing computes layers twice, so this call has no cache")
        return True

    @property
    def forgets(self) -> bool:
        """Whether caches cannot be cropped by generate(): they drop or merge tokens, or a mixer or encoding carries a state."""
        return any(mixer.growth != "O(N)" or mixer.carries for mixer in self.mixers) or any(
            composed.carries for composed in self.encoding_of_layer
        )

    @property
    def cache_layers(self) -> list[Callable[[], Any]]:
        """For each block, a function that returns an empty cache layer for it."""
        return [block.mixer.cache_layer for block in self.layers]  # type: ignore[misc, union-attr]

    @property
    def mixers(self) -> list[Mixer]:
        """Mixer of each block."""
        return [block.mixer for block in self.layers]  # type: ignore[misc]

    def require_weights(self) -> None:
        """ValueError if no layer has weights for output_attentions."""
        if not self.cross and not any(mixer.has_weights for mixer in self.mixers):
            able = sorted(name for name, kind in MIXERS.items() if kind.has_weights)
            kinds = ", ".join(dict.fromkeys(type(mixer).__name__ for mixer in self.mixers))
            raise ValueError(
                f"output_attentions: no layer of this model has weights over keys, its mixers are {kinds}; expected one of "
                f"{', '.join(able)} in at least one layer"
            )

    def positions_of(
        self, position_ids: Tensor | None, streams: Tensor | None, cache: Cache | None, batch: int, length: int
    ) -> Positions:
        """Positions of the new tokens: `position_ids`, else the index of each token in its document, without padding."""
        if position_ids is not None:
            if self.axes > 1 and tuple(position_ids.shape) == (batch, length):  # one number for all axes
                position_ids = position_ids[..., None]
            return canonical("position_ids", position_ids, batch, length, self.axes)
        first: Any = None if cache is None else cache.layers[0]
        if streams is not None:
            past = streams.shape[1] - length
            places = places_after(streams, past, None if first is None else first.last_positions())[:, -length:]
            return places[..., None] if self.axes > 1 else places
        after = 0 if first is None else first.next_positions()
        if isinstance(after, int):
            return after
        if self.axes > 1 and after.dim() == 2:  # a state stores one number for all axes
            after = after[..., None]
        return following(after, length)
