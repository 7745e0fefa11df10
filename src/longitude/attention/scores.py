"""Functions of terms that several backends use: repeated key heads, offsets, and the sum of drift levels."""

from __future__ import annotations

from torch import Tensor

from longitude.attention.request import Request
from longitude.positions.base import Drift


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """[B, Hkv, ...] -> [B, heads, ...]: each head of the keys serves a group of queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def offsets(r: Request) -> Tensor:
    """Query position - key position, [..., Lq, Lk]."""
    i, j = r.places()
    return i[..., :, None] - j[..., None, :]


def drift_level(r: Request) -> Tensor | None:
    """The sum of the levels of all drifts, [B, H, stream]: level_i - level_j is added to the scores. None without drifts."""
    level = None
    for term in r.terms:
        if isinstance(term, Drift):
            levels = per_query_head(r.scale * term.level if term.scaled else term.level, r.heads)
            level = levels if level is None else level + levels
    return level
