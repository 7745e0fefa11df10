"""Resonance RoPE: wavelengths of whole tokens, so that far positions repeat the rotations of near ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from longitude.errors import UsageError
from longitude.positions.scaling.base import Factor, Scaling, plain, register_scheme
from longitude.positions.scaling.parts import YaRN


@register_scheme(
    "resonance",
    "Published for models trained with it: wavelengths of fast pairs are rounded, too, which yarn leaves as they are.",
    needs_training=True,
)
@dataclass(frozen=True)
class Resonance(YaRN):
    """Resonance RoPE: 2 pi / round(2 pi / theta_k), so that pair k repeats after a whole number of tokens, at least one.

    A pair whose wavelength is within the training length then never rotates by an angle that training did not show. With a
    factor above 1 the theta_k are YaRN's.

    Args:
        factor: s of YaRN; 1: frequencies without scaling, for training.
        original_max_length: L of YaRN; None with a factor of 1.
        beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim: see YaRN.

    Raises:
        ValueError: a factor without original_max_length.

    Source:
        Wang et al. 2024, arXiv 2403.00071, https://arxiv.org/abs/2403.00071
    """

    source = "Wang et al. 2024, https://arxiv.org/abs/2403.00071"
    factor: Factor = 1.0
    original_max_length: int | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor > 1 and self.original_max_length is None:
            raise UsageError(self.name, f"original_max_length with factor={self.factor}", "None")

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        if self.factor > 1:
            theta = super().frequencies(rotary_dim, base, length, device)
        else:
            theta = plain(rotary_dim, base, device)
        return 2 * math.pi / (2 * math.pi / theta).round().clamp(min=1)

    def then(self, scheme):
        return Resonance(**vars(scheme)) if self.factor == 1 and type(scheme) is YaRN else None

    def written(self, base, rotary_dim):
        return Scaling.written(self, base, rotary_dim)  # no rope_type rounds
