"""FoPE: rotations in which each pair mixes all frequencies with a full turn within the training length."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from longitude.errors import Positive, Seed, UsageError, Within
from longitude.positions.base import Encoding, register
from longitude.positions.coordinates import require_positions, wide
from longitude.positions.rotation import Angles, Layout, by_heads, rotate_by_formula


@register("fope")
class FoPE(Encoding):
    """FoPE, a Fourier series for each pair: cos and sin of each pair are Fourier series of frequencies seen within max_length.

        (x, y) -> (x c_m - y s_m, x s_m + y c_m),    c_m(p) = sum_j C_jm cos(p w_j),    s_m(p) = sum_j S_jm sin(p w_j)

    over w_j = base^(-2j/head_dim) above 2 pi / max_length, and as many m. Slower pairs have frequency zero: c = 1, s = 0. C and S
    are fixed random matrices for each key head, I plus normal noise, with columns divided by their sums, so that c_m(0) = 1.
    Scores depend on both positions, not only on their offset, to the extent that C and S differ from I. The published code pads
    slow pairs with s = 1, so that they count twice, and its noise and columns are others.

    Args:
        head_dim: width of a head, even.
        num_heads: heads of queries.
        layout: which dimensions are a pair, as in Rotary.
        max_length: training length in tokens, 7 or more: one turn of the fastest pair.
        num_kv_heads: key heads; each has its own series, which its query heads share; None: num_heads.
        base: above 0.
        deviation: standard deviation of the noise, times the square root of the number of frequencies. 0: RoPE except for slow
            pairs.
        seed: seed of the random numbers.

    Raises:
        ValueError: an odd head_dim, a max_length without a full turn of any pair, positions that are negative or no integers.

    Source:
        Hua et al. 2024, arXiv 2412.17739, https://arxiv.org/abs/2412.17739
    """

    source = "Hua et al. 2024, https://arxiv.org/abs/2412.17739"
    relative = False
    shared = True
    model_defaults = {"layout": "interleaved"}

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        layout: Layout,
        max_length: Annotated[int, Within(7)],
        num_kv_heads: int | None = None,
        base: Positive = 10_000.0,
        deviation: Annotated[float, Within(0)] = 0.3,
        seed: Seed = 0,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise UsageError("fope", f"num_kv_heads to divide num_heads={num_heads}", num_kv_heads)
        if head_dim % 2:
            raise UsageError("fope", "an even head_dim, whose pairs are rotated", head_dim)
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, num_heads, num_kv_heads
        self.layout, self.base = layout, base
        self.trained_length, self.deviation, self.seed = max_length, deviation, seed
        self.series = self._series()

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Frequencies with a full turn within max_length, in float64 if the device has it."""
        exact = wide(torch.device("cpu") if device is None else device)
        return self.base ** -(2 * torch.arange(self.count, dtype=exact, device=device) / self.head_dim)

    @property
    def count(self) -> int:
        """Number of frequencies with a full turn within max_length, as a Python int for graphs."""
        floor = 2 * math.pi / self.trained_length
        return sum(self.base ** (-2 * j / self.head_dim) > floor for j in range(self.head_dim // 2))

    def _series(self) -> Tensor:
        """C and S [2, num_kv_heads, count, count]: no buffer, so that nothing is saved or rounded with the model."""
        generator, options = torch.Generator("cpu").manual_seed(self.seed), {"dtype": torch.float64, "device": "cpu"}
        drawn = torch.randn(2, self.num_kv_heads, self.count, self.count, generator=generator, **options)
        series = torch.eye(self.count, **options) + self.deviation * self.count**-0.5 * drawn
        return series / series.sum(-2, keepdim=True)

    def prepare(self, positions: Tensor, length: int | None = None, dtype: torch.dtype = torch.float32) -> Angles:
        """Both series, [num_kv_heads, L, pairs] or [B, num_kv_heads, L, pairs], in float32 or wider."""
        require_positions(positions, who="fope")
        exact = wide(positions.device)
        of_cos, of_sin = self.series.to(positions.device, exact)
        angles = (positions.to(exact)[..., None] * self.frequencies(positions.device)).unsqueeze(-3)
        slow = self.head_dim // 2 - self.count
        cos = F.pad(angles.cos() @ of_cos, (0, slow), value=1.0)
        sin = F.pad(angles.sin() @ of_sin, (0, slow), value=0.0)
        dtype = torch.promote_types(dtype, torch.float32)
        return Angles(cos.to(dtype), sin.to(dtype))

    def queries(self, q: Tensor, prepared: Angles) -> Tensor:
        """Rotate queries q [B, H, L, head_dim], each head by the series of its key head."""
        return self.keys(q, prepared)

    def keys(self, k: Tensor, prepared: Angles) -> Tensor:
        """Rotate keys k [B, Hkv, L, head_dim]."""
        if k.dim() != 4 or k.shape[1] % self.num_kv_heads or k.shape[-1] != self.head_dim:
            expected = f"[B, H, L, {self.head_dim}] with H a multiple of {self.num_kv_heads}"
            raise UsageError("fope", expected, list(k.shape))
        table = by_heads(prepared, k.shape[1])
        return rotate_by_formula(k.to(table.cos.dtype), table, self.layout).to(k.dtype)
