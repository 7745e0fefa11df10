"""The kinds of statements. Differences are paired by seed and by document; intervals are those of longitude.study.estimates.

A statement expects a number within a range. It holds where every interval lies inside, over seeds and over documents; it does
not hold where every one lies on one side outside; else the results cannot tell.
"""

import math
from collections.abc import Callable

from scipy import stats

from longitude.claims.base import Outcome, Statement
from longitude.claims.evidence import Evidence, Measured, NotRun
from longitude.report.wording import percent
from longitude.study.answers import share
from longitude.study.estimates import HOLDS, LOST, UNCLEAR, Estimate, change, difference
from longitude.study.losses import TOLERANCE

MANY = 1000
"""Seeds beyond which nobody would train to decide a statement."""
Range = tuple[float, float]
Form = Callable[[float], str]


# ---- losses ----------------------------------------------------------------------------------------------------------
def loss_below(a: Measured, b: Measured, by: float = 0.0) -> Statement:
    """The loss of a is below that of b, by at least some bits per byte."""
    more = f" by more than {by:g} bits per byte" if by else ""
    return _ranged(f"the loss of {a} is below that of {b}{more}", (a, b), _difference(a, b), (-math.inf, -by), bits)


def loss_within(a: Measured, b: Measured, margin: float = TOLERANCE) -> Statement:
    """The losses of a and b are alike: their ratio is 1 within a margin."""
    words = f"the loss of {a} is within {margin:.0%} of that of {b}"
    return _ranged(words, (a, b), _change(a, b), (-margin, margin), percent)


def holds(a: Measured, at: int, margin: float = TOLERANCE) -> Statement:
    """The loss of a is at most a margin above that of the same label at the length `at`."""
    words = f"{a} holds: its loss is less than {margin:.0%} above that at {at}"
    return _ranged(words, (a, a._replace(length=at)), _change(a, a._replace(length=at)), (-math.inf, margin), percent)


def breaks(a: Measured, at: int, margin: float = TOLERANCE) -> Statement:
    """The loss of a is more than a margin above that of the same label at the length `at`."""
    words = f"{a} breaks: its loss is more than {margin:.0%} above that at {at}"
    return _ranged(words, (a, a._replace(length=at)), _change(a, a._replace(length=at)), (margin, math.inf), percent)


# ---- answers ---------------------------------------------------------------------------------------------------------
def accuracy_above(a: Measured, least: float) -> Statement:
    """The accuracy of a is above a share, 0 to 1."""
    return _ranged(f"{a}: more than {least:.0%} are right", (a,), _share(a), (least, math.inf), portion)


def accuracy_below(a: Measured, most: float) -> Statement:
    """The accuracy of a is below a share, 0 to 1."""
    return _ranged(f"{a}: less than {most:.0%} are right", (a,), _share(a), (-math.inf, most), portion)


def more_accurate(a: Measured, b: Measured, by: float = 0.0) -> Statement:
    """The accuracy of a is above that of b, by at least a share."""
    more = f" by more than {100 * by:g} points" if by else ""
    return _ranged(f"{a} is right more often than {b}{more}", (a, b), _difference(a, b), (by, math.inf), points)


# ---- numbers in words ------------------------------------------------------------------------------------------------
def bits(number: float) -> str:
    """-0.123 -> −0.123 bits."""
    return f"{number:+.3f} bits".replace("-", "−")


def portion(number: float) -> str:
    """0.943 -> 94.3%."""
    return f"{number:.1%}"


def points(number: float) -> str:
    """0.051 -> +5.1 points."""
    return f"{100 * number:+.1f} points".replace("-", "−")


# ---- estimates -------------------------------------------------------------------------------------------------------
def _difference(a: Measured, b: Measured) -> Callable[[Evidence], Estimate]:
    return lambda evidence: _paired(difference, evidence, a, b)


def _change(a: Measured, b: Measured) -> Callable[[Evidence], Estimate]:
    return lambda evidence: _paired(change, evidence, a, b)


def _share(a: Measured) -> Callable[[Evidence], Estimate]:
    return lambda evidence: share(evidence.sums(a).of)


def _paired(compare: Callable, evidence: Evidence, a: Measured, b: Measured) -> Estimate:
    found = compare(evidence.sums(a), evidence.sums(b), evidence.criterion(a.study).metric)
    if found is None:
        raise NotRun(f"{a} and {b} have no seed in common, or other documents")
    return found


# ---- verdicts --------------------------------------------------------------------------------------------------------
def _ranged(
    words: str, reads: tuple[Measured, ...], estimate: Callable[[Evidence], Estimate], expected: Range, form: Form
) -> Statement:
    """A statement that a number lies within a range."""

    def judge(evidence: Evidence) -> Outcome:
        found = estimate(evidence)
        verdict = verdict_of(found, expected)
        return Outcome(
            verdict, in_words(found, form), found, what_decides(found, expected) if verdict == UNCLEAR else ""
        )

    return Statement(words, reads, judge)


def verdict_of(found: Estimate, expected: Range) -> str:
    """`HOLDS` with all intervals inside the range, `LOST` with all on one side outside; `UNCLEAR` with one seed, too."""
    low, high = expected
    if found.over != "seeds":
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
    if len(found.values) < 2:
        return "one seed decides nothing: at least 3"
    if seeds is None:
        return "no number of seeds decides it: the mean lies on the limit, or the documents' interval reaches it"
    return f"about {seeds} seeds decide it"


def seeds_to_decide(found: Estimate, expected: Range) -> int | None:
    """The least number of seeds whose t-interval, with this mean and spread, reaches no end of the range.

    None where there is none up to `MANY`, where the interval over documents reaches an end, or where there is one seed.
    """
    ends = [end for end in expected if math.isfinite(end)]
    if found.value is None or len(found.values) < 2 or found.text_low is None or found.text_high is None:
        return None
    if any(found.text_low <= end <= found.text_high for end in ends):
        return None
    gap, spread = min(abs(found.value - end) for end in ends), stats.tstd(found.values)
    for seeds in range(len(found.values), MANY + 1):
        if stats.t.ppf(0.975, seeds - 1) * spread / math.sqrt(seeds) < gap:
            return seeds
    return None
