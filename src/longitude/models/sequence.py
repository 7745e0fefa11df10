"""A batch of long sequences cut for several processes, and the checks of a model that is called with a slice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.masks import Causal
from longitude.attention.sequence_slice import SequenceSlice
from longitude.errors import UsageError
from longitude.models.loss import IGNORED
from longitude.models.streams import Packed, documents_of, places_in, streams_of


def cut_sequence(batch: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """Cut this process's slice of a batch for sequence parallelism: the arguments of a causal model.

        loss = model(**lg.models.cut_sequence(batch)).loss      # the sum over processes is the loss of the whole batch
        loss.backward()                                  # and the sum of their gradients is its gradient

    The model is a LongitudeForCausalLM, or a Transformers model with attn_implementation="longitude". Every process passes the
    same whole batch and gets 1/n of its tokens, with their positions in the sequence and shifted labels. The attention_mask is
    a SequenceSlice, with which attention passes keys and values around the processes. DistributedDataParallel averages
    gradients: multiply the loss by the number of processes there.

    A Transformers model that never reads attention_mask, such as RWKV, treats its part as a whole sequence. That cannot be
    detected here; `SequenceParallelTrainer` and `extend` raise ValueError for it.

    Args:
        batch: input_ids [B, L]; optionally labels, position_ids, attention_mask of 0 and 1, document_ids, seq_idx [B, L] and
            cu_seq_lens_q, as in LongitudeForCausalLM; num_items_in_batch, by default the number of predicted tokens in the
            whole batch.
        group: A torch.distributed process group; None for all processes.

    Returns:
        input_ids, position_ids [B, local length], attention_mask; with labels also labels and shift_labels [B, local length],
        both already shifted, and num_items_in_batch.

    Raises:
        ValueError: For other arguments, fewer than two tokens per process, and marks of documents that contradict each other.
    """
    given = {name: value for name, value in batch.items() if value is not None}
    known = ("input_ids", "labels", "position_ids", "attention_mask", "document_ids", "num_items_in_batch")
    for name in given:
        if name not in (*known, *Packed.__annotations__):
            raise UsageError("cut_sequence", f"{', '.join((*known, *Packed.__annotations__))}", name)
    if "input_ids" not in given:
        raise UsageError("cut_sequence", "input_ids [B, L]", "none")
    ids: Tensor = given["input_ids"]
    count, length = ids.shape
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if positions is not None and (positions.dim() > 2 or positions.shape[-1] != length):
        raise UsageError("position_ids", f"[L] or [B, L] with L = {length}", list(positions.shape))
    packed = {name: given[name] for name in Packed.__annotations__ if name in given}
    documents = documents_of(count, length, given.get("document_ids"), positions, mask, True, **packed)
    streams = streams_of(mask, documents, count, length, ids.device)
    if positions is None and streams is not None:
        positions = places_in(streams)
    share = SequenceSlice(length, group, documents=streams, positions=positions)
    cut: dict[str, Any] = {"input_ids": share.cut(ids), "attention_mask": share}
    cut["position_ids"] = share.own_positions(ids.device).expand(count, -1)
    if (labels := given.get("labels")) is not None:
        after = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if streams is not None:  # a document's last token predicts nothing, nor does padding
            crossing = F.pad(streams[:, 1:] != streams[:, :-1], (0, 1), value=False)
            after = after.masked_fill(crossing | (streams < 0), IGNORED)
        predicted = given.get("num_items_in_batch")
        cut["num_items_in_batch"] = (after != IGNORED).sum() if predicted is None else predicted
        cut["shift_labels"] = cut["labels"] = share.cut(after)
    return cut


def require_slice(model: Any, share: SequenceSlice, position_ids: Tensor | None, others: Mapping[str, Any]) -> Tensor:
    """Positions of a slice's tokens. ValueError for a model that cannot share a sequence, and for `others` that are set."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected none with a SequenceSlice, which is a sequence without a past")
    if not isinstance(model.mask, Causal) or model.cross:
        raise ValueError("SequenceSlice: expected a decoder of one stream such as LongitudeForCausalLM")
    for mixer in model.mixers:
        if not mixer.shares_sequence:
            raise ValueError(
                f"SequenceSlice: {type(mixer).__name__} cannot share a sequence among processes; expected MultiHeadAttention or "
                "WindowAttention in all layers, or one process"
            )
    positions = share.own_positions(model.embed_tokens.weight.device)
    if position_ids is not None and not torch.equal(position_ids, positions.expand(position_ids.shape)):
        raise UsageError("position_ids", "those of the SequenceSlice", "others", "pass positions to cut_sequence")
    return positions
