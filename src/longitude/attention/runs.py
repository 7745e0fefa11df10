"""Which tokens are padding, which begin a document, and where a row has come to: read from one number per token."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.positions.base import Positions, explicit


def beginnings(documents: Int[Tensor, "B Lk"]) -> tuple[Bool[Tensor, "B Lk"], Bool[Tensor, "B Lk"]]:
    """Which tokens begin a document after another one, and which are no padding (a negative number). Padding inside a document
    does not end it."""
    real = documents >= 0
    order = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    latest = (
        torch.where(real, order, -1).cummax(1).values
    )  # each token's own place, or that of the last one before padding
    before = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
    begins = real & (before >= 0) & (documents.gather(1, before.clamp(min=0)) != documents)
    return begins, real


def last_position(
    positions: Positions, count: int, documents: Int[Tensor, "B Lk"] | None, before: int | Tensor
) -> int | Tensor:
    """Position of each row's last token that is no padding; on several axes the largest of its document, which text goes on
    after. An int, or [1] or [B, 1].

    positions: of the last `count` tokens; documents: of all so far, None: one document without padding; before: the answer for
    the tokens before these.
    """
    several = isinstance(positions, Tensor) and positions.dim() == 3
    if documents is None:
        if isinstance(positions, int):
            return positions + count - 1
        if not several:
            return positions[..., -1:]
        largest = positions.amax((1, 2))[:, None]
        return torch.maximum(largest, torch.as_tensor(before, device=largest.device))
    begins, real = (flags[:, -count:] for flags in beginnings(documents))
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
