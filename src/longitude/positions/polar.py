"""Position as the angle, content as the magnitude (PoPE)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import Positive, UsageError
from longitude.positions.base import Encoding, register
from longitude.positions.coordinates import require_positions, wide
from longitude.positions.rotation import RotaryTable, table_of


@register("pope")
class PoPE(Encoding):
    """PoPE, RoPE in polar coordinates: a token's content sets magnitudes, its position sets angles, independently.

        score(i, j) = scale sum_{c<d} softplus(q_ic) softplus(k_jc) cos((i - j) theta_c - b_hc),    theta_c = base^(-c/d)

    Each dimension of a head has a separate frequency. Queries and keys become twice as wide, magnitudes times cos and
    magnitudes times sin, so that the score is their product; a cache keeps keys of twice the width. The scale is that of width
    d. The phase b starts at zero and is clamped to [-2 pi, 0].

    Args:
        num_heads: heads of queries.
        head_dim: width d of a head.
        base: above 0.

    Raises:
        ValueError: positions that are negative or no integers.

    Source:
        Gopalakrishnan et al. 2025, arXiv 2509.10534, https://arxiv.org/abs/2509.10534
    """

    source = "Gopalakrishnan et al. 2025, https://arxiv.org/abs/2509.10534"
    learned = True
    widens = 2

    def __init__(self, num_heads: int, head_dim: int, base: Positive = 10_000.0):
        super().__init__()
        self.num_heads, self.head_dim, self.base = num_heads, head_dim, base
        self.phase = nn.Parameter(torch.empty(num_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.phase)

    def prepare(self, positions: Tensor, length: int | None = None, dtype: torch.dtype = torch.float32) -> RotaryTable:
        """Cos and sin of p theta, [L, d] or [B, 1, L, d], in float32 or wider."""
        require_positions(positions, who="pope")
        exact = wide(positions.device)
        theta = self.base ** -(torch.arange(self.head_dim, device=positions.device, dtype=exact) / self.head_dim)
        angles = positions.to(exact)[..., None] * theta
        return table_of(angles[:, None] if angles.dim() == 3 else angles, dtype)

    def queries(self, q: Tensor, prepared: RotaryTable) -> Tensor:
        """Transform queries q [B, H, L, d] -> [B, H, L, 2 d]; the phase of each head is subtracted from the angles."""
        if q.shape[1] != self.num_heads:
            raise UsageError("pope", f"{self.num_heads} heads of queries", list(q.shape))
        phase = self.phase.clamp(-2 * math.pi, 0).to(prepared.cos.dtype)[:, None]
        (cos, sin), (by_cos, by_sin) = prepared, (phase.cos(), phase.sin())
        return self._polar(q, cos * by_cos + sin * by_sin, sin * by_cos - cos * by_sin)

    def keys(self, k: Tensor, prepared: RotaryTable) -> Tensor:
        """Transform keys k [B, Hkv, L, d] -> [B, Hkv, L, 2 d]."""
        return self._polar(k, *prepared)

    def _polar(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.shape[-1] != self.head_dim:
            raise UsageError("pope", f"[B, H, L, {self.head_dim}]", list(x.shape))
        size = F.softplus(x.to(cos.dtype))
        return torch.cat([size * cos, size * sin], -1).to(x.dtype)
