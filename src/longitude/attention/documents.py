"""Documents and padding as one number per token, however they were marked: where they begin, and each token's place."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.attention.masks import kind_of, numbers_by_ends
from longitude.errors import UsageError, unknown
from longitude.native.derivatives import numbers_of, readable, tracing
from longitude.native.tensors import in_memory
from longitude.positions.coordinates import Positions, explicit

BEGINS = "longitude_begins"
"""Attribute of a tensor of runs that caches which tokens begin a run, because every layer of a model reads it."""


def require_tokens(x: Tensor, dim: int) -> None:
    """ValueError unless x is [B, L, dim] and has tokens."""
    if x.dim() != 3 or x.shape[-1] != dim or x.numel() == 0:
        raise UsageError("x", f"[B, L, {dim}] with no empty dimension", list(x.shape))


def require_number_per_token(documents: Tensor, batch: int, keys: int) -> None:
    """ValueError unless documents is [batch, keys]."""
    if documents.shape != (batch, keys):
        raise UsageError("documents", f"[{batch}, {keys}], cached tokens included", list(documents.shape))


def runs_of(documents: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """Number the documents of each row 0, 1, 2, ... from a number per token; padding gets -1.

    A document is a run of tokens with the same number. A number that comes back later starts a new document: 0 0 1 1 0 0 is
    three documents. A negative number is padding and ends no document: 0 0 -1 0 is a single document with a padding token
    inside. Numbers depend only on earlier tokens, so those of cached tokens stay as a row grows. ValueError for floats.
    """
    if hasattr(documents, BEGINS):
        return documents
    runs, begins = _runs_and_begins(documents)
    if not torch.compiler.is_compiling():
        setattr(runs, BEGINS, begins)
    return runs


def begins_of(documents: Int[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """Which tokens begin a document after another one."""
    return _runs_and_begins(documents)[1] if torch.compiler.is_compiling() else getattr(runs_of(documents), BEGINS)


def places_of(documents: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """The place of each token in its document, from 0 on; padding before the first one has negative places."""
    runs, begins = runs_of(documents), begins_of(documents)
    order = torch.arange(runs.shape[1], device=runs.device).expand_as(runs)
    start = torch.where(begins, order, 0).cummax(1).values
    first = ((runs >= 0).cumsum(1) == 0).sum(1, keepdim=True)  # padding in front
    return order - torch.maximum(start, first)


def _runs_and_begins(documents: Tensor) -> tuple[Tensor, Tensor]:
    """The runs, and where they begin."""
    if documents.is_floating_point():
        raise UsageError("documents", "integers, one per token", kind_of(documents))
    documents = documents.long()
    real = documents >= 0
    before = documents
    if not readable(real) or not bool(real.all()):  # padding has the number of the nearest token before it
        order = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        nearest = torch.where(real, order, -1).cummax(1).values
        before = documents.gather(1, nearest.clamp(min=0)).masked_fill(nearest < 0, -1)
    begins = F.pad((before[:, 1:] != before[:, :-1]) & (before[:, :-1] >= 0), (1, 0))
    return begins.cumsum(1).masked_fill(~real, -1), begins


def padding_of(documents: Int[Tensor, "B Lk"], length: int) -> Bool[Tensor, "B L 1"] | None:
    """Which of the last tokens are padding; None if the CPU can tell that none is."""
    padding = (documents[:, documents.shape[1] - length :] < 0)[..., None]
    return padding if not in_memory(padding) or bool(padding.any()) else None


def last_position(
    positions: Positions, count: int, documents: Int[Tensor, "B Lk"] | None, before: int | Tensor
) -> int | Tensor:
    """Position of each row's last token that is no padding: an int, [1] or [B, 1].

    On several axes it is the largest position of its document, after which text continues.
    positions: positions of the last `count` tokens. documents: document numbers so far, None: a single document without
        padding.
    before: the last position before these tokens.
    """
    several = isinstance(positions, Tensor) and positions.dim() == 3
    if documents is None:
        if isinstance(positions, int):
            return positions + count - 1
        if not several:
            return positions[..., -1:]
        largest = positions.amax((1, 2))[:, None]
        return torch.maximum(largest, torch.as_tensor(before, device=largest.device))
    begins, real = begins_of(documents)[:, -count:], documents[:, -count:] >= 0
    places = explicit(positions, count, documents.device)
    places = (places.amax(-1) if several else places).expand(len(documents), -1)
    before = torch.as_tensor(before, device=places.device).expand(len(documents), 1)
    if several:
        document = begins.cumsum(1)
        last = document[:, -1:]
        largest = places.masked_fill(~real | (document != last), -1).amax(1, keepdim=True)
        return torch.where(last == 0, torch.maximum(largest, before), largest)
    order = torch.arange(count, device=places.device)
    at = torch.where(real, order, -1).amax(1, keepdim=True)
    return torch.where(at >= 0, places.gather(1, at.clamp(min=0)), before)


# ---- marks of documents and padding in the arguments of a model -------------------------------------------------------
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
    this call's tokens. They therefore need `alone`: no cache.

    Errors: ValueError for marks that contradict each other, do not fit, or come with a cache.
    """
    for name in packed:
        if name not in Packed.__annotations__:
            raise unknown("argument", name, Packed.__annotations__, "")
    marks: dict[str, Tensor] = {}
    if document_ids is not None:
        marks["document_ids"] = document_ids
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (ends := packed.get(name)) is not None:
            if batch != 1:
                raise UsageError(name, "batch 1, because it marks the documents of one row", f"batch {batch}")
            marks[name] = numbers_by_ends(name, ends, length)[None]
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
            f"{next(iter(others))}: they mark documents within one call, and this one has a cache; pass "
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
    for name, marks in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if marks is not None and marks.shape != (batch, keys):
            raise UsageError(name, f"[{batch}, {keys}], one per token, cached ones included", list(marks.shape))
    real = None if attention_mask is None else real_tokens(attention_mask)
    if document_ids is not None:
        require_numbers("document_ids", document_ids)
    if real is None:
        return None if document_ids is None else runs_of(document_ids)
    streams = torch.zeros(batch, keys, dtype=torch.long, device=device) if document_ids is None else document_ids
    return runs_of(streams.masked_fill(~real, -1))


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
        remedy = "mark padding with 0 in attention_mask, and give it any number of 0 or more here"
        raise UsageError(name, "numbers of 0 or more", int(numbers_of(numbers).min()), remedy)


