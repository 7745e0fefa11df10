"""How fast each rotary pair turns, and the schemes that slow the turning down to make a trained context longer.

Notation of the papers: theta_k the frequencies of plain rotary encoding, L the trained length (original_max_length), s the
factor by which it grows, d the dimensions that turn (rotary_dim), r_k = L theta_k / 2 pi the turns of pair k within L.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.errors import unknown
from longitude.positions.base import check_positive, check_sizes, wide
from longitude.positions.frequencies import Follows, Frequencies, Scaling, longest, plain

CPU = torch.device("cpu")


def rope_frequencies(
    head_dim: int,
    base: float = 10_000.0,
    scaling: Scaling | Mapping[str, Any] | None = None,
    rotary_dim: int | None = None,
    length: int | Tensor | None = None,
    proportion: float = 1.0,
    device: torch.device | None = None,
    who: str = "rope",
) -> Frequencies:
    """theta_k = base^(-2k/rotary_dim), k = 0 .. rotary_dim/2 - 1  (Su et al. 2021, section 3.2.2), as `scaling` changes them.

    rotary_dim: the dimensions that turn (all). proportion p: only the int(p rotary_dim) // 2 fastest pairs turn, at the same
    frequencies; the others have frequency 0 (p-RoPE, Barbero et al. 2024). length: what a scheme that follows the length
    follows; None: its declared length, else the original one. who: whose mistake an error names.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    check_sizes(who, head_dim=head_dim, rotary_dim=rotary_dim)
    check_positive(who, base=base)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"{who}: expected an even rotary_dim of at most head_dim={head_dim}, got {rotary_dim}")
    if isinstance(proportion, bool) or not isinstance(proportion, int | float) or not 0 <= proportion <= 1:
        raise ValueError(f"{who}: expected a proportion from 0 to 1, got {proportion!r}")
    scheme = from_dict(scaling) or Scaling()
    inverse = scheme.frequencies(rotary_dim, base, length, device)
    turning = int(proportion * rotary_dim) // 2
    inverse = torch.where(torch.arange(rotary_dim // 2, device=device) < turning, inverse, 0.0)
    return Frequencies(inverse, *scheme.factors())


# ---- one change for all pairs ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Linear(Scaling):
    """theta_k / s: position interpolation; positions p/s stay fractions  (Chen et al. 2023)."""

    name = "linear"
    factor: float

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, base, device) / self.factor


@dataclass(frozen=True)
class BaseChange(Scaling):
    """base^(-2k/d) with another base: adjusted base frequency, for models trained on with it  (Xiong et al. 2023)."""

    name = "base_change"
    base: float

    def __post_init__(self) -> None:
        check_positive(self.name, base=self.base)

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, self.base, device)


# ---- NTK: a larger base, so that fast pairs hardly change ------------------------------------------------------------
def ntk_base(who: str, base: float, stretch: Any, rotary_dim: int) -> Any:
    """Base stretch^(d/(d-2)): the slowest pair turns slower by exactly `stretch`, the fastest as before."""
    if rotary_dim < 4:
        raise ValueError(
            f"{who}: expected a rotary_dim of 4 or more, got {rotary_dim}; a single pair has no slower one"
        )
    return base * stretch ** (rotary_dim / (rotary_dim - 2))


@dataclass(frozen=True)
class NTK(Scaling):
    """base s^(d/(d-2)) instead of base: the slowest frequency is divided by s, the fastest stays  (bloc97 2023).

    The original code calls the factor alpha.
    """

    name = "ntk"
    factor: float

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        return plain(rotary_dim, ntk_base(self.name, base, self.factor, rotary_dim), device)


