"""The encoder, with bidirectional attention; also alone, with a head for masked language modeling."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Unpack

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from longitude.attention.masks import NoMask
from longitude.attention.mixer import MIXERS
from longitude.errors import UsageError
from longitude.models.causal import IGNORED, predicted, require_labels
from longitude.models.configuration import LongitudeConfig, mixer_class
from longitude.models.decoder import LongitudeModel, LongitudePreTrainedModel
from longitude.models.inputs import TokenInputs, require_known, with_names
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
        return [bidirectional(member) for member in spec]
    return {**spec, "bidirectional": True} if isinstance(spec, dict) and "bidirectional" in spec else spec


class LongitudeEncoder(LongitudeModel):
    """Tokens [B, L] -> hidden states [B, L, hidden_size], each of all tokens of its document."""

    mask = NoMask()
    written_by = "LongitudeForMaskedLM"

    def __init__(self, config: LongitudeConfig):
        super().__init__(bidirectional_config(config))
        for member in (member for composed in self.encoding_of_layer for member in composed):
            if member.causal_only:
                able = [name for name in list_encodings() if getattr(ENCODINGS[name], "causal_only", None) is False]
                raise ValueError(
                    f"encoding: {type(member).__name__} has no meaning for tokens in the future, and an encoder attends to them; "
                    f"expected one of {', '.join(able)}"
                )

    @can_return_tuple
    @with_names(TokenInputs)
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (no cache, no source)
        self, input_ids: Tensor | None = None, **inputs: Unpack[TokenInputs]
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the encoder: LongitudeModel without a cache. position_ids that start over mark no documents here.

        Args:
            input_ids: [B, L]; or inputs_embeds.
            inputs: as in TokenInputs.
        """
        require_known(inputs, TokenInputs, type(self).forward)
        return super().forward(input_ids, use_cache=False, return_dict=True, **inputs)  # pyright: ignore[reportCallIssue]  (the decorator takes it)


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
    @with_names(TokenInputs)
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Unpack[TokenInputs],
    ) -> MaskedLMOutput:
        """Logits of each token, with labels in training none, and with labels the loss.

        Args:
            input_ids: [B, L]; or inputs_embeds.
            labels: [B, L], the token at each position, -100 if it is not predicted, as at most positions; padding is not
                predicted either.
            num_items_in_batch: divisor of the summed loss, for accumulated batches; default: the number of predicted tokens.
            inputs: as in TokenInputs.

        Returns:
            MaskedLMOutput: logits [B, L, vocab_size] and the loss, mean nats per predicted token.
        """
        require_known(inputs, TokenInputs, type(self).forward)
        outputs = self.model(input_ids, return_dict=True, **inputs)
        hidden = outputs.last_hidden_state
        require_labels(hidden, labels=labels)
        if labels is not None and (attention_mask := inputs.get("attention_mask")) is not None:
            labels = labels.masked_fill(attention_mask == 0, IGNORED)
        loss, logits = predicted(self, hidden, labels, num_items_in_batch)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
