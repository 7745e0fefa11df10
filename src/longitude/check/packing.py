"""Laws of documents packed as transformers' collator packs them: with cu_seq_lens for attention, seq_idx for recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longitude.check.batching import each_as_alone
from longitude.check.recorder import recorded
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.testing.engine import DoesNotApply, Measurement, one_line

SIZES = (5, 11, 8)
"""Tokens of the documents."""
KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
RESTS = ("config", "repeatable", "causality", "packed_documents")


def collated(subject: Subject) -> tuple[Tensor, dict[str, Any]]:
    """Documents in one row [1, L], and the arguments that DataCollatorWithFlattening adds."""
    ends = torch.tensor([0, *SIZES], device=subject.device).cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES)).int()[None]
    options: dict[str, Any] = {key: max(SIZES) if key.startswith("max") else ends for key in KEYS}
    options["seq_idx"] = ids.to(subject.device)
    if "position_ids" in subject.takes:
        options["position_ids"] = torch.cat([torch.arange(size) for size in SIZES])[None].to(subject.device)
    return subject.tokens(sum(SIZES)), options


@CHECKPOINT_LAWS.law(threshold=0, rests_on=RESTS)
def packed_lengths(subject: Subject) -> Measurement:
    """The lengths of packed documents reach the attention of each layer.

    cu_seq_lens or positions that begin again, as flash attention takes them. The number counts layers that get neither.
    """
    if not getattr(type(subject.model), "_supports_flash_attn", False):
        raise DoesNotApply("its class has no flash attention, which alone takes the lengths of documents")
    tokens, options = collated(subject)
    del options["seq_idx"]
    try:
        found = recorded(subject, tokens, **options)
    except (TypeError, ValueError) as error:
        raise DoesNotApply(f"its forward refuses cu_seq_lens ({one_line(error)[:120]})") from error
    wrong = [index for index, one in found.items() if not declares(one.options, options)]
    cause = (
        f"of {len(found)} layers {', '.join(map(str, wrong))} get neither cu_seq_lens nor position_ids that begin again: with "
        "flash attention documents in one row attend to each other there"
    )
    return Measurement(len(wrong), 0, cause=cause)


def declares(got: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether the arguments of attention mark the document boundaries, in the format of flash attention."""
    if all(got.get(key) is not None for key in KEYS):
        return torch.equal(got[KEYS[0]], given[KEYS[0]])
    at = got.get("position_ids")
    return (
        isinstance(at, Tensor)
        and "position_ids" in given
        and torch.equal(at.reshape(-1, at.shape[-1])[-1:], given["position_ids"])
    )


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=RESTS)
def packed_states(subject: Subject) -> Measurement:
    """States begin again at each packed document.

    Of recurrent layers: logits of documents in one row, with seq_idx, cu_seq_lens and positions, = each alone.
    """
    if not subject.recurrent:
        raise DoesNotApply("it has no recurrent layers")
    tokens, options = collated(subject)
    try:
        return each_as_alone(
            subject,
            tokens,
            SIZES,
            options,
            "drops seq_idx without its kernels, and states run on into the next document",
            "run on into the next, though seq_idx and cu_seq_lens are given",
        )
    except (TypeError, ValueError) as refusal:
        raise DoesNotApply(
            f"its forward refuses seq_idx ({one_line(refusal)[:120]}); pack none into one row"
        ) from refusal
