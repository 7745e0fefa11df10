"""The inputs of models and of generate(), and checks of them: names, shapes of embeddings, masks, places of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.generation.utils import GenerationMixin

from longitude.attention.documents import Packed, documents_of, has_gaps, streams_of
from longitude.errors import UsageError, unknown
from longitude.models.stock_caches import renames_cache
from longitude.positions.composed import Composed

Forward = TypeVar("Forward", bound=Callable[..., Any])


class TokenInputs(Packed, total=False):
    """Arguments of every model's forward after input_ids [B, L], each by name; None or left out: it is not used.

    attention_mask: 0 for padding [B, Lk], cached tokens included.
    position_ids: [L], [B, L] or [B, L, axes], instead of counting from the start of each document. In decoders, without
        attention_mask and cache, those that start over mark documents.
    inputs_embeds: [B, L, hidden_size] instead of input_ids.
    document_ids: A number per token [B, Lk]; a run of one number is a document, and tokens attend within theirs.
    output_hidden_states: Return the input of the first layer and the output of each, the last one normalized.
    output_attentions: Return the weights [B, H, L, Lk] of each layer, None if its mixer has none.
    """

    attention_mask: Any
    position_ids: Tensor | None
    inputs_embeds: Tensor | None
    document_ids: Tensor | None
    output_hidden_states: bool | None
    output_attentions: bool | None


class DecoderInputs(TokenInputs, total=False):
    """The same, and those of decoders.

    cache: A cache, filled or empty.
    use_cache: Return a cache; None: config.use_cache, and never in training.
    """

    cache: Cache | None
    use_cache: bool | None


DECLARED = DecoderInputs.__annotations__.keys() - Packed.__annotations__.keys()
"""Names of inputs; all others are marks of documents, which `documents_of` checks."""


class SourceTargetInputs(TypedDict, total=False):
    """Arguments of an encoder-decoder's forward after the source's input_ids [B, S], each by name.

    attention_mask, position_ids, inputs_embeds: The source's, as in TokenInputs.
    decoder_input_ids, decoder_attention_mask, decoder_position_ids, decoder_inputs_embeds: The target's.
    encoder_outputs: Return value of `encoder` for the source, which is then not encoded again.
    cache: An EncoderDecoderCache; the decoder's tokens come after those in it, and keys and values of the source are made when
        it is empty.
    use_cache: Return a cache; None: config.use_cache, and never in training.
    output_hidden_states, output_attentions: As in TokenInputs, of both stacks, and the weights [B, H, L, S] of
        cross-attention.
    """

    attention_mask: Tensor | None
    decoder_input_ids: Tensor | None
    decoder_attention_mask: Tensor | None
    position_ids: Tensor | None
    decoder_position_ids: Tensor | None
    encoder_outputs: Sequence[Any] | None
    cache: Cache | None
    inputs_embeds: Tensor | None
    decoder_inputs_embeds: Tensor | None
    use_cache: bool | None
    output_hidden_states: bool | None
    output_attentions: bool | None


def documents_in(inputs: Mapping[str, Any], batch: int, length: int, restarts: bool = True) -> Tensor | None:
    """The document numbers [B, Lk] or [B, L] that the DecoderInputs of a call mark, by `documents_of`; None if none.

    restarts: whether position_ids that start over mark documents.
    """
    ids, positions, mask = inputs.get("document_ids"), inputs.get("position_ids"), inputs.get("attention_mask")
    alone = inputs.get("cache") is None and not inputs.get("use_cache")
    packed = {name: marks for name, marks in inputs.items() if name not in DECLARED}
    return documents_of(batch, length, ids, positions, mask, alone, restarts, **packed)


def with_names(inputs: type) -> Callable[[Forward], Forward]:
    """Decorate a forward(input_ids, ..., **inputs): transformers looks for the names of inputs in its signature.

    Those of Packed stay out, as in transformers' models: Trainer would keep such columns, and generate() pass them on.
    """
    names = [name for name in inputs.__annotations__ if name not in Packed.__annotations__]

    def decorated(forward: Forward) -> Forward:
        *parameters, rest = signature(forward).parameters.values()
        parameters += [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names]
        forward.__signature__ = Signature([*parameters, rest])
        return forward

    return decorated


def require_known(arguments: Mapping[str, Any], inputs: type, forward: Callable[..., Any]) -> None:
    """ValueError for the first argument that is not in `inputs`; it suggests a name of these or of `forward`."""
    for name in arguments:
        if name not in inputs.__annotations__:
            *parameters, _ = signature(forward).parameters
            raise unknown("argument", name, {*parameters[1:], *inputs.__annotations__}, "")


def require_embeds(name: str, embeds: Any, config: Any, table: nn.Embedding | None) -> None:
    """ValueError unless `embeds` is [B, L, config.hidden_size], of the dtype of the model's own embeddings, `table`.

    Under autocast, and if parameters are quantized, operations choose their dtypes, so any is accepted. table None: any dtype,
    because the dtype was compared before.
    """
    weight = None if table is None else table.weight
    dtype = "floats" if weight is None else str(weight.dtype)
    got = f"{embeds.dtype} {list(embeds.shape)}" if isinstance(embeds, Tensor) else type(embeds).__name__
    expected = f"{name}: expected {dtype} [batch, length, {config.hidden_size}], got {got}"
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or embeds.shape[-1] != config.hidden_size:
        raise ValueError(f"{expected}; give one vector per token, as get_input_embeddings() makes them of input_ids")
    if weight is None or embeds.dtype == weight.dtype or not weight.is_floating_point():
        return
    kind = embeds.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if not autocast and getattr(config, "quantization_config", None) is None:
        raise ValueError(f"{expected}; convert them with .to({weight.dtype}), or the model")


def ids_so_far(ids: Tensor, cache: Any, past: int) -> Tensor | None:
    """Ids of all tokens [B, past + L], cached ones first; None if the cache does not store them."""
    if not past:
        return ids
    before = None if cache is None else cache.layers[0].ids
    if before is None or before.shape[1] != past:
        return None
    if len(before) != len(ids):
        raise UsageError("input_ids", f"the {len(before)} rows of the cache", len(ids))
    return torch.cat([before, ids], 1)


def places_of(
    encoding: Composed, ids: Tensor | None, streams: Tensor | None, length: int, random_start: bool
) -> tuple[Tensor | None, ...]:
    """Places of the last `length` tokens for each member that reads ids [B, Lk] of all tokens, else None."""
    if ids is None:
        raise ValueError(
            "places are made of token ids: expected input_ids in this call and in all that filled its cache"
        )
    every = encoding.places(ids, streams, random_start)
    return tuple(None if places is None else places[:, -length:] for places in every)


# ---- generate() --------------------------------------------------------------------------------------------------------
class CheckedGenerationMixin(GenerationMixin):
    """generate() of transformers, for models that need padding on one side of a sequence.

    It checks what forward would, before transformers drops a mask of ones or makes a mask itself.
    """

    @renames_cache
    def generate(self, *arguments: Any, **options: Any) -> Any:
        require_assistant(options.get("assistant_model"))
        positions = options.get("position_ids")
        if options.get("document_ids") is not None or (positions is not None and positions.dim() > 2):
            got = "document_ids" if options.get("document_ids") is not None else "positions of several axes"
            raise UsageError("generate", "one document, and positions [B, L]", got, "call the model for each token")
        inputs = arguments[0] if arguments else options.get("inputs")
        require_mask(self.config.is_encoder_decoder, inputs, options)  # pyright: ignore[reportAttributeAccessIssue]
        return super().generate(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> Any:
        raise UsageError(
            "generate_batch",
            "generate, with attention_mask for prompts of several lengths",
            "continuous batching",
            f"{type(self).__name__} has no paged cache",
        )

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Any:
        """The mask that transformers infers from pad_token_id. ValueError if it has padding between tokens."""
        mask: Any = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        batch, length = mask.shape
        streams = streams_of(mask, None, batch, length, mask.device)
        if streams is not None and has_gaps(streams):
            pad = generation_config.pad_token_id
            raise ValueError(
                f"pad_token_id: {pad} is between tokens of the prompt, and without an attention_mask it is taken for padding; "
                "expected attention_mask=torch.ones_like(input_ids) if it is a token, or padding at one side"
            )
        return mask


def require_mask(is_encoder_decoder: bool, inputs: Tensor | None, options: dict[str, Any]) -> None:
    """ValueError unless a mask covers all tokens: cached ones, and those of this call, which may include cached ones."""
    prefix = "decoder_" if is_encoder_decoder else ""
    ids, embeds = options.get(f"{prefix}input_ids"), options.get(f"{prefix}inputs_embeds")
    prompt = embeds if embeds is not None else ids if is_encoder_decoder or ids is not None else inputs
    mask, cache = options.get(f"{prefix}attention_mask"), options.get("cache")
    if prompt is None or (mask is not None and mask.dim() != 2):
        return
    tokens, past = prompt.shape[1], 0 if cache is None else cache.get_seq_length()
    masked = tokens if mask is None else mask.shape[1]
    if masked not in (tokens, past + tokens) or (masked == tokens and past >= tokens):
        got = "none" if mask is None else list(mask.shape)
        raise ValueError(
            f"{prefix}attention_mask: expected [{prompt.shape[0]}, {past + tokens}] for {tokens} tokens after {past} cached "
            f"ones, or all tokens, cached ones included, with a mask of the same length or none; got {got}"
        )


def require_assistant(assistant: Any) -> None:
    """Raise ValueError for an assistant with a cache that cannot be cropped: transformers checks only the model itself."""
    if getattr(assistant, "_is_stateful", False):
        raise UsageError(
            "assistant_model",
            "a model whose cache can be cropped",
            f"{type(assistant).__name__}, which drops tokens or keeps a state",
            "use an assistant with attention and an encoding that carries no state",
        )
