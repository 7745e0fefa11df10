"""NTK-aware scaling: a larger base, so that fast pairs hardly change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.errors import UsageError
from longitude.positions.coordinates import wide
from longitude.positions.scaling.base import (
    Factor,
    Follow,
    Follows,
    Scaling,
    at_least,
    plain,
    register_scheme,
    rope_type,
)


def ntk_base(who: str, base: float, stretch: Any, rotary_dim: int) -> Any:
    """The new base, base * stretch^(d/(d-2)): the slowest frequency is divided by exactly `stretch`, the fastest stays."""
    if rotary_dim < 4:
        raise UsageError(who, "a rotary_dim of 4 or more", rotary_dim, "one pair has no slower one")
    return base * stretch ** (rotary_dim / (rotary_dim - 2))


@register_scheme(
    "ntk",
    "Fast pairs hardly change; near the new length some pairs still rotate further than in training: take a longer --to "
    "than you need, or fine-tune.",
    starts=True,
)
@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware: base * s^(d/(d-2)) instead of base, so the slowest frequency is divided by s and the fastest stays.

    Args:
        factor: s, of 1 or more; the original code calls it alpha.

    Source:
        bloc97 2023, https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5; Peng et al. 2023, section 3.1, arXiv 2309.00071,
        https://arxiv.org/abs/2309.00071
    """

    source = "bloc97 2023, https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5"
    factor: Factor

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, ntk_base(self.name, base, self.factor, rotary_dim), device)

    def written(self, base, rotary_dim):
        if rotary_dim is None:
            raise UsageError("NTK", "head_dim, on which the exported rope_theta depends", "None")
        return "default", ntk_base(self.name, base, self.factor, rotary_dim), None


@register_scheme(
    "dynamic",
    "Unchanged up to the original length, which max_position_embeddings must keep. Beyond it every token changes the "
    "frequencies, and keys cached before were rotated by others: cached decoding drifts from a whole pass.",
    raises_length=False,
)
@rope_type("dynamic", "factor")
@dataclass(frozen=True)
class DynamicNTK(Follows):
    """NTK-aware scaling that grows with the sequence: base * (s l/L - (s - 1))^(d/(d-2)) at length l, base while l <= L.

    Args:
        factor: s, of 1 or more.
        original_max_length: L, the training length in tokens.
        max_length: the length that follow="declared" is made for.
        follow: "declared" (l = max_length), "row" (the query's position + 1, beyond L rounded up to sixteenths of L, so that
            neighbours share tables) or "sequence" (the newest key's position + 1).

    Source:
        emozilla 2023, https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr
    """

    source = "emozilla 2023, https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr"
    factor: Factor
    original_max_length: int
    max_length: int | None = None
    follow: Follow = "declared"

    @classmethod
    def extending(cls, factor, original_length):
        return cls(factor, original_length, max_length=math.ceil(factor * original_length), follow="sequence")

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        s, original = self.factor, self.original_max_length
        dtype = wide(device or torch.device("cpu"))
        length = at_least(self.followed(length), original)
        # torch.as_tensor would copy an int, and a copy waits for a GPU.
        length = (
            length.to(device, dtype)
            if isinstance(length, Tensor)
            else torch.full((), length, dtype=dtype, device=device)
        )
        stretch = s * (length / original) - (s - 1)
        return plain(rotary_dim, ntk_base(self.name, base, stretch, rotary_dim), device)

    def canonical(self, length: Any) -> Any:
        original = self.original_max_length
        step = 1 if self.follow == "sequence" else max(1, original // 16)
        return original - (original - at_least(length, original)) // step * step
