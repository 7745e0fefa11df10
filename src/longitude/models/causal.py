"""The decoder with a head that predicts the next token, and the loss of every head.

The loss never keeps [tokens, vocabulary] logits at long lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from longitude.errors import UsageError
from longitude.models.configuration import LongitudeConfig
from longitude.models.decoder import LongitudeModel, LongitudePreTrainedModel
from longitude.models.inputs import CheckedGenerationMixin, DecoderInputs, documents_in, require_known, with_names
from longitude.models.stock_caches import renames_cache
from longitude.native.derivatives import exporting, recomputed

IGNORED = -100
CHUNK_LOGITS = 2**24
"""Logits held at once: 64 MiB in float32."""


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


# ---- the loss --------------------------------------------------------------------------------------------------------
def require_labels(hidden: Tensor, **labels: Tensor | None) -> None:
    """UsageError unless labels are None, or a number for each token of hidden [B, L, dim]."""
    for name, numbers in labels.items():
        if numbers is not None and numbers.shape != hidden.shape[:2]:
            raise UsageError(name, f"{list(hidden.shape[:2])}", list(numbers.shape))


def predicted(
    model: Any,
    hidden: Tensor,
    targets: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    logits_to_keep: int | Tensor = 0,
) -> tuple[Tensor | None, Tensor | None]:
    """The loss (None without targets) and the logits of hidden [B, L, dim], by model.lm_head; None with targets in training.

    logits_to_keep: the number of last tokens with logits (0: all), or indices of tokens. The loss uses the returned logits if
    they are those of all tokens; else it computes its own.
    """
    head, vocabulary = model.lm_head, model.config.vocab_size
    wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    logits = None if targets is not None and model.training else head(hidden[:, wanted])
    if targets is None:
        return None, logits
    if logits is not None and isinstance(logits_to_keep, int) and logits.shape[1] == hidden.shape[1]:
        return next_token_loss(logits, lambda x: x, vocabulary, targets, num_items_in_batch), logits
    return next_token_loss(hidden, head, vocabulary, targets, num_items_in_batch), logits


def next_token_loss(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    targets: Tensor,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Mean nats per predicted token, logits in float32 or wider.

    hidden [B, L, dim]; head: function to logits [..., vocabulary]; targets [B, L]: next tokens, IGNORED if not predicted.
    num_items_in_batch: divisor instead of the number of targets, for accumulated batches. If the logits exceed CHUNK_LOGITS
    they are computed chunk by chunk, discarded, and recomputed in backward.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    rows = max(1, CHUNK_LOGITS // vocabulary)

    def chunk_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    if exporting() or len(targets) <= rows:
        total = chunk_loss(hidden, targets)
    else:
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        total = torch.stack([recomputed(chunk_loss, h, t) for h, t in parts]).sum()
    if num_items_in_batch is None:
        num_items_in_batch = (targets != IGNORED).sum()
    return total / num_items_in_batch
