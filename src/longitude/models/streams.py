"""Documents and padding as one number per token, however they were marked, and each token's place in its document."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.documents import begins_of, flattened, runs_of
from longitude.errors import UsageError, unknown
from longitude.native.derivatives import numbers_of, readable, tracing


class Packed(TypedDict, total=False):
    """The arguments with which transformers and its collators mark packed text, besides position_ids that start over.

    cu_seq_lens_q, cu_seq_lens_k: starts of the documents in a single row, the flattened batch, and its length at the end.
    max_length_q, max_length_k: length of the longest document, or more. seq_idx [B, L]: a document number per token.
    """

    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | Tensor | None
    max_length_k: int | Tensor | None
    seq_idx: Tensor | None


def documents_of(  # noqa: C901
    batch: int,
    length: int,
    document_ids: Tensor | None,
    position_ids: Any,
    attention_mask: Tensor | None,
    alone: bool,
    causal: bool = True,
    **packed: Any,
) -> Tensor | None:
    """Document numbers of a call, from any of the inputs that mark documents; None if none does.

    Shape [B, Lk] if they come from document_ids, else [B, L].

    packed: as in Packed. position_ids [L] or [B, L] mark the start of a document by a position that is not larger than the
    previous one, in causal models without an attention_mask, as in transformers. (In transformers a step of more than one also
    starts a document; here positions may skip, as randomized ones do.) Documents marked by position_ids and Packed cover only
    this call's tokens. They therefore need `alone`: no cache and no memories.

    Errors: ValueError for marks that contradict each other, do not fit, or come with a cache or memories.
    """
    for name in packed:
        if name not in Packed.__annotations__:
            raise unknown("argument", name, Packed.__annotations__, "")
    marks: dict[str, Tensor] = {}
    if document_ids is not None:
        marks["document_ids"] = document_ids
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (ends := packed.get(name)) is not None:
            marks[name] = flattened(name, ends, batch, length)
    if (numbers := packed.get("seq_idx")) is not None:
        if numbers.shape != (batch, length) or numbers.is_floating_point():
            raise UsageError("seq_idx", f"integers [{batch}, {length}]", f"{numbers.dtype} {list(numbers.shape)}")
        require_numbers("seq_idx", numbers)
        marks["seq_idx"] = numbers.long()
    restarts = None
    if causal and attention_mask is None:
        restarts = starting_over(position_ids, batch, length)
    if restarts is not None and not marks:
        marks["position_ids that start over"] = restarts.long().cumsum(1)
    if not marks:
        return None
    name, documents = next(iter(marks.items()))
    others = {other: numbers for other, numbers in marks.items() if other != "document_ids"}
    if others and not alone:
        raise ValueError(
            f"{next(iter(others))}: they mark documents within one call, and this one has a cache or memories; pass "
            "document_ids of all tokens, cached ones included, or use_cache=False (for one sequence: an attention_mask of ones)"
        )
    if tracing():
        return documents
    for other, numbers in others.items():
        if other != name and not _equal(runs_of(numbers), runs_of(documents)):
            raise ValueError(f"{other} and {name} mark different documents; expected the same, or one of them alone")
    if restarts is not None and document_ids is None and bool(numbers_of(restarts & ~begins_of(documents)).any()):
        raise ValueError(f"position_ids start over within a document of {name}; expected the same documents")
    for other in ("max_length_q", "max_length_k"):
        most = packed.get(other)
        if most is not None and int(most) < (longest := int(numbers_of(places_in(runs_of(documents))).max()) + 1):
            raise UsageError(other, f"{longest}, the length of the longest document, or more", int(most))
    return documents


def _equal(a: Tensor, b: Tensor) -> bool:
    """torch.equal, under torch.func.vmap too: whether they are equal in every call."""
    return a.shape == b.shape and not bool(numbers_of(a != b).any())


def starting_over(position_ids: Any, batch: int, length: int) -> Tensor | None:
    """Which tokens' positions [L], [1, L] or [B, L] are not larger than the ones before them, bool [B, L].

    None if none is, for no positions, positions of several axes, and shapes that do not fit.
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() not in (1, 2) or position_ids.shape[-1] != length:
        return None
    if length == 1:
        return None
    position_ids = position_ids.expand(batch, -1) if position_ids.dim() == 1 or len(position_ids) == 1 else position_ids
    if len(position_ids) != batch:
        return None
    again = F.pad(position_ids[:, 1:] <= position_ids[:, :-1], (1, 0))
    return again if not readable(again) or bool(again.any()) else None