@dataclass(frozen=True)
class DynamicNTK(Follows):
    """base (s l/L - (s - 1))^(d/(d-2)) for a sequence of length l; plain while l <= L  (emozilla 2023).

    follow="declared" (l = max_length), "row" or "sequence": see `Follows`. Rows take their lengths beyond L in steps of
    `step` tokens, rounded up (default: a sixteenth of L), so that neighbours share tables.
    """

    name = "dynamic_ntk"
    factor: float
    original_max_length: int
    max_length: int | None = None
    follow: str = "declared"
    step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is not None:
            check_sizes(self.name, step=self.step)
            if self.follow != "row":
                raise ValueError(
                    f"{self.name}: expected step only with follow='row', got follow={self.follow!r}; leave it out"
                )

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        s, original = self.factor, self.original_max_length
        length = torch.as_tensor(longest(self.followed(length), original), device=device).to(wide(device or CPU))
        stretch = s * (length / original) - (s - 1)
        return plain(rotary_dim, ntk_base(self.name, base, stretch, rotary_dim), device)

    def canonical(self, length: Any) -> Any:
        original = self.original_max_length
        step = 1 if self.follow == "sequence" else self.step or max(1, original // 16)
        return original - (original - longest(length, original)) // step * step


# ---- by parts: pairs that turn often within L stay, pairs that never finish a turn are interpolated ------------------
def blend(theta: Tensor, factor: float, kept: Tensor) -> Tensor:
    """(1 - kept) theta/s + kept theta, exact at 0, at 1 and for s = 1."""
    return torch.lerp(theta / factor, theta, kept.to(theta.dtype))


def rotations_ramp(theta: Tensor, original: int, slow: float, fast: float) -> Tensor:
    """gamma_k, from 0 at `slow` turns within L to 1 at `fast` turns: linear in r_k = L theta_k / 2 pi."""
    turns = original * theta / (2 * math.pi)
    return ((turns - slow) / (fast - slow)).clamp(0, 1)


@dataclass(frozen=True)
class Llama3(Scaling):
    """(1 - gamma_k) theta_k/s + gamma_k theta_k, gamma_k = (r_k - low) / (high - low) within [0, 1]  (Grattafiori et al. 2024).

    low_freq_factor and high_freq_factor are turns within L, 1 and 4 in the original code, which uses s = 8, L = 8192.
    """

    name = "llama3"
    factor: float
    original_max_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.low_freq_factor, self.high_freq_factor
        check_positive(self.name, low_freq_factor=low, high_freq_factor=high)
        if high <= low:
            raise ValueError(f"llama3: expected high_freq_factor above low_freq_factor, got {high!r} and {low!r}")

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta = plain(rotary_dim, base, device)
        ramp = rotations_ramp(theta, self.original_max_length, self.low_freq_factor, self.high_freq_factor)
        return blend(theta, self.factor, ramp)


@dataclass(frozen=True)
class NTKByParts(Scaling):
    """(1 - gamma_k) theta_k/s + gamma_k theta_k: pairs of at least beta_fast turns stay, of at most beta_slow become
    theta_k/s  (Peng et al. 2023, section 3.2).

    ramp="dimensions", as in the published code and all checkpoints: gamma falls linearly with k from the pair of beta_fast
    turns to that of beta_slow, both rounded outwards unless truncate=False. ramp="rotations", as in the paper: gamma is
    linear in the turns r_k, from beta_slow to beta_fast. The two differ by up to 0.37.

    Errors: ValueError, besides those of single options, for ramp="dimensions" with an original_max_length in which no pair
    turns beta_slow times: the published ramp would run backwards there and scale nothing. At the other end, where even the
    slowest pairs turn far more than beta_fast times, the published code divides all of them by s, and so does this.
    """

    name = "ntk_by_parts"
    factor: float
    original_max_length: int
    beta_fast: float = 32
    beta_slow: float = 1
    _: KW_ONLY
    ramp: str = "dimensions"
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fast, slow = self.beta_fast, self.beta_slow
        check_positive(self.name, beta_fast=fast, beta_slow=slow)
        if fast <= slow:
            raise ValueError(
                f"{self.name}: expected beta_fast, the larger number of turns, above beta_slow, got {fast!r} and {slow!r}"
            )
        if self.ramp not in ("dimensions", "rotations"):
            raise ValueError(
                f"{self.name}: expected ramp='dimensions' (published code) or 'rotations' (paper), got {self.ramp!r}"
            )
        if not isinstance(self.truncate, bool) or (self.ramp == "rotations" and not self.truncate):
            raise ValueError(
                f"{self.name}: expected truncate True, or False with ramp='dimensions', got {self.truncate!r}; "
                "the ramp in rotations has nothing to round"
            )

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta = plain(rotary_dim, base, device)
        if self.ramp == "rotations":
            return blend(
                theta, self.factor, rotations_ramp(theta, self.original_max_length, self.beta_slow, self.beta_fast)
            )
        low, high = self.borders(rotary_dim, base)
        pair = torch.arange(rotary_dim // 2, device=device, dtype=theta.dtype)
        return blend(theta, self.factor, 1 - ((pair - low) / (high - low)).clamp(0, 1))

    def borders(self, rotary_dim: int, base: float) -> tuple[float, float]:
        """The pair that turns beta_fast times within L, and the one that turns beta_slow times. The published code clamps at
        d - 1, not at the last pair d/2 - 1, and sets the two apart by 0.001 where they are equal. ValueError where the second
        lies below pair 0.
        """
        if base <= 1:
            raise ValueError(f"{self.name}: expected a base above 1, got {base!r}")

        def pair_of(turns: float) -> float:  # solves r_k = turns for k
            return rotary_dim * math.log(self.original_max_length / (2 * math.pi * turns)) / (2 * math.log(base))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        if high < 0:  # below the lower clamp: the ramp would run backwards, and nothing be scaled
            raise ValueError(
                f"{self.name}: expected an original_max_length in which a pair turns beta_slow={self.beta_slow} times, got "
                f"{self.original_max_length}; ramp='rotations' has no such limit"
            )
        low, high = max(low, 0), min(high, rotary_dim - 1)
        return low, high + 0.001 if low == high else high


@dataclass(frozen=True)
class YaRN(NTKByParts):
    """NTK-by-parts, and cos and sin times 0.1 ln s + 1, which sharpens the softmax  (Peng et al. 2023).

    With g(m) = 0.1 m ln s + 1, attention_factor is g(1), or g(mscale)/g(mscale_all_dim) where both are given and not zero,
    or what is given; softmax_factor is g(mscale_all_dim)^2 where given and not zero, else 1. Published code multiplies
    score scales by it in DeepSeek's latent attention and its kin alone, where only a part of each head turns.
    """

    name = "yarn"
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_factor is not None:
            check_positive(self.name, attention_factor=self.attention_factor)
        for name, scale in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
            if scale not in (None, 0):
                check_positive(self.name, **{name: scale})

    def factors(self) -> tuple[float, float]:
        def g(scale: float) -> float:
            return 0.1 * scale * math.log(self.factor) + 1

        softmax = g(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0
        if self.attention_factor is not None:
            return self.attention_factor, softmax
        if self.mscale and self.mscale_all_dim:
            return g(self.mscale) / g(self.mscale_all_dim), softmax
        return g(1), softmax


# ---- a factor for each pair, found by search -------------------------------------------------------------------------
@dataclass(frozen=True)
class LongRoPE(Follows):
    """theta_k / lambda_k: lambda is short_factor for lengths up to L, long_factor beyond  (Ding et al. 2024).

    cos and sin times sqrt(1 + ln s / ln L), whichever list is used, or times attention_factor where given; s is factor, else
    max_length / L. Lists: rotary_dim/2 positive numbers. follow="declared" (length max_length, else factor L), "row" or
    "sequence": see `Follows`.
    """

    name = "longrope"
    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_length: int
    factor: float | None = None
    max_length: int | None = None
    attention_factor: float | None = None
    follow: str = "declared"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("short_factor", "long_factor"):
            given = getattr(self, name)
            if not isinstance(given, list | tuple):
                raise ValueError(f"longrope: expected {name} to be a list of numbers, got {given!r}")
            # Published lists start at 0.998, so the paper's bound of 1 is not ours.
            check_positive(self.name, **{f"{name}[{i}]": number for i, number in enumerate(given)})
            object.__setattr__(self, name, tuple(given))
        if self.attention_factor is not None:
            check_positive(self.name, attention_factor=self.attention_factor)
        elif self.factor is None and self.max_length is None:
            raise ValueError(
                "longrope: expected factor, max_length or attention_factor, got none; cos and sin depend on it"
            )
        elif self.original_max_length < 2:
            raise ValueError("longrope: expected an original_max_length of 2 or more, got 1")

    def frequencies(self, rotary_dim, base, length=None, device=None) -> Tensor:
        theta = plain(rotary_dim, base, device)
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != len(theta):
                raise ValueError(
                    f"longrope: expected {name} of {len(theta)} numbers (rotary_dim/2), got {len(getattr(self, name))}"
                )
        short, long = (torch.tensor(x, dtype=theta.dtype, device=device) for x in (self.short_factor, self.long_factor))
        is_long = torch.as_tensor(self.followed(length) > self.original_max_length, device=device)
        return theta / torch.where(is_long, long, short)

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


# ---- by name ---------------------------------------------------------------------------------------------------------
SCHEMES: dict[str, type[Scaling]] = {
    scheme.name: scheme for scheme in (Linear, NTK, DynamicNTK, NTKByParts, YaRN, LongRoPE, Llama3, BaseChange)
}


def from_dict(spec: Scaling | Mapping[str, Any] | None) -> Scaling | None:
    """{"name": "yarn", "factor": 4.0, ...}, a scheme or None -> a scheme or None."""
    if spec is None or isinstance(spec, Scaling):
        return spec
    if not isinstance(spec, Mapping) or "name" not in spec:
        raise ValueError(
            f"scaling: expected a scheme, {{'name': ..., its options}} or None, got {spec!r}; "
            "a Hugging Face config is read by from_hugging_face"
        )
    options = dict(spec)
    name = options.pop("name")
    if not isinstance(name, str) or name not in SCHEMES:
        raise unknown("scaling", name, SCHEMES, f"all: {', '.join(SCHEMES)}.")
    fields = {field.name: field for field in dataclasses.fields(SCHEMES[name])}
    for option in options:
        if option not in fields:
            raise unknown(f"option of scaling {name!r}", option, fields, f"its options: {', '.join(fields)}.")
    if missing := [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in options]:
        raise ValueError(f"scaling {name!r}: expected the options {', '.join(missing)}, got {spec!r}")
    return SCHEMES[name](**options)
