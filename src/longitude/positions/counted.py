"""CoPE's counts, by formula; counted.h counts in the loop of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counted:
    """Bias of CoPE: `factor` q . E[count], with a table E [head_dim, columns].

    It is a class so that a backend can recognize the formula and count with a faster kernel.
    """

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
