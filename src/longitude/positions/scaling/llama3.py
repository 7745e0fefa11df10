"""The scaling of Llama 3.1: by parts, with a ramp in rotations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longitude.errors import UsageError, check_positive
from longitude.positions.scaling.base import Scaling, plain, register_scheme
from longitude.positions.scaling.yarn import blend, rotations_ramp


@register_scheme("llama3")
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
    factor: float
    original_max_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.low_freq_factor, self.high_freq_factor
        check_positive(self.name, low_freq_factor=low, high_freq_factor=high)
        if high < low:
            raise UsageError("llama3", "high_freq_factor of at least low_freq_factor", f"{high!r} and {low!r}")

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta = plain(rotary_dim, base, device)
        ramp = rotations_ramp(theta, self.original_max_length, self.low_freq_factor, self.high_freq_factor)
        return blend(theta, self.factor, ramp)
