"""The scaling of Llama 3.1: by parts, with a ramp in rotations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longitude.errors import Positive, UsageError
from longitude.positions.scaling.base import (
    ORIGINAL_LENGTH,
    ROPE_TYPES,
    Factor,
    Method,
    RopeType,
    Scaling,
    plain,
    register_scheme,
    same,
)


def blend(theta: Tensor, factor: float, gamma: Tensor) -> Tensor:
    """(1 - gamma) theta/s + gamma theta, exact at 0, at 1 and for s = 1."""
    return torch.lerp(theta / factor, theta, gamma.to(theta.dtype))


def rotations_ramp(theta: Tensor, original: int, slow: float, fast: float) -> Tensor:
    """gamma_k from 0 at `slow` rotations within L to 1 at `fast`, linear in r_k = L theta_k / 2 pi; a step if they are equal."""
    rotations = original * theta / (2 * math.pi)
    if fast == slow:
        return (rotations >= slow).to(theta.dtype)
    return ((rotations - slow) / (fast - slow)).clamp(0, 1)


@register_scheme(
    "llama3",
    Method(
        "llama3",
        "Published with training at the new length after it; pairs that rotate more than 4 times stay as they are.",
        starts=True,
    ),
)
@dataclass(frozen=True)
class Llama3(Scaling):
    """Llama 3.1: (1 - gamma_k) theta_k/s + gamma_k theta_k, gamma_k = (r_k - low) / (high - low) within [0, 1].

    r_k = L theta_k / 2 pi is the number of rotations of pair k within L. The original code uses s = 8, L = 8192.

    Args:
        factor: s, of 1 or more.
        original_max_length: L, the training length in tokens.
        low_freq_factor: pairs of at most this many rotations within L become theta_k/s.
        high_freq_factor: pairs of at least this many stay; if it equals low_freq_factor (Llama 4 Scout), there is no ramp.

    Source:
        Grattafiori et al. 2024, arXiv 2407.21783, https://arxiv.org/abs/2407.21783
    """

    source = "Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783"
    factor: Factor
    original_max_length: int
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if high < low:
            raise UsageError("llama3", "high_freq_factor of at least low_freq_factor", f"{high!r} and {low!r}")

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta = plain(rotary_dim, base, device)
        ramp = rotations_ramp(theta, self.original_max_length, self.low_freq_factor, self.high_freq_factor)
        return blend(theta, self.factor, ramp)


ROPE_TYPES["llama3"] = RopeType(Llama3, same("factor low_freq_factor high_freq_factor"), ORIGINAL_LENGTH)
