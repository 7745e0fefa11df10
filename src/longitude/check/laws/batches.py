"""Laws of batches: a row alone or with others, padded or not, documents packed or apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import masking_utils

from longitude.check.causes import in_parts
from longitude.check.laws.decoding import CACHE, RESTS
from longitude.check.laws.passes import require_one_way
from longitude.check.recorder import as_allowed, recorded
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.testing.engine import DoesNotApply, Measurement, one_line

GENERATED = 64
"""Tokens that generate() is made to write, at most."""
SIZES = (5, 11, 8)
"""Tokens of documents, as the collator packs them."""
KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=RESTS)
def batch_invariance(subject: Subject) -> Measurement:
    """A row in a batch = the row alone."""
    tokens = subject.tokens(subject.length, rows=3)
    together = subject.logits(tokens)
    errors = [subject.error(together[r : r + 1], subject.logits(row[None])) for r, row in enumerate(tokens)]
    return subject.measurement(torch.stack(errors).amax(0), "other rows change a row")


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*CACHE, "chunked_prefill", "batch_invariance"))
def left_padding(subject: Subject) -> Measurement:
    """Rows padded on the left = each alone.

    Of several lengths: a whole pass, and generate(). Without padding: a mask of ones = no mask.
    """
    require_one_way(subject)
    subject.require("attention_mask", "padding cannot be declared")
    length, pads = subject.length, (0, 3, subject.length // 3)
    tokens = subject.tokens(length, rows=len(pads))
    padded, mask = subject.padded(tokens, pads)
    alone = [subject.logits(padded[r : r + 1, pad:]) for r, pad in enumerate(pads)]
    # one token less: if positions are counted from 1, the table may have none for the last
    row = tokens[:1, :-1]
    of_ones = subject.error(subject.logits(row, attention_mask=torch.ones_like(row)), subject.logits(row))
    if subject.first_above(of_ones) is not None:
        return subject.measurement(of_ones, "a mask of ones changes a row")
    worst = torch.zeros(length, dtype=torch.float64, device=padded.device)
    for held in (padded, tokens):  # the embedding of padding_idx is zero, which hides that padding is read
        together = subject.logits(held, attention_mask=mask, **subject.positions(mask))
        for r, pad in enumerate(pads):
            worst[pad:] = worst[pad:].maximum(subject.error(together[r : r + 1, pad:], alone[r]))
    ways = {"a whole pass": worst}
    # XLNet's generate() asks in another way
    if hasattr(subject.model, "generate") and "perm_mask" not in subject.takes:
        prompt, end = length // 2, min(length, length // 2 + GENERATED)
        answer, generated = subject.generated(padded[:, :end], prompt, mask), torch.zeros_like(worst)
        written = slice(prompt - 1, end - 1)
        for r, pad in enumerate(pads):
            want = alone[r][:, prompt - 1 - pad : end - 1 - pad]
            generated[written] = generated[written].maximum(subject.error(answer[r : r + 1], want))
        ways["generate()"] = generated
    return subject.measurement(ways, "padding on the left changes a row")


# ---- packing -----------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*CACHE, "chunked_prefill", "left_padding"))
def packing(subject: Subject) -> Measurement:
    """Documents packed into one row = each alone.

    Documents are declared by positions that begin again, or by document_ids. As transformers' collator packs them: their lengths
    (cu_seq_lens) or such positions reach the attention of each layer, as flash attention takes them; and with seq_idx, states of
    recurrent layers begin again at each.
    """
    require_one_way(subject)
    return in_parts(subject, {"documents": documents, "lengths": lengths, "states": states})


def documents(subject: Subject) -> Measurement:
    """Error of packed documents that are declared by their positions or ids."""
    sizes = [subject.length // 4, 1, subject.length // 2 - 1, subject.length // 4]  # one of a single token
    tokens = subject.tokens(sum(sizes))
    if "document_ids" in subject.takes:
        ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        options = {"document_ids": ids[None].to(tokens.device)}
    elif "position_ids" in subject.takes:
        options = {"position_ids": torch.cat([torch.arange(size) for size in sizes])[None].to(tokens.device)}
    else:
        raise DoesNotApply(
            "forward takes no position_ids, so the start of a document cannot be declared; pack none into one row"
        )
    # Only an unmodified class may leave documents together, and only if it never asks for masks that separate them.
    joins = joining_mask(subject, tokens, options) if subject.stock else ""
    return each_as_alone(
        subject,
        tokens,
        sizes,
        options,
        "" if joins else "does not look for packed documents, and those in one row attend to each other",
        f"attend to each other: {joins} gets position_ids that begin again, and its mask does not separate them"
        if joins
        else f"attend to each other: {next(iter(options))} that begin again do not reach the mask (expected where forward gets "
        "neither a cache nor an attention_mask)",
    )


def joining_mask(subject: Subject, tokens: Tensor, options: Mapping[str, Any]) -> str:
    """Name of a mask function of transformers that gets positions that begin again and joins documents; "" if none does.

    The call shows whether the class hands its positions over, so a broken mask function cannot hide that it does.
    """
    joining: list[str] = []

    def spying(make: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **named: Any) -> Any:
            mask, asked = make(*args, **named), signature(make).bind(*args, **named).arguments
            positions = asked.get("position_ids")
            if positions is not None and asked.get("attention_mask") is None and asked.get("cache") is None:
                begins = (positions[0].diff() != 1).nonzero().flatten().tolist()
                # Without a tensor, attention is causal over the whole row.
                if begins and (
                    not isinstance(mask, Tensor) or as_allowed(mask)[begins[0] + 1 :, : begins[0] + 1].any()
                ):
                    joining.append(make.__name__)
            return mask

        return spy

    with ExitStack() as stack:
        for module in {sys.modules[type(part).__module__] for part in subject.model.modules()}:
            for name, make in list(vars(module).items()):
                if name.endswith("causal_mask") and getattr(make, "__module__", "") == masking_utils.__name__:
                    stack.enter_context(patch.object(module, name, spying(make)))
        subject.logits(tokens, **options)
    return next(iter(joining), "")


def collated(subject: Subject) -> tuple[Tensor, dict[str, Any]]:
    """Documents in one row [1, L], and the arguments that DataCollatorWithFlattening adds."""
    ends = torch.tensor([0, *SIZES], device=subject.device).cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES)).int()[None]
    options: dict[str, Any] = {key: max(SIZES) if key.startswith("max") else ends for key in KEYS}
    options["seq_idx"] = ids.to(subject.device)
    if "position_ids" in subject.takes:
        options["position_ids"] = torch.cat([torch.arange(size) for size in SIZES])[None].to(subject.device)
    return subject.tokens(sum(SIZES)), options


def lengths(subject: Subject) -> Measurement:
    """How many layers get neither cu_seq_lens nor positions that begin again."""
    if not getattr(type(subject.model), "_supports_flash_attn", False):
        raise DoesNotApply("its class has no flash attention, which alone takes the lengths of documents")
    tokens, options = collated(subject)
    del options["seq_idx"]
    try:
        layers = recorded(subject, tokens, **options)
    except (TypeError, ValueError) as error:
        raise DoesNotApply(f"its forward refuses cu_seq_lens ({one_line(error)[:120]})") from error
    wrong = [index for index, layer in layers.items() if not declares(layer.options, options)]
    cause = (
        f"of {len(layers)} layers {', '.join(map(str, wrong))} get neither cu_seq_lens nor position_ids that begin again: with "
        "flash attention documents in one row attend to each other there"
    )
    return Measurement(len(wrong), 0, cause=cause)


def declares(got: dict[str, Any], packed: dict[str, Any]) -> bool:
    """Whether the arguments of attention mark the document boundaries, in the format of flash attention."""
    if all(got.get(key) is not None for key in KEYS):
        return torch.equal(got[KEYS[0]], packed[KEYS[0]])
    at = got.get("position_ids")
    return (
        isinstance(at, Tensor)
        and "position_ids" in packed
        and torch.equal(at.reshape(-1, at.shape[-1])[-1:], packed["position_ids"])
    )


def states(subject: Subject) -> Measurement:
    """Error of packed documents in a model with recurrent layers, with seq_idx, cu_seq_lens and positions."""
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


def each_as_alone(
    subject: Subject, tokens: Tensor, sizes: Sequence[int], options: Mapping[str, Any], stock: str, joined: str
) -> Measurement:
    """Documents of these sizes in one row [1, L] against each alone.

    If one changes another, transformers' own classes are as published, and DoesNotApply gives the reason `stock`, unless it is
    empty; code of others fails, with the cause `joined`.
    """
    together = subject.logits(tokens, **options)
    apart = torch.cat([subject.logits(document) for document in tokens.split([*sizes], 1)], 1)
    error, cause = subject.error(together, apart), "are not what each is alone"
    if subject.first_above(error) is not None and one_depends_on_another(subject, tokens, sizes, options):
        if subject.stock and stock:
            kind, by = f"{type(subject.model).__name__} of transformers", f"by {float(error.max()):.1e}"
            raise DoesNotApply(f"{kind} {stock} ({by}); give each a row of its own here")
        cause = joined
    return subject.measurement(error, f"documents packed into one row {cause}")


def one_depends_on_another(subject: Subject, tokens: Tensor, sizes: Sequence[int], options: Mapping[str, Any]) -> bool:
    """Whether later documents change if the first one is replaced."""
    changed = torch.cat([subject.tokens(sizes[0], seed=1), tokens[:, sizes[0] :]], 1)
    before, after = (subject.logits(row, **options)[:, sizes[0] :] for row in (tokens, changed))
    return subject.first_above(subject.error(after, before)) is not None
