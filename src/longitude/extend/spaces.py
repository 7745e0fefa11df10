"""Search spaces of factors by method: their starts and bounds."""

from __future__ import annotations

from dataclasses import dataclass

from longitude.extend.evolution import Bounds, RisingBounds
from longitude.extend.factors import Candidate, RotaryPairs, ntk_below

STARTS, APART = 8, 0.1
"""Number of LongRoPE2's starts, and the difference between factors of neighboring pairs in them."""


@dataclass(frozen=True)
class Space:
    """Search space. starts: first candidates by name, in order. bounds: bounds of all later candidates."""

    method: str
    pairs: RotaryPairs
    starts: dict[str, Candidate]
    bounds: Bounds


def longrope(pairs: RotaryPairs) -> Space:
    """Ding et al. 2024: factors from 1 to 1.25 times the extension for every pair; the starts are published schemes."""
    return Space("longrope", pairs, pairs.starts(), Bounds(low=1.0, high=1.25 * pairs.factor))


def longrope2(pairs: RotaryPairs) -> Space:
    """Space of LongRoPE2 (Shang et al. 2025): factors of at least s from the critical pair d on, NTK's form below it.

    The starts are lambda_d = s (1 + j / 10), j = 0 .. 7, and lambda_k = lambda_d + (k - d) / 10 for k >= d. The highest factor is
    2 s, or the highest of the starts if s is so small that they exceed 2 s.
    """
    count, critical, factor = pairs.rotary_dim // 2, pairs.critical, round(pairs.factor, 10)
    if critical >= count:
        turn = f"all {count} rotary pairs make a full turn within {pairs.original_length} tokens"
        raise ValueError(f"longrope2: {turn}, and no pair is left to search; choose --method ntk or longrope")
    starts = {}
    for j in range(STARTS):
        first = factor * (1 + j / 10)
        above = [round(first + APART * i, 10) for i in range(count - critical)]
        starts[f"{1 + j / 10:.1f} s"] = Candidate(ntk_below([0.0] * critical + above, critical), 1.0)
    highest = max(start.factors[-1] for start in starts.values())
    return Space("longrope2", pairs, starts, RisingBounds(low=factor, high=max(2 * factor, highest), critical=critical))
