"""LongRoPE: a factor for each pair, found by search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.errors import Positive, UsageError, check_positive
from longitude.positions.coordinates import constants
from longitude.positions.scaling.base import Factor, Follow, Follows, plain, register_scheme, rope_type


@register_scheme(
    "longrope",
    "Up to the original length the short factors are used, beyond it the long ones, with one attention factor for both: "
    "a cache that crosses the border has keys rotated by the other factors.",
    searched=True,
)
@rope_type("longrope", "short_factor long_factor", "original_max_position_embeddings factor attention_factor")
@dataclass(frozen=True)
class LongRoPE(Follows):
    """LongRoPE: theta_k / lambda_k, where lambda is short_factor for lengths up to L and long_factor beyond.

    cos and sin are multiplied by sqrt(1 + ln s / ln L), whichever list is used.

    Args:
        short_factor: rotary_dim/2 positive numbers, for lengths up to L.
        long_factor: rotary_dim/2 positive numbers, for lengths beyond L.
        original_max_length: L, the training length in tokens.
        factor: s; None: max_length / L.
        max_length: the length that follow="declared" is made for; None: factor L.
        attention_factor: multiplies cos and sin instead of the formula.
        follow: "declared", "row" (the query's position + 1) or "sequence" (the newest key's position + 1).

    Source:
        Ding et al. 2024, arXiv 2402.13753, https://arxiv.org/abs/2402.13753
    """

    source = "Ding et al. 2024, https://arxiv.org/abs/2402.13753"
    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_length: int
    factor: Factor | None = None
    max_length: int | None = None
    attention_factor: Positive | None = None
    follow: Follow = "declared"

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if not isinstance(factors, list | tuple):
                raise UsageError("longrope", f"{name} to be a list of numbers", repr(factors))
            # Published lists start at 0.998, so the paper's bound of 1 is not ours.
            check_positive(self.name, **{f"{name}[{i}]": number for i, number in enumerate(factors)})
            object.__setattr__(self, name, tuple(factors))
        if self.attention_factor is None and self.factor is None and self.max_length is None:
            raise UsageError("longrope", "factor, max_length or attention_factor, for cos and sin", "none")
        if self.attention_factor is None and self.original_max_length < 2:
            raise UsageError("longrope", "an original_max_length of 2 or more", "1")

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta = plain(rotary_dim, base, device)
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(self, name))) != len(theta):
                raise UsageError("longrope", f"{name} of {len(theta)} numbers (rotary_dim/2)", count)
        short, long = (constants(x, theta.dtype, device) for x in (self.short_factor, self.long_factor))
        is_long = self.followed(length) > self.original_max_length
        if isinstance(is_long, bool):
            return theta / (long if is_long else short)
        return theta / torch.where(torch.as_tensor(is_long, device=device), long, short)

    def declared(self) -> int | None:
        if self.max_length is None and self.factor is not None:
            return math.ceil(self.factor * self.original_max_length)
        return self.max_length

    def factors(self) -> tuple[float, float]:
        if self.attention_factor is not None:
            return self.attention_factor, 1.0
        s = self.factor or (self.max_length or self.original_max_length) / self.original_max_length
        return (math.sqrt(1 + math.log(s) / math.log(self.original_max_length)) if s > 1 else 1.0), 1.0

    def canonical(self, length: Any) -> Any:
        return self.original_max_length + (length > self.original_max_length)
