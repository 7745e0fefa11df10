"""Packed documents, given by a number per token: where they begin, padding, and positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.attention.masks import kind_of
from longitude.errors import UsageError
from longitude.native.derivatives import readable
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
    runs, begins = _found(documents)
    if not torch.compiler.is_compiling():
        setattr(runs, BEGINS, begins)
    return runs


def begins_of(documents: Int[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """Which tokens begin a document after another one."""
    return _found(documents)[1] if torch.compiler.is_compiling() else getattr(runs_of(documents), BEGINS)


def places_of(documents: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """The place of each token in its document, from 0 on; padding before the first one has negative places."""
    runs, begins = runs_of(documents), begins_of(documents)
    order = torch.arange(runs.shape[1], device=runs.device).expand_as(runs)
    start = torch.where(begins, order, 0).cummax(1).values
    first = ((runs >= 0).cumsum(1) == 0).sum(1, keepdim=True)  # padding in front
    return order - torch.maximum(start, first)


def _found(documents: Tensor) -> tuple[Tensor, Tensor]:
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


def flattened(name: str, ends: Tensor, batch: int, length: int) -> Tensor:
    """cu_seq_lens of one row, [n + 1]: where its n documents begin, and its length -> a number per token, [1, L]."""
    if batch != 1:
        raise UsageError(name, "batch 1, because it marks the documents of one row", f"batch {batch}")
    if not isinstance(ends, Tensor) or ends.dim() != 1 or ends.is_floating_point() or len(ends) < 2:
        raise UsageError(name, "integers [documents + 1]", kind_of(ends))
    if not torch.compiler.is_compiling():
        bounds = ends.tolist()
        if bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
            raise UsageError(name, f"numbers that rise from 0 to the {length} tokens", bounds)
    return torch.bucketize(torch.arange(length, device=ends.device), ends[1:].long(), right=True)[None]
