"""Which stream each token belongs to, and its place there: documents and padding as one number per token."""

from __future__ import annotations

import torch
from torch import Tensor


def streams_of(
    attention_mask: Tensor | None, document_ids: Tensor | None, batch: int, keys: int, device: torch.device
) -> Tensor | None:
    """Which stream each token belongs to, cached ones included, [B, Lk]: its document, or -1 for padding. None: all one."""
    for name, given in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if given is not None and given.shape != (batch, keys):
            raise ValueError(
                f"{name}: expected [{batch}, {keys}], one per token, cached ones included, got {list(given.shape)}"
            )
    # A mask of ones is no mask. Looking would break a compiled graph, so there it stays.
    if attention_mask is not None and not torch.compiler.is_compiling() and bool(attention_mask.all()):
        attention_mask = None
    if document_ids is not None and not torch.compiler.is_compiling() and bool((document_ids < 0).any()):
        raise ValueError("document_ids: expected numbers of 0 or more; say padding in attention_mask")
    if attention_mask is None:
        return document_ids
    if attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask: expected 1 for tokens and 0 for padding, of int or bool, got {attention_mask.dtype}"
        )
    streams = torch.zeros(batch, keys, dtype=torch.long, device=device) if document_ids is None else document_ids
    streams = streams.masked_fill(attention_mask == 0, -1)
    if not torch.compiler.is_compiling():
        require_runs(streams)
    return streams


def require_runs(streams: Tensor) -> None:
    """ValueError where padding stands between two tokens of one stream: places and contexts have no meaning across it."""
    real, order = streams >= 0, torch.arange(streams.shape[1], device=streams.device).expand_as(streams)
    before = torch.where(real, order, -1).cummax(1).values[:, :-1]  # the nearest token before each
    goes_on = (before >= 0) & (streams.gather(1, before.clamp(min=0)) == streams[:, 1:])
    if bool((real[:, 1:] & ~real[:, :-1] & goes_on).any()):
        raise ValueError(
            "attention_mask: padding stands between tokens of one sequence; expected it at one side, "
            "on the left where a cache goes on"
        )


def places_in(streams: Tensor) -> Tensor:
    """Each token's place in its own run of streams [B, L] -> [B, L]; 0 for padding."""
    order = torch.arange(streams.shape[1], device=streams.device).expand_as(streams)
    return (order - starts_of(streams)).masked_fill(streams < 0, 0)


def starts_of(streams: Tensor) -> Tensor:
    """Where each token's own run of streams [B, L] begins -> [B, L]."""
    order = torch.arange(streams.shape[1], device=streams.device).expand_as(streams)
    first = torch.ones_like(streams, dtype=torch.bool)
    first[:, 1:] = streams[:, 1:] != streams[:, :-1]
    return torch.where(first, order, 0).cummax(1).values


def places_after(streams: Tensor, past: int, cached: Tensor | None) -> Tensor:
    """`places_in`, but for the run that `past` cached tokens end in: what follows stands behind the last of them, on several
    axes behind the largest of their positions, images among them. cached: positions [n], [B, n] or [B, n, axes] of the last n
    of them; None without a cache."""
    places = places_in(streams)
    if cached is None or not past:
        return places
    cached = cached.to(streams.device)
    cached = cached if cached.dim() == 3 else cached[..., -1:].view(-1, 1, 1)
    starts = starts_of(streams)
    last, held = starts[:, past - 1, None], starts[:, past - cached.shape[1] : past]
    largest = cached.amax(-1).expand(len(streams), -1).masked_fill(held != last, -1).amax(1, keepdim=True)
    return places + (largest - places[:, past - 1, None]).where(starts == last, 0)
