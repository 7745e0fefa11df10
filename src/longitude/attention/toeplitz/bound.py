"""What no query and key can exceed, and what may therefore be left out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longitude.attention.toeplitz.bias import Bias

SAFE = 40.0  # e^40, sums of as many, and their inverses are far from the ends of float32
NOTHING = {torch.float32: 60 * math.log(2), torch.float64: 120 * math.log(2)}
"""e^-this is a weight that changes no digit of a sum of weights."""


@dataclass(frozen=True)
class Bound:
    """|scale q.k| <= most [H], by Cauchy and Schwarz: scale times the longest q times the longest k.

    safe: e^score is of ordinary size, so rows need not be lowered by their highest score. faint: weights may be too small for
    ordinary numbers, and then take many times as long to make and to multiply: those of scores below `faintest`, in base 2,
    change no digit and become 0."""

    most: Tensor
    finite: bool
    safe: bool
    faint: bool
    faintest: float

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
        safe = own is not None and bool(((highest <= SAFE) & (own - most >= -SAFE)).all()) and bias.levels_only_fall()
        if bias.k_level is not None and bias.q_level is not None:
            lowest = lowest - float(bias.k_level.amax() - bias.q_level.amin())
        faint = not bool((lowest - (0.0 if safe else highest) > -60.0).all())
        finite = bool(torch.isfinite(most).all())
        return cls(most, finite, safe, faint, math.log2(torch.finfo(wide).tiny) + 26)

    def pruned(self, bias: Bias, *others: Tensor) -> Bias:
        """Without keys whose weight is nothing: at most e^(bias - bias at the query's own diagonal + 2 most).

        None is left out where both tables and levels or vectors speak, where a row may not see its own diagonal, or where a
        number is not finite, in q, k or the others that weights are multiplied with."""
        own, enough = bias.own(), NOTHING[bias.table.dtype]
        only_levels = bias.k_level is not None and bias.near == bias.band.diagonals
        if own is None or not (only_levels or bias.is_table):
            return bias
        if only_levels:
            return replace(bias, fall=2 * self.most + enough) if self.finite and _finite(*others) else bias
        nothing = bias.table < (own - 2 * self.most - enough)[:, None]
        if not (bool(nothing[:, bias.band.first : bias.band.last].any()) and self.finite and _finite(*others)):
            return bias
        starts = (~nothing).int().argmax(1).tolist()
        return replace(bias, table=bias.table.masked_fill(nothing, -math.inf), starts=tuple(starts))


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(torch.linalg.vector_norm(x))) for x in tensors)
