"""Formulas of two biases, as classes that a backend can recognize: CoPE's counts and FIRE's function of the offset.

counted.h and curved.h evaluate them in the loop of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.errors import UsageError


@dataclass(frozen=True)
class Counted:
    """Bias of CoPE: `factor` q . E[count], with a table E [head_dim, columns]."""

    table: Tensor
    factor: float

    @property
    def columns(self) -> int:
        return self.table.shape[1]

    def logits(self, q: Tensor) -> Tensor:
        """Biases [B, H, L, columns] of queries [B, H, L, head_dim] for each count."""
        return q @ self.table.to(q.dtype) * self.factor

    def __call__(self, q: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
        return by_formula(scores, allowed, self.logits(q))


def by_formula(scores: Tensor, allowed: Tensor, logits: Tensor) -> Tensor:
    """Logits [..., columns], interpolated linearly at the count of each key: the sum of sigmoid(scores) from it to the end."""
    gates = torch.sigmoid(scores).masked_fill(~allowed, 0.0)
    counted = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=logits.shape[-1] - 1)
    del gates  # each of these is as large as the scores
    index = counted.detach().nan_to_num(0.0)  # NaN is no index; lerp passes it on
    weight = counted - index.floor()
    below = logits.gather(-1, index.floor().long())
    above = logits.gather(-1, index.ceil().long())
    return torch.lerp(below, above, weight)


@dataclass(frozen=True)
class NormalizedOffset:
    """Bias of FIRE: w2 relu(w1 t + b1) + b2, t = distances(i - j) / scale_of(i).

    A backend may use that it is piecewise linear in t.

    Args:
        distances: function of offsets that never decreases as |offset| increases; float32 or wider.
        scale_of: function of query positions, above 0, that never decreases as they increase.
        w1: [width, 1]; b1 [width], w2 [heads, width], b2 [heads], in the dtype of distances.
    """

    distances: Callable[[Tensor], Tensor]
    scale_of: Callable[[Tensor], Tensor]
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def require(self, q: Tensor) -> None:
        """UsageError unless its layers fit each other and the heads of queries [B, H, Lq, D]: kernels read them unchecked."""
        heads, width = q.shape[1], self.w1.shape[0]
        expected = (width, 1), (width,), (heads, width), (heads,)
        layers = self.w1, self.b1, self.w2, self.b2
        if [tuple(x.shape) for x in layers] != [*expected] or any(x.device != q.device for x in layers):
            got = ", ".join(f"{list(x.shape)} on {x.device}" for x in layers)
            raise UsageError("NormalizedOffset", f"layers {expected} on {q.device}", got)

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        """Bias [..., heads, Lq, Lk] of query positions i [..., Lq, 1] and key positions j [..., 1, Lk]."""
        with torch.autocast(i.device.type, enabled=False):
            share = self.distances(i - j) / self.scale_of(i)
            hidden = F.linear(share[..., None], self.w1, self.b1).relu()
            return F.linear(hidden, self.w2, self.b2).movedim(-1, -3)

    def curves(self) -> Tensor:
        """The linear pieces of the bias in ascending t, [heads, 3, width + 1]: slope t + level up to t = end.

        The three are slope, level and end. The last end is infinite. Slopes and levels have gradients.
        """
        w1, b1 = self.w1[:, 0], self.b1
        with torch.no_grad():
            ends = torch.where(w1 == 0, torch.inf, -b1 / w1)
            # At its end a unit is 0 without gradient: a falling unit is inactive from there on, a rising one up to there.
            ends = torch.where(w1 < 0, ends.nextafter(torch.full_like(ends, -torch.inf)), ends)
            ends, order = ends.sort()
            passed = torch.arange(len(ends) + 1, device=ends.device)[:, None] > order.argsort()  # [pieces, width]
            active = torch.where(w1 == 0, b1 > 0, torch.where(w1 > 0, passed, ~passed)).to(w1.dtype)
            ends = F.pad(ends, (0, 1), value=torch.inf)
        slopes, levels = (self.w2 * w1) @ active.mT, (self.w2 * b1) @ active.mT + self.b2[:, None]
        return torch.stack([slopes, levels, ends.expand_as(slopes)], 1)
