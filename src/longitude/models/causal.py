"""The decoder with a head that predicts the next token."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from longitude.models.configuration import LongitudeConfig
from longitude.models.decoder import LongitudeModel, LongitudePreTrainedModel
from longitude.models.inputs import CheckedGenerationMixin, DecoderInputs, documents_in, require_known, with_names
from longitude.models.loss import IGNORED, predicted, require_labels
from longitude.models.stock_caches import renames_cache


class LongitudeForCausalLM(LongitudePreTrainedModel, CheckedGenerationMixin):
    """A causal language model with any registered encoding and mixers; works with Trainer, generate() and the Auto classes.

    Args:
        config: The model's configuration.

    Raises:
        ValueError: For an encoding that no mixer of the model supports.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LongitudeConfig):
        super().__init__(config)
        self.model = LongitudeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._is_stateful = self.model.forgets
        self.post_init()

    @renames_cache
    @can_return_tuple
    @with_names(DecoderInputs)
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids [B, L] -> logits [B, L, vocab_size] and, given labels, the loss: mean nats per predicted token.

        In training with labels it returns no logits, so that [L, vocab_size] is never held.

        Args:
            input_ids: Tokens [B, L]; or inputs_embeds.
            labels: [B, L], shifted here; -100 is not predicted, and neither padding nor a document's last token predicts.
            logits_to_keep: The last n (0: all), or the indices of the wanted ones.
            num_items_in_batch: Predicted tokens over all batches of a step, to divide the loss by.
            inputs: As in DecoderInputs; and shift_labels [B, L], labels that are shifted already.

        Returns:
            transformers' output with loss and logits.

        Raises:
            ValueError: For inputs that do not fit the model or each other, and for unknown arguments.
        """
        # shift_labels has no parameter, because Trainer evaluates only batches with every one that has "label" in its name.
        shift_labels: Tensor | None = inputs.pop("shift_labels", None)
        require_known(inputs, DecoderInputs, type(self).forward)
        outputs = self.model(input_ids, return_dict=True, **inputs)
        hidden = outputs.last_hidden_state
        require_labels(hidden, labels=labels, shift_labels=shift_labels)
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
            # a document's last token does not predict the next document's first
            if (documents := documents_in(inputs, len(labels), labels.shape[1])) is not None:
                ends = documents[:, -hidden.shape[1] :]
                crossing = F.pad(ends[:, 1:] != ends[:, :-1], (0, 1), value=False)
                shift_labels = shift_labels.masked_fill(crossing, IGNORED)
            if (attention_mask := inputs.get("attention_mask")) is not None:  # and padding predicts nothing
                shift_labels = shift_labels.masked_fill(attention_mask[:, -hidden.shape[1] :] == 0, IGNORED)
        loss, logits = predicted(self, hidden, shift_labels, num_items_in_batch, logits_to_keep)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
