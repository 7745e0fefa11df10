"""What a call of an attention layer says about its tokens, checked once: who sees whom, where they stand, what came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longitude.attention.documents import runs_of
from longitude.attention.length_dependent import later, newest, require_same_past
from longitude.attention.masks import Documents, Mask, Padding, require_mask
from longitude.attention.operation import require_causal
from longitude.attention.request import following
from longitude.positions.base import Positions, canonical
from longitude.positions.composed import Composed

if TYPE_CHECKING:
    from longitude.attention.cache import LongitudeCacheLayer


class Call(NamedTuple):
    """x [B, L, dim], the tokens that get keys; mask, with documents and padding in it; positions of x; past: tokens in the
    cache; remembered: how many of x, the first, ask nothing because they are a memory; documents [B, L] of x alone.
    """

    x: Tensor
    mask: Mask
    positions: Positions
    past: int
    remembered: int
    documents: Tensor | None

    @property
    def keys(self) -> int:
        return self.past + self.x.shape[1]


def called(
    x: Tensor,
    dim: int,
    encoding: Composed,
    mask: Mask,
    positions: Positions | None,
    documents: Tensor | None,
    cache: LongitudeCacheLayer | None,
    memory: Tensor | None,
) -> Call:
    """ValueError in words for what does not fit, before a cache takes tokens in. Arguments as in MultiHeadAttention.forward."""
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"x: expected [B, L, {dim}], got {list(x.shape)}")
    if x.numel() == 0:
        raise ValueError(f"x: expected no empty dimension, got {list(x.shape)}")
    remembered = 0
    if memory is not None:
        if cache is not None or memory.dim() != 3 or memory.shape[::2] != x.shape[::2]:
            with_cache = " and a cache; a cache remembers by itself" if cache is not None else ""
            raise ValueError(
                f"memory: expected [{x.shape[0]}, M, {x.shape[2]}] and no cache, got {list(memory.shape)}{with_cache}"
            )
        x, remembered = torch.cat([memory.detach(), x], 1), memory.shape[1]
    past, length = cache.get_seq_length() if cache is not None else 0, x.shape[1]
    if cache is not None and past and cache.keys is not None and len(cache.keys) != len(x):
        raise ValueError(f"x: expected a batch of {len(cache.keys)}, as the cache holds, got {len(x)}")
    keys = past + length
    require_mask(mask)
    if documents is None and encoding.reads_tokens and _hides_tokens(mask.parts()):
        raise ValueError("mask: the encoding reads the tokens too; say documents and padding as documents= instead")
    if documents is not None:
        if documents.shape != (x.shape[0], keys):
            raise ValueError(
                f"documents: expected [{x.shape[0]}, {keys}], cached tokens included, got {list(documents.shape)}"
            )
        documents = runs_of(documents)
        mask = mask & Documents(documents) & Padding(documents >= 0)
    if positions is None:
        positions = cache.next_positions() if cache is not None else 0
        if isinstance(positions, Tensor):
            positions = following(positions, length)
    else:
        # A model hands positions with axes to all its layers, those that measure one included.
        axes = encoding.axes
        if isinstance(positions, Tensor) and positions.dim() == 3:
            axes = max(2, positions.shape[-1])
        positions = canonical("positions", positions, x.shape[0], length, axes)
    mask.validate(x.shape[0], length - remembered, keys)
    require_causal(encoding, mask)
    if cache is not None and past:
        mask.require_past(past)
        if not encoding.stable_keys:
            now = later(newest(cache.positions, cache.held), newest(positions, length))
            require_same_past(encoding, cache.reached, now)
    return Call(x, mask, positions, past, remembered, None if documents is None else documents[:, past:])


def _hides_tokens(parts: Sequence[Mask]) -> bool:
    return any(isinstance(mask, Documents | Padding) for mask in parts)
