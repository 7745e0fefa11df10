"""The encoder, with bidirectional attention; also alone, with a head for masked language modeling."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Unpack

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from longitude.attention.documents import Packed
from longitude.attention.masks import NoMask
from longitude.attention.mixer import MIXERS
from longitude.errors import UsageError
from longitude.models.configuration import LongitudeConfig, mixer_class
from longitude.models.decoder import LongitudeModel, LongitudePreTrainedModel
from longitude.models.inputs import require_known
from longitude.models.loss import IGNORED, predicted
from longitude.positions.base import ENCODINGS, list_encodings


def bidirectional_config(config: LongitudeConfig) -> LongitudeConfig:
    """Convert a config to bidirectional attention: encodings with the option `bidirectional` have it set.

    ValueError for a mixer that is causal.
    """
    for spec in config.layer_mixers():
        if places := config.mixer_options(spec).get("short_conv"):
            raise UsageError("short_conv", "none in an encoder, which attends to both sides", repr(places))
        if not mixer_class(spec).bidirectional:
            able = sorted(name for name, kind in MIXERS.items() if kind.bidirectional)
            raise ValueError(
                f"mixer: {spec['name']!r} is causal, and an encoder attends to both sides; expected "
                f"{' or '.join(map(repr, able))}"
            )
    config = deepcopy(config)
    config.encoding, config.encodings = bidirectional(config.encoding), bidirectional(config.encodings)
    return config


def bidirectional(spec: Any) -> Any:
    """Set `bidirectional` in a resolved encoding, or a list of them, so that future offsets have separate parameters."""
    if isinstance(spec, list):
        return [bidirectional(one) for one in spec]
    return {**spec, "bidirectional": True} if isinstance(spec, dict) and "bidirectional" in spec else spec


class LongitudeEncoder(LongitudeModel):
    """Tokens [B, L] -> hidden states [B, L, hidden_size], each of all tokens of its document."""

    mask = NoMask()
    written_by = "LongitudeForMaskedLM"

    def __init__(self, config: LongitudeConfig):
        super().__init__(bidirectional_config(config))
        for member in (member for own in self.encoding_of_layer for member in own):
            if member.causal_only:
                able = [name for name in list_encodings() if getattr(ENCODINGS[name], "causal_only", None) is False]
                raise ValueError(
                    f"encoding: {type(member).__name__} has no meaning for tokens in the future, and an encoder attends to them; "
                    f"expected one of {', '.join(able)}"
                )

    @can_return_tuple
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (no cache, no memories, no source)
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        output_attentions: bool | None = None,
        place_ids: Tensor | None = None,
        **packed: Unpack[Packed],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the encoder: LongitudeModel without a cache.

        Args:
            input_ids: [B, L].
            attention_mask: [B, L], 0 for padding.
            position_ids: [B, L]; default: 0, 1, 2, ... in each document. They mark no documents here.
            inputs_embeds: [B, L, hidden_size], instead of input_ids.
            document_ids: [B, L], for packed text: tokens attend within their document only.
            output_hidden_states: whether to return them, or the indices of the wanted ones.
            output_attentions: whether to return weights.
            place_ids: as in LongitudeModel.
            **packed: transformers' marks of packed text, as `documents_of` reads them.
        """
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            document_ids=document_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            place_ids=place_ids,
            return_dict=True,  # pyright: ignore[reportCallIssue]  (the decorator takes it)
            **packed,
        )


class LongitudeForMaskedLM(LongitudePreTrainedModel):
    """An encoder that fills in masked tokens, with any encoding that has a meaning for both sides.

    It works with Trainer and the Auto classes. Its config has the encodings made bidirectional.

    Args:
        config: its shape and encodings.

    Raises:
        ValueError: a causal mixer or encoding.

    Source:
        Devlin et al. 2019, arXiv 1810.04805, https://arxiv.org/abs/1810.04805
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    written_by = LongitudeEncoder.written_by

    def __init__(self, config: LongitudeConfig):
        config = bidirectional_config(config)
        super().__init__(config)
        self.model = LongitudeEncoder(config)
        self.config = self.model.config  # one for both
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        output_attentions: bool | None = None,
        place_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits of each token and, with labels, the loss.

        Args:
            input_ids: [B, L].
            attention_mask: [B, L], 0 for padding, like position_ids, inputs_embeds and document_ids as in the encoder.
            position_ids: [B, L].
            inputs_embeds: [B, L, hidden_size].
            labels: [B, L], the token at each position, -100 if it is not predicted, as at most positions; padding is not
                predicted either.
            document_ids: [B, L].
            num_items_in_batch: divisor of the summed loss, for accumulated batches; default: the number of predicted tokens.
            skip_logits: with labels, return no logits; None skips them in training.
            output_hidden_states: as in LongitudeModel.
            output_attentions: as in LongitudeModel.
            place_ids: as in LongitudeModel.
            **kwargs: transformers' marks of packed text.

        Returns:
            MaskedLMOutput: logits [B, L, vocab_size] and the loss, mean nats per predicted token.
        """
        require_known(kwargs, type(self).forward, *Packed.__annotations__)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            document_ids=document_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            place_ids=place_ids,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        if labels is not None:
            if labels.shape != hidden.shape[:2]:
                raise UsageError("labels", f"{list(hidden.shape[:2])}", list(labels.shape))
            if attention_mask is not None:
                labels = labels.masked_fill(attention_mask == 0, IGNORED)
        loss, logits = predicted(self, hidden, labels, num_items_in_batch, skip_logits)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
