"""Cross-entropy of next tokens without keeping [tokens, vocabulary] logits at long lengths."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.errors import UsageError
from longitude.native.derivatives import exporting, recomputed

IGNORED = -100
CHUNK_LOGITS = 2**24
"""Logits held at once: 64 MiB in float32."""


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
