"""Scaling by parts (YaRN, Llama 3): pairs that rotate often within L stay, pairs that never complete a turn are interpolated.

Resonance rounds what YaRN gives, or plain wavelengths.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated

import torch
from torch import Tensor

from longitude.errors import Positive, UsageError, Within
from longitude.positions.scaling.base import Factor, Scaling, plain, register_scheme, rope_type


def blend(theta: Tensor, factor: float, gamma: Tensor) -> Tensor:
    """(1 - gamma) theta/s + gamma theta, exact at 0, at 1 and for s = 1."""
    return torch.lerp(theta / factor, theta, gamma.to(theta.dtype))


@register_scheme(
    "llama3",
    "Published with training at the new length after it; pairs that rotate more than 4 times stay as they are.",
    starts=True,
)
@rope_type("llama3", "factor low_freq_factor high_freq_factor", "original_max_position_embeddings")
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
        theta, low, high = plain(rotary_dim, base, device), self.low_freq_factor, self.high_freq_factor
        rotations = self.original_max_length * theta / (2 * math.pi)
        stays = (rotations >= low).to(theta.dtype)
        return blend(theta, self.factor, stays if low == high else ((rotations - low) / (high - low)).clamp(0, 1))


@register_scheme(
    "ntk-by-parts",
    "The frequencies of YaRN without its attention factor, which is written as 1.",
    starts=True,
)
@dataclass(frozen=True)
class NTKByParts(Scaling):
    """NTK by parts: (1 - gamma_k) theta_k/s + gamma_k theta_k, gamma_k = 1 for fast pairs and 0 for slow ones.

    gamma is linear in k between the pair with beta_fast rotations and the pair with beta_slow, as in the published code and all
    checkpoints. The paper's is linear in r_k, which differs by up to 0.37: that is `Llama3`.

    Args:
        factor: s, of 1 or more.
        original_max_length: L, the training length in tokens.
        beta_fast: pairs of at least this many rotations within L stay.
        beta_slow: pairs of at most this many rotations become theta_k/s. If it equals beta_fast (Kimi K2) there is no ramp.
        truncate: whether the two pairs are rounded outwards to whole numbers.

    Raises:
        ValueError: an original_max_length in which no pair completes beta_slow rotations: the published ramp would run
            backwards there and scale nothing. At the other end, where even the slowest pairs complete far more than
            beta_fast, the published code divides all of them by s, and so does this.

    Source:
        Peng et al. 2023, section 3.2, arXiv 2309.00071, https://arxiv.org/abs/2309.00071
    """

    source = "Peng et al. 2023, https://arxiv.org/abs/2309.00071"
    factor: Factor
    original_max_length: int
    beta_fast: Positive = 32
    beta_slow: Positive = 1
    _: KW_ONLY
    truncate: bool = True

    def __post_init__(self) -> None:
        fast, slow = self.beta_fast, self.beta_slow
        if fast < slow:
            raise UsageError(self.name, "beta_fast of at least beta_slow, in rotations", f"{fast!r} and {slow!r}")

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta = plain(rotary_dim, base, device)
        low, high = self.borders(rotary_dim, base)
        pair = torch.arange(rotary_dim // 2, device=theta.device, dtype=theta.dtype)
        return blend(theta, self.factor, 1 - ((pair - low) / (high - low)).clamp(0, 1))

    def written(self, base, rotary_dim) -> tuple[str, float, Scaling | None]:
        options = {name: value for name, value in self.as_dict().items() if name != "name"}
        return "yarn", base, YaRN(**options, attention_factor=1.0)

    def borders(self, rotary_dim: int, base: float) -> tuple[float, float]:
        """The pair that completes beta_fast rotations within L, and the one that completes beta_slow.

        The published code clamps at d - 1, not at the last pair d/2 - 1, and sets the two apart by 0.001 where they are
        equal. ValueError if the second is below pair 0.
        """
        if base <= 1:
            raise UsageError(self.name, "a base above 1", repr(base))

        def pair_of(rotations: float) -> float:  # solves r_k = rotations for k
            return rotary_dim * math.log(self.original_max_length / (2 * math.pi * rotations)) / (2 * math.log(base))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        if high < 0:  # below the lower clamp: the ramp would run backwards, and nothing be scaled
            expected = f"an original_max_length in which a pair rotates beta_slow={self.beta_slow} times"
            raise UsageError(self.name, expected, self.original_max_length, "llama3 has no such limit")
        low, high = max(low, 0), min(high, rotary_dim - 1)
        return low, high + 0.001 if low == high else high


@register_scheme(
    "yarn",
    "Static: short contexts are rotated otherwise, too. Keep the original checkpoint for them.",
    starts=True,
)
@rope_type(
    "yarn",
    optional="original_max_position_embeddings factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
)
@dataclass(frozen=True)
class YaRN(NTKByParts):
    """YaRN: NTK by parts, and cos and sin times 0.1 ln s + 1, which sharpens the softmax.

    With g(m) = 0.1 m ln s + 1, attention_factor is g(1), or g(mscale)/g(mscale_all_dim) if both are set and not zero.
    softmax_factor is g(mscale_all_dim)^2 if mscale_all_dim is set and not zero, else 1.

    Args:
        factor: s, of 1 or more.
        original_max_length: L, the training length in tokens.
        beta_fast: see NTKByParts.
        beta_slow: see NTKByParts.
        attention_factor: multiplies cos and sin; None: by the formula above.
        mscale: m of cos and sin.
        mscale_all_dim: m of the scores' scale. Published code uses it in DeepSeek's latent attention and similar models alone,
            where only a part of each head rotates.
        truncate: see NTKByParts.

    Source:
        Peng et al. 2023, arXiv 2309.00071, https://arxiv.org/abs/2309.00071
    """

    attention_factor: Positive | None = None
    mscale: Annotated[float, Within(0)] | None = None
    mscale_all_dim: Annotated[float, Within(0)] | None = None

    def written(self, base, rotary_dim) -> tuple[str, float, Scaling | None]:
        return "yarn", base, self

    def factors(self) -> tuple[float, float]:
        def g(scale: float) -> float:
            return 0.1 * scale * math.log(self.factor) + 1

        softmax = g(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0
        if self.attention_factor is not None:
            return self.attention_factor, softmax
        if self.mscale and self.mscale_all_dim:
            return g(self.mscale) / g(self.mscale_all_dim), softmax
        return g(1), softmax


@register_scheme(
    "resonance",
    "Published for training from the start: fast pairs change, too, which yarn leaves as they are.",
    needs_training=True,
)
@dataclass(frozen=True)
class Resonance(YaRN):
    """Resonance RoPE: 2 pi / round(2 pi / theta_k), so that pair k repeats after a whole number of tokens, at least one.

    Beyond the training length, a pair with a shorter wavelength repeats the angles of training. With a factor above 1 the theta_k
    are YaRN's.

    Args:
        factor: s of YaRN; 1: frequencies without scaling, for training.
        original_max_length, beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim: those of YaRN, for a factor
            above 1.

    Raises:
        ValueError: a factor above 1 without original_max_length, or an option of YaRN with a factor of 1.

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
        if self.factor == 1 and any(getattr(self, field.name) != field.default for field in fields(self)):
            raise UsageError(self.name, "a factor above 1 with options of YaRN", self)

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
