"""Cross-entropy of next tokens without ever holding [tokens, vocabulary] logits at long lengths."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100
CHUNK_LOGITS = 2**24
"""Logits held at once: 64 MiB in float32."""


def next_token_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Mean nats per predicted token, logits in float32 or wider.

    hidden [B, L, dim]; weight [vocab, dim]; targets [B, L], the token after each, IGNORED where none is predicted.
    num_items_in_batch: what to divide by instead of the number of targets, for accumulated batches. Where the logits do not
    fit CHUNK_LOGITS they are made chunk by chunk, forgotten, and made again in backward.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    rows = max(1, CHUNK_LOGITS // len(weight))

    def chunk_loss(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    if len(targets) <= rows:
        total = chunk_loss(hidden, targets, weight)
    else:
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        total = torch.stack([checkpoint(chunk_loss, h, t, weight, use_reentrant=False) for h, t in parts]).sum()
    if num_items_in_batch is None:
        num_items_in_batch = (targets != IGNORED).sum()
    return total / num_items_in_batch
