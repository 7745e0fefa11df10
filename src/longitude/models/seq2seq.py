"""The encoder-decoder: an encoder reads the source, and a decoder that attends to its output writes the target."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils.generic import can_return_tuple

from longitude.attention.documents import real_tokens
from longitude.errors import UsageError
from longitude.models.configuration import LongitudeConfig, mixer_class
from longitude.models.decoder import LongitudeModel, LongitudePreTrainedModel
from longitude.models.encoder import LongitudeEncoder
from longitude.models.generation import CheckedGenerationMixin
from longitude.models.inputs import require_embeds, require_known
from longitude.models.loss import IGNORED, predicted
from longitude.models.stock_caches import renames_cache


def encoder_of(config: LongitudeConfig) -> LongitudeConfig:
    """The encoder's own shape: num_encoder_layers blocks.

    Its mixer is the decoder's if that can be bidirectional, else attention; its encoding: encoder_encoding or the decoder's.
    """
    if config.mlp == "rwkv":
        raise ValueError(
            "mlp: 'rwkv' reads the token before each, and an encoder attends to both sides; expected 'dense'"
        )
    encoder = deepcopy(config)
    encoder.is_encoder_decoder, encoder.encoder_encoding = False, None
    layers = config.num_hidden_layers if config.num_encoder_layers is None else config.num_encoder_layers
    encoder.num_hidden_layers = layers
    mixers = [mixer_class(spec) for spec in config.layer_mixers()]
    same = config.mixers is None and mixers[0].bidirectional
    encoder.mixer, encoder.mixers = config.mixer if same else encoder.resolve_mixer("attention"), None
    encoding = config.encoder_encoding
    recurrences = not any(kind.scores or kind.rotates for kind in mixers)
    if encoding is None and recurrences and config.encoding == config.resolve("nope"):
        encoding = "rope"  # recurrent decoders need none, but without one the encoder would ignore the order of tokens
    if encoding is not None:
        encoder.encoding, encoder.encodings = encoder.resolve(encoding), None
    elif config.encodings is not None and len(config.encodings) != layers:
        raise ValueError(
            f"encodings: got {len(config.encodings)}, one per layer of the decoder, for an encoder of {layers} layers; "
            "expected as many, or encoder_encoding"
        )
    return encoder


class LongitudeDecoder(LongitudeModel):
    """A decoder with cross-attention to an encoder's output; it shares the encoder's token embedding."""

    cross = True
    written_by = "LongitudeForSeq2SeqLM"

    def __init__(self, config: LongitudeConfig):
        super().__init__(config)
        del self.embed_tokens  # those of the encoder serve both


class LongitudeEncoderDecoder(LongitudePreTrainedModel):
    """An encoder, and a decoder with cross-attention to its output.

    A source [B, S] and a target [B, L] of token ids -> the target's hidden states [B, L, hidden_size]. The encoder's
    embed_tokens embeds both.
    """

    written_by = "LongitudeForSeq2SeqLM"

    def __init__(self, config: LongitudeConfig):
        config = deepcopy(config)
        config.is_encoder_decoder = True
        super().__init__(config)
        self.encoder = LongitudeEncoder(encoder_of(config))
        config.encoder_encoding = self.encoder.config.encoding  # for config.json, with every option
        self.decoder = LongitudeDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.encoder.embed_tokens = value

    @renames_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        encoder_outputs: Sequence[Tensor] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        output_attentions: bool | None = None,
    ) -> Seq2SeqModelOutput:
        """LongitudeForSeq2SeqLM without labels: decoder_input_ids or decoder_inputs_embeds is required."""
        output_hidden_states, output_attentions = self.also_returned(output_hidden_states, output_attentions)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
                return_dict=True,
            )
        assert encoder_outputs is not None
        source = encoder_outputs[0]
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            got = "neither" if decoder_input_ids is None else "both"
            raise ValueError(f"expected either decoder_input_ids or decoder_inputs_embeds, got {got}")
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.encoder.embed_tokens(decoder_input_ids)
        else:
            require_embeds("decoder_inputs_embeds", decoder_inputs_embeds, self.config, self.encoder.embed_tokens)
        assert decoder_inputs_embeds is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        kept = self.cache_of(cache, use_cache)
        outputs = self.decoder(
            input_ids=decoder_input_ids,  # for encodings that read them
            inputs_embeds=decoder_inputs_embeds,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            cache=None if kept is None else kept.self_attention_cache,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            source=source,
            source_valid=valid_of(attention_mask, source),
            cross_cache=None if kept is None else kept.cross_attention_cache,
            return_dict=True,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            cache=kept,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=source,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
        )

    def cache_of(self, given: Cache | None, use_cache: bool | None) -> EncoderDecoderCache | None:
        """The cache to fill: the one given, a new one, or none."""
        if self.decoder.recomputes(given, use_cache) or (given is None and not use_cache):
            return None
        if given is None:
            given = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if not isinstance(given, EncoderDecoderCache):
            raise UsageError(
                "cache", "transformers' EncoderDecoderCache, for the target and for the source", type(given).__name__
            )
        cross, blocks = given.cross_attention_cache, self.decoder.layers
        if not cross.layers or not cross.get_seq_length():  # an empty one, such as generate() makes
            cross.layers[:] = [block.cross.cache_layer() for block in blocks]  # type: ignore[union-attr]
        if len(cross.layers) != len(blocks):
            raise UsageError("cache", f"{len(blocks)} layers, as the decoder has", len(cross.layers))
        return given


class LongitudeForSeq2SeqLM(LongitudePreTrainedModel, CheckedGenerationMixin):
    """An encoder-decoder transformer with any registered encoding.

    It works with Trainer, Seq2SeqTrainer, generate() and the Auto classes. Both stacks are in `model`, and also `encoder` and
    `decoder`. One matrix embeds source and target and, with tie_word_embeddings, makes the logits. Position acts in
    self-attention or, with an encoding of the input, at both inputs; cross-attention has none. A target begins with
    decoder_start_token_id, else bos_token_id, else pad_token_id, of the config.

    Args:
        config: its shape and encodings.

    Source:
        Vaswani et al. 2017, arXiv 1706.03762, https://arxiv.org/abs/1706.03762
    """

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    written_by = LongitudeEncoderDecoder.written_by

    def __init__(self, config: LongitudeConfig):
        config = deepcopy(config)
        config.is_encoder_decoder = True
        super().__init__(config)
        self.model = LongitudeEncoderDecoder(config)
        self.config = self.model.config  # one for both
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._is_stateful = self.decoder.forgets
        if self.generation_config is not None and self.generation_config.decoder_start_token_id is None:
            self.generation_config.decoder_start_token_id = self.start_token_id
        self.post_init()

    @property
    def encoder(self) -> LongitudeEncoder:
        return self.model.encoder

    @property
    def decoder(self) -> LongitudeDecoder:
        return self.model.decoder

    def set_encoder(self, encoder: LongitudeEncoder, modality: str | None = None) -> None:
        self.model.set_encoder(encoder, modality)

    def set_decoder(self, decoder: LongitudeDecoder) -> None:
        self.model.set_decoder(decoder)

    @property
    def start_token_id(self) -> int | None:
        """The token before the first of a target."""
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        return next((one for name in names if (one := getattr(self.config, name, None)) is not None), None)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels [B, L] -> the decoder's inputs [B, L]: each the label before it.

        The start token comes before the first; -100 becomes the padding token, if there is one.
        """
        start = self.start_token_id
        if start is None:
            raise ValueError(
                "labels: expected decoder_start_token_id (or bos_token_id, pad_token_id) in the config, for the token before "
                "the first label; or pass decoder_input_ids"
            )
        pad = start if self.config.pad_token_id is None else self.config.pad_token_id
        return F.pad(labels[:, :-1], (1, 0), value=start).masked_fill(F.pad(labels[:, :-1] == IGNORED, (1, 0)), pad)

    @renames_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        encoder_outputs: Sequence[Tensor] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of the token after each decoder token and, given labels, the loss.

        Args:
            input_ids: [B, S], the source.
            attention_mask: [B, S], 0 for padding of the source, on either side.
            decoder_input_ids: [B, L]; default: the labels, shifted.
            decoder_attention_mask: [B, Lk], 0 for padding of the target, cached tokens included.
            position_ids: [B, S]; default: 0, 1, 2, ...
            decoder_position_ids: [B, L]; default: 0, 1, 2, ..., after cached tokens.
            encoder_outputs: return value of `encoder` for the source, which is then not encoded again.
            cache: an EncoderDecoderCache; the decoder's tokens come after those in it, and keys and values of the
                source are made when it is empty.
            inputs_embeds: [B, S, hidden_size], instead of input_ids.
            decoder_inputs_embeds: [B, L, hidden_size], instead of decoder_input_ids.
            labels: [B, L], the target, -100 for tokens that are not predicted.
            use_cache: whether to return a cache.
            logits_to_keep: as in LongitudeForCausalLM, like num_items_in_batch and skip_logits.
            num_items_in_batch: as in LongitudeForCausalLM.
            skip_logits: as in LongitudeForCausalLM.
            output_hidden_states: whether encoder and decoder return hidden states, as in LongitudeModel.
            output_attentions: whether encoder and decoder return weights, and the weights [B, H, L, S] of cross-attention.
            **kwargs: none is supported; any raises a ValueError.

        Returns:
            transformers' Seq2SeqLMOutput: logits [B, L, vocab_size] and the loss, mean nats per predicted token.
        """
        if "document_ids" in kwargs:
            raise ValueError(
                "document_ids: an encoder-decoder has one source and one target per row; expected each pair in a row of its own, "
                "padded, with attention_mask"
            )
        require_known(kwargs, type(self).forward)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            got = "none" if decoder_input_ids is None else "both of these"
            raise ValueError(f"expected labels, or either decoder_input_ids or decoder_inputs_embeds, got {got}")
        if use_cache is None and labels is not None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        if labels is not None and labels.shape != hidden.shape[:2]:
            raise UsageError("labels", f"{list(hidden.shape[:2])}", list(labels.shape))
        loss, logits = predicted(self, hidden, labels, num_items_in_batch, skip_logits, logits_to_keep)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)


def valid_of(attention_mask: Tensor | None, source: Tensor) -> Tensor | None:
    """The mask [B, S] of the source [B, S, dim], checked, 0 or False for padding; None if there is no padding."""
    if attention_mask is None:
        return None
    if attention_mask.shape != source.shape[:2]:
        raise UsageError(
            "attention_mask", f"{list(source.shape[:2])}, one per token of the source", list(attention_mask.shape)
        )
    return real_tokens(attention_mask)
