"""Schemes that change all pairs equally: position interpolation, or another base."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longitude.errors import check_positive
from longitude.positions.scaling.base import Scaling, plain, register_scheme


@register_scheme("linear")
@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: theta_k / s, so positions p/s stay fractions.

    Args:
        factor: s, of 1 or more.

    Source:
        Chen et al. 2023, arXiv 2306.15595, https://arxiv.org/abs/2306.15595
    """

    source = "Chen et al. 2023, https://arxiv.org/abs/2306.15595"
    factor: float

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, base, device) / self.factor


@register_scheme("base_change")
@dataclass(frozen=True)
class BaseChange(Scaling):
    """Adjusted base frequency: another base in base^(-2k/d), for models trained on with it.

    Args:
        base: the new base, above 0.

    Source:
        Xiong et al. 2023, arXiv 2309.16039, https://arxiv.org/abs/2309.16039
    """

    source = "Xiong et al. 2023, https://arxiv.org/abs/2309.16039"
    base: float

    def __post_init__(self) -> None:
        check_positive(self.name, base=self.base)

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, self.base, device)
