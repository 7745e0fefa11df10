"""Clipped RoPE: pairs that never complete a rotation within the trained length turn more slowly, or not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longitude.errors import check_flags, check_sizes
from longitude.positions.scaling.base import Scaling, plain, register_scheme


@register_scheme("clipped")
@dataclass(frozen=True)
class Clipped(Scaling):
    """Clipped RoPE: the n slowest pairs fade out, theta_k (1 + cos(pi j / (n - 1))) / 2 for j = 0 .. n - 1; fast pairs stay.

    The authors call it CoPE, which is also the name of another encoding, `cope`. The first of the n stays, the last does not
    rotate. Use it if slow pairs should carry content instead of distances that training never showed in full.

    Args:
        original_max_length: L, the trained length in tokens.
        pairs: n; None: the pairs that complete no rotation within L. The authors' code clips 20 of Llama 3's 64.
        hard: whether all n pairs have frequency 0 instead.

    Source:
        Li et al. 2026, arXiv 2602.05258, https://arxiv.org/abs/2602.05258
    """

    source = "Li et al. 2026, https://arxiv.org/abs/2602.05258"
    original_max_length: int
    pairs: int | None = None
    hard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self.name, hard=self.hard)
        if self.pairs is not None:
            check_sizes(self.name, pairs=self.pairs)

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta, count = plain(rotary_dim, base, device), rotary_dim // 2
        slow = sum(base ** (-2 * k / rotary_dim) * self.original_max_length < 2 * math.pi for k in range(count))
        n = min(count, slow if self.pairs is None else self.pairs)  # an int, for graphs
        steps = torch.arange(
            n, dtype=theta.dtype, device=theta.device
        )  # linspace fails while transformers loads a model
        fade = (1 + (math.pi * steps / max(1, n - 1)).cos()) / 2
        return torch.cat([theta[: count - n], theta[count - n :] * (0 if self.hard else fade)])
