"""Scaling schemes of one formula each: position interpolation, another base, clipped slow pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longitude.errors import Positive, UsageError
from longitude.positions.scaling.base import METHODS, Factor, Method, Scaling, plain, register_scheme, rope_type

UNROTATED = 1e30
"""Factor of "linear", which every family reads, that disables rotation: cos is 1, and sin vanishes in every dtype."""


@register_scheme(
    "linear",
    "Adjacent positions come closer together than in training: fine-tune before use; short contexts cost as well.",
    starts=True,
)
@rope_type("proportional", optional="factor")
@rope_type("linear", "factor")  # the first, which `written` takes
@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: theta_k / s, so positions p/s stay fractions.

    Args:
        factor: s, of 1 or more.

    Source:
        Chen et al. 2023, arXiv 2306.15595, https://arxiv.org/abs/2306.15595
    """

    source = "Chen et al. 2023, https://arxiv.org/abs/2306.15595"
    factor: Factor

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, base, device) / self.factor


METHODS["drope"] = Method(
    "drope",
    "No layer of full attention rotates any more, written as linear with a factor beyond every position. Short contexts "
    "are lost until the model is recalibrated: train it on at the original length.",
    lambda factor, original_length: Linear(UNROTATED),
    needs_training=True,
)


def is_unrotated(scheme: Scaling | None) -> bool:
    """Whether a scheme leaves no rotation, as "drope" writes it."""
    return isinstance(scheme, Linear) and scheme.factor >= UNROTATED


@register_scheme(
    "base",
    "Made for training on: without it, a larger base alone extends about as far as ntk.",
    needs_training=True,
)
@dataclass(frozen=True)
class BaseChange(Scaling):
    """Adjusted base frequency: another base in base^(-2k/d), for models whose training continues with it.

    Args:
        base: the new base, above 0.

    Source:
        Xiong et al. 2023, arXiv 2309.16039, https://arxiv.org/abs/2309.16039
    """

    source = "Xiong et al. 2023, https://arxiv.org/abs/2309.16039"
    base: Positive

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, self.base, device)

    def written(self, base, rotary_dim):
        return "default", self.base, None


@register_scheme(
    "clipped",
    "Published with training at the new length after it; the pairs that it fades are lost.",
    needs_training=True,
)
@dataclass(frozen=True)
class Clipped(Scaling):
    """Clipped RoPE: the n slowest pairs fade out, theta_k (1 + cos(pi j / (n - 1))) / 2 for j = 0 .. n - 1; fast pairs stay.

    The authors call it CoPE, which is also the name of another encoding, `cope`. The first of the n stays, the last does not
    rotate. Use it if slow pairs should carry content instead of distances that training never showed in full.

    Args:
        original_max_length: L, the training length in tokens.
        pairs: n; None: the pairs that complete no rotation within L. The authors' code clips 20 of Llama 3's 64.

    Source:
        Li et al. 2026, arXiv 2602.05258, https://arxiv.org/abs/2602.05258
    """

    source = "Li et al. 2026, https://arxiv.org/abs/2602.05258"
    original_max_length: int
    pairs: int | None = None

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta, count = plain(rotary_dim, base, device), rotary_dim // 2
        slow = sum(base ** (-2 * k / rotary_dim) * self.original_max_length < 2 * math.pi for k in range(count))
        n = slow if self.pairs is None else self.pairs  # an int, for graphs
        if n > count:
            raise UsageError(f"{self.name}: pairs", f"at most {count} (rotary_dim/2)", n)
        # linspace fails while transformers loads a model
        steps = torch.arange(n, dtype=theta.dtype, device=theta.device)
        fade = (1 + (math.pi * steps / max(1, n - 1)).cos()) / 2
        return torch.cat([theta[: count - n], theta[count - n :] * fade])
