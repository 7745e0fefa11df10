"""Whether a number lies within the range that a statement expects, and what would decide it where the results cannot tell."""

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Estimate

SEEDS = 3
"""Fewer decide nothing."""
POWER = 0.8
"""How likely the seeds that are named decide a statement whose mean and spread stay as they are."""
MANY = 1000
"""Seeds beyond which nobody would train to decide a statement."""
Range = tuple[float, float]
Form = Callable[[float], str]


def verdict_of(found: Estimate, expected: Range) -> str:
    """`HOLDS` with the interval inside the range, `LOST` with it on one side outside; `UNCLEAR` with fewer than `SEEDS`, too."""
    low, high = expected
    if len(found.values) < SEEDS:
        return UNCLEAR
    sides = {found.above(low), found.below(high)}
    return LOST if LOST in sides else HOLDS if sides == {HOLDS} else UNCLEAR


def in_words(found: Estimate, form: Form) -> str:
    """+1.2% [+0.8%, +1.6%]."""
    if found.value is None:
        return "not finite"
    ends = "" if found.low is None or found.high is None else f" [{form(found.low)}, {form(found.high)}]"
    return form(found.value) + ends


def what_decides(found: Estimate, expected: Range) -> str:
    """How many seeds would, with their spread and mean as they are."""
    seeds = seeds_to_decide(found, expected)
    if seeds is None:
        return "more seeds alone do not decide it: the mean lies on the limit, or it takes more documents"
    return f"about {seeds} seeds would decide it"


def seeds_to_decide(found: Estimate, expected: Range) -> int | None:
    """The fewest seeds with which the interval reaches no end of the range with the probability `POWER`, if mean and spread stay.

    None where there is none up to `MANY`, where the interval over documents reaches an end, or where there is one seed.
    """
    ends = [end for end in expected if math.isfinite(end)]
    if found.value is None or len(found.values) < 2 or found.text_low is None or found.text_high is None:
        return None
    if any(found.text_low <= end <= found.text_high for end in ends):
        return None
    nearest = min(ends, key=lambda end: abs(found.value - end))
    text = found.value - found.text_low if nearest < found.value else found.text_high - found.value
    # what the text takes of the gap, by squares, stays
    gap, spread = math.sqrt(max(0.0, (found.value - nearest) ** 2 - text**2)), stats.tstd(found.values)
    if not spread:
        return len(found.values)
    first = len(found.values)
    while first <= MANY:
        seeds = np.arange(first, min(2 * first, MANY + 1))
        power = stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, gap / spread * np.sqrt(seeds))
        if (power > POWER).any():
            return int(seeds[np.argmax(power > POWER)])
        first *= 2
    return None
