"""Samplers of training positions, which a training loop calls for each batch.

A model trained on short sequences can learn positions of a longer range if its tokens get positions with gaps. A model trained on
long sequences can read shorter ones among them, if positions start again. Only positions change, for any encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from longitude.errors import UsageError, check_sizes, unknown
from longitude.registry import Checked, resolve_options


@dataclass(frozen=True)
class Contiguous:
    """The ordinary positions: p = 0, 1, .., length-1 in each row."""

    source: ClassVar[str | None] = None

    def __call__(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Positions int64 [batch, length], on the device of the generator, from which nothing is drawn."""
        check_sizes("Contiguous", batch=batch, length=length)
        return torch.arange(length, device=generator.device).repeat(batch, 1)


@dataclass(frozen=True)
class Randomized(Checked):
    """A sorted random subset of 0 .. max_length-1, drawn for each row; all subsets are equally likely.

    Args:
        max_length: positions to draw from.

    Source:
        Ruoss et al. 2023, arXiv 2305.16843, https://arxiv.org/abs/2305.16843
    """

    source: ClassVar[str | None] = "Ruoss et al. 2023, https://arxiv.org/abs/2305.16843"
    max_length: int

    def __call__(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Positions int64 [batch, length], on the device of the generator."""
        check_fits("Randomized", batch, length, self.max_length)
        return random_subset(batch, self.max_length, length, generator)


@dataclass(frozen=True)
class Skipped(Checked):
    """PoSE: the window is cut into `chunks` runs, and each run after the first is moved on by a skip.

    p = t + u_c for token t of run c. The first run starts at 0 (u_0 = 0), as in the authors' revised code; u_c is uniform in
    u_(c-1) .. max_length - length, so all fit. Cuts are anywhere between tokens; all sets of cuts are equally likely.
    (The authors cut their two runs in the first half of the window only, so that the second run is the longer one.)

    Args:
        max_length: positions are below it.
        chunks: number of runs.

    Source:
        Zhu et al. 2024, arXiv 2309.10400, https://arxiv.org/abs/2309.10400
    """

    source: ClassVar[str | None] = "Zhu et al. 2024, https://arxiv.org/abs/2309.10400"
    max_length: int
    chunks: int = 2

    def __call__(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Positions int64 [batch, length], on the device of the generator."""
        check_fits("Skipped", batch, length, self.max_length)
        if self.chunks > length:
            raise UsageError("Skipped", f"length of at least chunks={self.chunks}, a token each", length)
        positions = Contiguous()(batch, length, generator)
        cuts = random_subset(batch, length - 1, self.chunks - 1, generator) + 1  # a run begins at each
        skip, longest = positions.new_zeros(batch), self.max_length - length
        tokens = positions.clone()
        for cut in cuts.unbind(1):
            share = torch.rand(batch, generator=generator, dtype=torch.float64, device=generator.device)
            more = (share * (longest - skip + 1)).long()  # uniform in 0 .. longest - skip
            skip = skip + more
            positions = positions + more[:, None] * (tokens >= cut[:, None])
        return positions


@dataclass(frozen=True)
class Shifted(Checked):
    """SHAPE: p = t + u, with one u for all tokens of a row, uniform in 0 .. max_length - length.

    Trained this way, an absolute encoding must use offsets between tokens. Relative encodings are unaffected.

    Args:
        max_length: positions are below it. The authors shift by up to 500: the longest window + 500 here.

    Source:
        Kiyono et al. 2021, arXiv 2109.05644, https://arxiv.org/abs/2109.05644
    """

    source: ClassVar[str | None] = "Kiyono et al. 2021, https://arxiv.org/abs/2109.05644"
    max_length: int

    def __call__(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Positions int64 [batch, length], on the device of the generator."""
        check_fits("Shifted", batch, length, self.max_length)
        shifts = self.max_length - length + 1
        shift = torch.randint(shifts, (batch, 1), generator=generator, device=generator.device)
        return Contiguous()(batch, length, generator) + shift


@dataclass(frozen=True)
class Mixed(Checked):
    """Windows of mixed lengths: each row is cut into parts of one length, and positions start at 0 in each part.

    The length is drawn for each row: that of the window, a half, a quarter, ... of it, all equally likely, rounded up. So each
    length gets as many tokens on average. A causal model reads each part as a separate document, because positions start
    again there.

    Args:
        halvings: how often the window is halved for the shortest parts.

    Source:
        Pouransari et al. 2024, arXiv 2405.13226, https://arxiv.org/abs/2405.13226
    """

    source: ClassVar[str | None] = "Pouransari et al. 2024, https://arxiv.org/abs/2405.13226"
    halvings: int = 3

    def __call__(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Positions int64 [batch, length], on the device of the generator."""
        positions = Contiguous()(batch, length, generator)
        halved = torch.randint(self.halvings + 1, (batch, 1), generator=generator, device=generator.device)
        return positions % -(-length // 2**halved)


SAMPLERS = {
    "contiguous": Contiguous,
    "randomized": Randomized,
    "skipped": Skipped,
    "shifted": Shifted,
    "mixed": Mixed,
}
Sampler = Contiguous | Randomized | Skipped | Shifted | Mixed


def sampler(name: str, **options: Any) -> Sampler:
    """Build a sampler by its name, such as "randomized" with max_length=2048.

    Args:
        name: "contiguous", "randomized", "skipped", "shifted" or "mixed".
        **options: options of its class.

    Returns:
        A function of (batch, length, generator) that returns positions int64 [batch, length].

    Raises:
        ValueError: an unknown name or option, or a missing one.
    """
    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS, f"samplers: {', '.join(SAMPLERS)}.")
    return SAMPLERS[name](**resolve_options(name, SAMPLERS[name], options, {}, "sampler"))


def check_fits(who: str, batch: int, length: int, max_length: int) -> None:
    """ValueError unless a window of `length` tokens has positions below max_length."""
    check_sizes(who, batch=batch, length=length)
    if length > max_length:
        raise UsageError(who, f"length of at most max_length={max_length}", length, "raise max_length")


def random_subset(batch: int, of: int, size: int, generator: torch.Generator) -> Tensor:
    """`size` different numbers of 0 .. of-1, sorted, in each row: the indices of the largest random draws."""
    draws = torch.rand(batch, of, generator=generator, dtype=torch.float64, device=generator.device)
    return draws.topk(size).indices.sort(-1).values