# ---- places of the tokens of a model ---------------------------------------------------------------------------------
def has_gaps(streams: Int[Tensor, "B Lk"]) -> bool:
    """Whether padding is between two tokens of one document."""
    real, before = streams >= 0, streams.cummax(1).values[:, :-1]
    return bool(numbers_of(real[:, 1:] & ~real[:, :-1] & (before == streams[:, 1:])).any())


def without_gaps(streams: Int[Tensor, "B Lk"], past: int) -> tuple[Int[Tensor, "B Lk"], Int[Tensor, "B L"] | None]:
    """The streams with padding between tokens of a document moved in front, and the order of the new tokens; None: as it is.

    Cached tokens, the first `past`, were put into this order by the calls that cached them. ValueError if padding remains between
    cached and new tokens.
    """
    if tracing() or not has_gaps(streams):
        return streams, None
    orders = [(part >= 0).byte().argsort(dim=1, stable=True) for part in streams.tensor_split([past], 1)]
    streams = streams.gather(1, torch.cat([orders[0], orders[1] + past], 1))
    if has_gaps(streams):
        raise ValueError(
            "attention_mask: padding is between cached and new tokens of one sequence; expected it before the cached ones"
        )
    return runs_of(streams), orders[1]


def in_order(x: Tensor, order: Int[Tensor, "B L"]) -> Tensor:
    """The tokens of x [B, L, ...] in this order; x [L] is the same for every row."""
    x = x.expand(len(order), -1) if x.dim() == 1 else x
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def places_in(streams: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """The place of each token in its document; 0 for padding, which is between no tokens of one document."""
    return places_of(streams).masked_fill(streams < 0, 0)


def places_after(streams: Int[Tensor, "B Lk"], past: int, cached: Tensor | None) -> Int[Tensor, "B Lk"]:
    """`places_in`, but the document in which the `past` cached tokens end continues after the last of them.

    On several axes it continues after the largest of their positions, also those of images. cached: positions [n], [B, n]
    or [B, n, axes] of the last n of them; None without a cache.
    """
    places = places_in(streams)
    if cached is None or not past:
        return places
    cached = cached.to(streams.device)
    cached = cached if cached.dim() == 3 else cached[..., -1:].view(-1, 1, 1)
    last, held = streams[:, past - 1, None], streams[:, past - cached.shape[1] : past]
    largest = cached.amax(-1).expand(len(streams), -1).masked_fill(held != last, -1).amax(1, keepdim=True)
    after = places + (largest - places[:, past - 1, None]).where(streams == last, 0)
    return after.clamp(min=0)  # a run of padding continues nothing, and its positions mean nothing
