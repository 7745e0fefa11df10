"""What no query and key can exceed, and what may therefore be left out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longitude.attention.backends.table.bias import Bias

SAFE = 40.0  # e^40, sums of as many, times values of at most 1e15, and the inverses stay in float32
NOTHING = {torch.float32: 60 * math.log(2), torch.float64: 120 * math.log(2)}
"""e^-this is a weight that changes no digit of a sum of weights."""


@dataclass(frozen=True)
class Bound:
    """|scale q.k| <= most [H], by Cauchy and Schwarz: scale times the longest q times the longest k.

    safe: e^score is of ordinary size, so rows need not be lowered by their highest score. faint: weights may be too small for
    ordinary numbers, and then take many times as long to make and to multiply: those of scores below `faintest`, in base 2,
    change no digit and become 0. vast: scores whose own rounding is more than 1.
    """

    most: Tensor
    finite: bool
    safe: bool
    faint: bool
    faintest: float
    vast: bool

    @classmethod
    def of(cls, bias: Bias, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Bound:
        wide = bias.table.dtype
        longest_q, longest_k = (torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax((0, 2)) for x in (q, k))
        longest_k = longest_k.repeat_interleave(q.shape[1] // k.shape[1])
        if bias.key_vectors is not None and bias.key_vectors.shape[1] > 0:
            longest_k = longest_k + torch.linalg.vector_norm(bias.key_vectors, dim=-1).amax()
        most = abs(scale) * longest_q * longest_k
        tables = bias.table[:, bias.band.first : bias.band.last + 1]
        highest, lowest = tables.amax(1) + most, tables.amin(1) - most
        own = bias.own()
        safe = (
            bool(torch.linalg.vector_norm(v, dim=-1, dtype=wide).amax() < 1e15)
            and own is not None
            and bool(((highest <= SAFE) & (own - most >= -SAFE)).all())
            and bias.levels_only_fall()
        )
        if bias.k_level is not None and bias.q_level is not None:
            lowest = lowest - float(bias.k_level.amax() - bias.q_level.amin())
        faint = not bool((lowest - (0.0 if safe else highest) > -60.0).all())
        finite = bool(torch.isfinite(most).all())
        return cls(most, finite, safe, faint, math.log2(torch.finfo(wide).tiny) + 26, not bool((most < 2.0**18).all()))

    def denormal(self, bias: Bias) -> bool:
        """Whether weights of the forward pass may be denormal, after pruning; bias in base 2."""
        if not self.safe or bias.k_level is not None:
            return True
        lowest = bias.table.masked_fill(bias.table == -math.inf, 0.0).amin(1) - self.most / math.log(2)
        return not bool((lowest > math.log2(torch.finfo(bias.table.dtype).tiny)).all())

    def pruned(self, bias: Bias, *rows: Tensor) -> Bias:
        """Without keys whose weight is nothing: at most e^(bias - bias at the query's own diagonal + 2 most).

        rows: what weights are multiplied with, [..., D]; where some rows are far longer than usual, less is nothing. None is
        left out where both tables and levels or vectors speak, where a row may not see its own diagonal, or where a number is
        not finite.
        """
        if not self.finite:
            return replace(bias, strict=True)
        own = bias.own()
        only_levels = bias.k_level is not None and bias.near == bias.band.diagonals
        if own is None or not (only_levels or bias.is_table):
            return bias
        enough = NOTHING[bias.table.dtype]
        if not only_levels and not bool(
            (bias.table[:, bias.band.first : bias.band.last] < own[:, None] - enough).any()
        ):
            return bias  # the quick way out for tables that are not steep
        enough += sum(unevenness(x) for x in rows)
        if not math.isfinite(enough):
            return bias
        if only_levels:
            return replace(bias, fall=2 * self.most + enough)
        nothing = bias.table < (own - 2 * self.most - enough)[:, None]
        starts = (~nothing).int().argmax(1).tolist()
        return replace(bias, table=bias.table.masked_fill(nothing, -math.inf), starts=tuple(starts))


def unevenness(rows: Tensor) -> float:
    """Ln of the longest row [..., D] over the geometric mean of those that are not zero; not finite where they are not."""
    long = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.promote_types(rows.dtype, torch.float32))
    some = long[long != 0]
    return float(some.amax().log() - some.log().mean()) if some.numel() else 0.0