def streams_of(
    attention_mask: Tensor | None, document_ids: Tensor | None, batch: int, keys: int, device: torch.device
) -> Tensor | None:
    """The number of each token's document in its row, cached ones included, [B, Lk], as runs_of counts; -1 for padding.

    None: all one.
    """
    for name, given in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if given is not None and given.shape != (batch, keys):
            raise UsageError(name, f"[{batch}, {keys}], one per token, cached ones included", list(given.shape))
    real = None if attention_mask is None else real_tokens(attention_mask)
    if document_ids is not None:
        require_numbers("document_ids", document_ids)
    if real is None:
        return None if document_ids is None else runs_of(document_ids)
    streams = torch.zeros(batch, keys, dtype=torch.long, device=device) if document_ids is None else document_ids
    streams = runs_of(streams.masked_fill(~real, -1))
    if not tracing():
        require_runs(streams)
    return streams


def real_tokens(attention_mask: Tensor) -> Tensor | None:
    """Which tokens are no padding, bool; None if all are. ValueError unless every number of the mask is 0 or 1."""
    real = attention_mask == 1
    if not readable(attention_mask):  # no number can be looked at, so a mask of ones stays, too
        if attention_mask.is_floating_point():
            raise UsageError("attention_mask", "int or bool in a compiled graph", attention_mask.dtype)
        return attention_mask != 0
    if bool(real.all()):
        return None
    if attention_mask.dtype != torch.bool and not bool((real | (attention_mask == 0)).all()):
        other = attention_mask[~real & (attention_mask != 0)].flatten()[0]
        raise UsageError("attention_mask", "1 for tokens and 0 for padding", other.item())
    return real


def require_numbers(name: str, numbers: Tensor) -> None:
    """ValueError for a negative document number: in `streams_of` those mark padding."""
    if not tracing() and bool((numbers_of(numbers) < 0).any()):
        raise UsageError(
            name,
            "numbers of 0 or more",
            int(numbers_of(numbers).min()),
            "mark padding with 0 in attention_mask, and give it any number of 0 or more here",
        )


def require_runs(streams: Tensor) -> None:
    """ValueError if padding is between two tokens of one run: places and contexts have no meaning across it."""
    real, before = streams >= 0, streams.cummax(1).values[:, :-1]
    if bool(numbers_of(real[:, 1:] & ~real[:, :-1] & (before == streams[:, 1:])).any()):
        raise ValueError(
            "attention_mask: padding is between tokens of one sequence; expected it at one side, "
            "on the left where a cache continues"
        )


def places_in(streams: Tensor) -> Tensor:
    """Each token's place in its own run of streams [B, L] -> [B, L]; 0 for padding."""
    order = torch.arange(streams.shape[1], device=streams.device).expand_as(streams)
    return (order - starts_of(streams)).masked_fill(streams < 0, 0)


def starts_of(streams: Tensor) -> Tensor:
    """Index of the first token of each token's document, [B, L], from document numbers `streams` [B, L]."""
    order = torch.arange(streams.shape[1], device=streams.device).expand_as(streams)
    first = F.pad(streams[:, 1:] != streams[:, :-1], (1, 0), value=True)
    return torch.where(first, order, 0).cummax(1).values


def places_after(streams: Tensor, past: int, cached: Tensor | None) -> Tensor:
    """`places_in`, but the run in which the `past` cached tokens end continues after the last of them.

    On several axes it continues after the largest of their positions, also those of images. cached: positions [n], [B, n]
    or [B, n, axes] of the last n of them; None without a cache.
    """
    places = places_in(streams)
    if cached is None or not past:
        return places
    cached = cached.to(streams.device)
    cached = cached if cached.dim() == 3 else cached[..., -1:].view(-1, 1, 1)
    starts = starts_of(streams)
    last, held = starts[:, past - 1, None], starts[:, past - cached.shape[1] : past]
    largest = cached.amax(-1).expand(len(streams), -1).masked_fill(held != last, -1).amax(1, keepdim=True)
    after = places + (largest - places[:, past - 1, None]).where(starts == last, 0)
    return after.clamp(min=0)  # a run of padding continues nothing, and its positions mean nothing
