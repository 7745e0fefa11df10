"""The encoder-decoder: an encoder reads the source, and a decoder that attends to its output writes the target."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Unpack

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils.generic import can_return_tuple

from longitude.attention.documents import streams_of
from longitude.errors import UsageError
from longitude.models.causal import IGNORED, predicted, require_labels
from longitude.models.configuration import LongitudeConfig, mixer_class
from longitude.models.decoder import LongitudeModel, LongitudePreTrainedModel, Source
from longitude.models.encoder import LongitudeEncoder
from longitude.models.inputs import (
    CheckedGenerationMixin,
    SourceTargetInputs,
    require_embeds,
    require_known,
    with_names,
)
from longitude.models.stock_caches import renames_cache


def encoder_of(config: LongitudeConfig) -> LongitudeConfig:
    """The encoder's shape: as many blocks as the decoder's.

    Its mixer is the decoder's if that can be bidirectional, else attention; its encoding: encoder_encoding or the decoder's.
    """
    encoder = deepcopy(config)
    encoder.is_encoder_decoder, encoder.encoder_encoding = False, None
    mixers = [mixer_class(spec) for spec in config.layer_mixers()]
    same = config.mixers is None and mixers[0].bidirectional
    encoder.mixer, encoder.mixers = config.mixer if same else encoder.resolve_mixer("attention"), None
    encoding = config.encoder_encoding
    recurrences = not any(kind.scores or kind.rotates for kind in mixers)
    if encoding is None and recurrences and config.encoding == config.resolve("nope"):
        encoding = "rope"  # recurrent decoders need none, but without one the encoder would ignore the order of tokens
    if encoding is not None:
        encoder.encoding, encoder.encodings = encoder.resolve(encoding), None
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
    @with_names(SourceTargetInputs)
    def forward(self, input_ids: Tensor | None = None, **inputs: Unpack[SourceTargetInputs]) -> Seq2SeqModelOutput:
        """LongitudeForSeq2SeqLM without labels: decoder_input_ids or decoder_inputs_embeds is required."""
        require_known(inputs, SourceTargetInputs, type(self).forward)
        states, weights = self.also_returned(inputs)
        returned: Any = {"output_hidden_states": states, "output_attentions": weights, "return_dict": True}
        if (encoder_outputs := inputs.get("encoder_outputs")) is None:
            of_source = {name: inputs.get(name) for name in ("attention_mask", "position_ids", "inputs_embeds")}
            encoder_outputs = self.encoder(input_ids, **of_source, **returned)
        assert encoder_outputs is not None
        source: Tensor = encoder_outputs[0]
        target, embeds = (inputs.get(f"decoder_{name}") for name in ("input_ids", "inputs_embeds"))
        if (target is None) == (embeds is None):
            got = "none" if target is None else "both of these"
            raise ValueError(f"expected labels, or either decoder_input_ids or decoder_inputs_embeds, got {got}")
        if embeds is None:
            embeds = self.encoder.embed_tokens(target)
        else:
            require_embeds("decoder_inputs_embeds", embeds, self.config, self.encoder.embed_tokens)
        if (use_cache := inputs.get("use_cache")) is None:
            use_cache = self.config.use_cache and not self.training
        kept = self.cache_of(inputs.get("cache"), use_cache)
        streams = streams_of(inputs.get("attention_mask"), None, len(source), source.shape[1], source.device)
        outputs = self.decoder(
            target,  # for encodings that read ids
            source=Source(
                source,
                None if streams is None else streams >= 0,
                None if kept is None else kept.cross_attention_cache,
            ),
            inputs_embeds=embeds,
            attention_mask=inputs.get("decoder_attention_mask"),
            position_ids=inputs.get("decoder_position_ids"),
            cache=None if kept is None else kept.self_attention_cache,
            use_cache=False,
            **returned,
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

    def cache_of(self, cache: Cache | None, use_cache: bool | None) -> EncoderDecoderCache | None:
        """The cache to fill: the one that was passed, a new one, or none."""
        if self.decoder.recomputes(cache, use_cache) or (cache is None and not use_cache):
            return None
        if cache is None:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if not isinstance(cache, EncoderDecoderCache):
            raise UsageError(
                "cache", "transformers' EncoderDecoderCache, for the target and for the source", type(cache).__name__
            )
        cross, blocks = cache.cross_attention_cache, self.decoder.layers
        if not cross.layers or not cross.get_seq_length():  # an empty one, such as generate() makes
            cross.layers[:] = [block.cross.cache_layer() for block in blocks]  # type: ignore[union-attr]
        if len(cross.layers) != len(blocks):
            raise UsageError("cache", f"{len(blocks)} layers, as the decoder has", len(cross.layers))
        return cache


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

    @property
    def start_token_id(self) -> int | None:
        """The token before the first of a target."""
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        return next((token for name in names if (token := getattr(self.config, name, None)) is not None), None)

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
    @with_names(SourceTargetInputs)
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Unpack[SourceTargetInputs],
    ) -> Seq2SeqLMOutput:
        """Logits of the target, with labels in training none, and with labels the loss.

        Args:
            input_ids: [B, S], the source; or inputs_embeds, or encoder_outputs.
            labels: [B, L], the target, -100 for tokens that are not predicted. The decoder's inputs follow from them.
            logits_to_keep: as in LongitudeForCausalLM.
            num_items_in_batch: as in LongitudeForCausalLM.
            inputs: as in SourceTargetInputs.

        Returns:
            transformers' Seq2SeqLMOutput: logits [B, L, vocab_size] and the loss, mean nats per predicted token.
        """
        require_known(inputs, SourceTargetInputs, type(self).forward)
        targets = inputs.get("decoder_input_ids"), inputs.get("decoder_inputs_embeds")
        if labels is not None and targets == (None, None):
            inputs["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels)
        if inputs.get("use_cache") is None and labels is not None:
            inputs["use_cache"] = False
        outputs = self.model(input_ids, return_dict=True, **inputs)
        hidden = outputs.last_hidden_state
        require_labels(hidden, labels=labels)
        loss, logits = predicted(self, hidden, labels, num_items_in_batch, logits_to_keep)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)
