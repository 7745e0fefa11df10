"""Estimates with intervals over seeds, documents and both, which are crossed effects; which of two labels is better.

A t-interval over seeds (`longitude.statistics.seeds`) covers other training runs on the same text. A bootstrap over documents
(`longitude.statistics.documents`) covers other text for the same models. The interval that is reported and judged combines
both. With one seed there is only the interval over documents.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from longitude.statistics.documents import (
    METRICS,
    Difference,
    Interval,
    difference_of_ratios,
    document_difference,
    interval,
    paired_ratio,
)
from longitude.statistics.seeds import benjamini_hochberg, holm, seed_difference, t_interval

SIGNIFICANT = 0.05
"""Significance level for p-values adjusted by Holm."""
HOLDS, LOST, UNCLEAR = "holds", "does not hold", "cannot tell"
"""Whether a statement about a number holds, by the number's interval."""
Bound = float | None
"""An end of an interval; None if there is no interval."""


class Sums(NamedTuple):
    """A metric's sums over documents, of the same documents for every seed.

    Attributes:
        seeds: Seeds of the trials.
        of: [seeds, documents], such as nats.
        over: Same shape, such as bytes.
    """

    seeds: tuple[int, ...]
    of: np.ndarray
    over: np.ndarray

    @property
    def pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """`of` and `over` summed over the seeds, [documents] each."""
        return self.of.sum(0), self.over.sum(0)

    def only(self, seeds: Sequence[int]) -> "Sums":
        """The sums of these seeds alone."""
        rows = [self.seeds.index(seed) for seed in seeds]
        return Sums(tuple(seeds), self.of[rows], self.over[rows])


class Estimate(NamedTuple):
    """A value with its intervals; what is missing is None.

    Attributes:
        value: The mean over seeds.
        low: Lower end of the 95% interval that is reported: over seeds and documents; with one seed, over documents.
        high: Its upper end.
        over: Source of variation of the interval; None if there is no interval.
        text_low: Lower end of the 95% interval over documents, for the same models.
        text_high: Its upper end.
        p: Two-sided p-value of a difference, over what the interval is over.
        values: One per seed.
        seed_low: Lower end of the 95% t-interval over the seeds, on the same text; None with one seed.
        seed_high: Its upper end.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    over: Literal["seeds and documents", "seeds", "documents"] | None = None
    text_low: float | None = None
    text_high: float | None = None
    p: float | None = None
    values: tuple[float, ...] = ()
    seed_low: float | None = None
    seed_high: float | None = None

    @property
    def ends(self) -> tuple[Bound, Bound, str | None, Bound, Bound, Bound, Bound]:
        """The intervals in the order that `Comparison` and findings of studies have them."""
        return self.low, self.high, self.over, self.text_low, self.text_high, self.seed_low, self.seed_high

    def below(self, limit: float) -> str:
        """`HOLDS` if the interval lies below the limit, `LOST` if above; else, and if it is over seeds alone, `UNCLEAR`."""
        if self.low is None or self.high is None or self.over == "seeds":
            return UNCLEAR
        return HOLDS if self.high < limit else LOST if self.low > limit else UNCLEAR

    @property
    def negative(self) -> "Estimate":
        """Estimate of b - a from an estimate of a - b."""
        turned = Estimate(self.value, self.high, self.low, self.over, self.text_high, self.text_low, self.p, self.values,
                          self.seed_high, self.seed_low)  # fmt: skip
        return turned._each(lambda number: -number)

    def less(self, number: float) -> "Estimate":
        """The estimate minus an exact number, without a p-value."""
        return self._each(lambda value: value - number)._replace(p=None)

    def _each(self, change: Callable[[float], float]) -> "Estimate":
        """Apply a function to every number except the p-value."""
        names = ("value", "low", "high", "text_low", "text_high", "seed_low", "seed_high")
        numbers = {name: getattr(self, name) for name in names}
        moved = {name: None if number is None else change(number) for name, number in numbers.items()}
        return self._replace(**moved, values=tuple(map(change, self.values)))

    def above(self, limit: float) -> str:
        """`HOLDS` if the interval lies above the limit, `LOST` if below; else, and if it is over seeds alone, `UNCLEAR`."""
        return {HOLDS: LOST, LOST: HOLDS, UNCLEAR: UNCLEAR}[self.below(limit)]


def estimated(
    values: ArrayLike,
    text: Interval | Difference,
    seeds: Interval | Difference | None = None,
) -> Estimate:
    """Estimate from one value per seed.

    Args:
        values: [seeds].
        text: Interval over documents.
        seeds: Interval over seeds, by default `t_interval`.
    """
    seeds = seeds or t_interval(values)
    numbers = tuple(np.asarray(values, np.float64).tolist())
    chosen, over = (text, "documents") if len(numbers) < 2 else (seeds, "seeds")
    if seeds.low is not None and text.low is not None:
        chosen, over = combined(seeds, text, len(numbers)), "seeds and documents"
    ends = (chosen.low, chosen.high, None if chosen.low is None else over)
    p = chosen.p if isinstance(text, Difference) and isinstance(chosen, Difference) else None
    return Estimate(seeds.value, *ends, text.low, text.high, p, numbers, seeds.low, seeds.high)


def combined(seeds: Interval | Difference, text: Interval | Difference, count: int) -> Difference:
    """Interval over seeds and documents: the errors of both are independent, so their squares add.

    The distance of each end from the value is the root of both squared distances, so it is at least as wide as each interval. In
    simulations of crossed effects it covers 95% and more (two to five seeds, 100 documents), where Satterthwaite's covers 87%
    with two seeds whose spread is three times that of the text.

    Args:
        seeds: Value with a 95% t-interval over `count` seeds.
        text: Value with a 95% interval over documents, of the same models.
        count: Number of seeds.

    Returns:
        The value with both ends, and its two-sided p-value.

    Source:
        Zou and Donner 2008, Construction of confidence limits about effect measures, https://doi.org/10.1002/sim.3095
    """
    value, center = seeds.value, text.value
    if None in (value, center, *(ends := (seeds.low, seeds.high, text.low, text.high))):
        return Difference(value, None, None, None)
    value, center, seed_low, seed_high, text_low, text_high = cast(tuple[float, ...], (value, center, *ends))
    below, above = (value - seed_low, center - text_low), (seed_high - value, text_high - center)
    low, high = value - float(np.hypot(*below)), value + float(np.hypot(*above))
    of_seeds, of_text = below if value > 0 else above
    wide = (of_seeds / stats.t.ppf(0.975, count - 1), max(of_text, 0.0) / stats.norm.ppf(0.975))

    def beyond(p: float) -> float:
        """How far the interval of level 1 - p reaches beyond 0."""
        return float(np.hypot(wide[0] * stats.t.isf(p / 2, count - 1), wide[1] * stats.norm.isf(p / 2))) - abs(value)

    least = 1e-12
    root: Any = 1.0 if value == 0 else least if beyond(least) <= 0 else optimize.brentq(beyond, least, 1.0)
    return Difference(value, low, high, float(root))


def per_seed(sums: Sums, metric: str) -> np.ndarray:
    """The metric of each seed, [seeds], over all documents."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return METRICS[metric](sums.of.sum(1) / sums.over.sum(1))


def level(sums: Sums, metric: str) -> Estimate:
    """The metric itself."""
    return estimated(per_seed(sums, metric), interval(*sums.pooled, metric=metric))


def change(a: Sums, b: Sums, metric: str) -> Estimate | None:
    """metric(a) / metric(b) - 1, paired by seed and document; None without a seed in common."""
    if (both := common(a, b)) is None:
        return None
    a, b = both
    text = paired_ratio(a.pooled, b.pooled, metric=metric)
    text = Interval(*(None if bound is None else bound - 1 for bound in text))
    return estimated(per_seed(a, metric) / per_seed(b, metric) - 1, text)


def difference(a: Sums, b: Sums, metric: str) -> Estimate | None:
    """metric(a) - metric(b), paired by seed and document, with its p-value."""
    if (both := common(a, b)) is None:
        return None
    a, b = both
    x, y = per_seed(a, metric), per_seed(b, metric)
    return estimated(x - y, document_difference(a.pooled, b.pooled, metric=metric), seed_difference(x, y))


def change_beyond(a: Sums, start: Sums, b: Sums, start_of_b: Sums, metric: str) -> Estimate | None:
    """The change of a less that of b, each from its own start, paired by seed and document, with its p-value."""
    if (ends := common(a, start, b, start_of_b)) is None:
        return None
    after, before, after_b, before_b = (per_seed(sums, metric) for sums in ends)
    text = difference_of_ratios([sums.pooled for sums in ends], metric=metric)
    x, y = after / before, after_b / before_b
    return estimated(x - y, text, seed_difference(x, y))


def common(first: Sums, *others: Sums) -> list[Sums] | None:
    """All, restricted to the seeds in common; None if there are none or the documents differ."""
    seeds = [seed for seed in first.seeds if all(seed in sums.seeds for sums in others)]
    if not seeds or any(sums.of.shape[1] != first.of.shape[1] for sums in others):
        return None
    return [sums.only(seeds) for sums in (first, *others)]


# ---- which of two labels is better -------------------------------------------------------------------------------------
class Comparison(NamedTuple):
    """Two labels at a length, paired by seed and by document.

    Attributes:
        better: The label whose mean is better.
        worse: The label whose mean is worse.
        length: Length of the windows or examples.
        seeds: Number of seeds that both have.
        documents: Number of documents that both were measured on.
        value: Difference in the task's metric, above 0.
        low: Lower end of its 95% interval; None if there is none.
        high: Upper end of its 95% interval.
        over: Source of variation of the interval: "seeds and documents", or with one seed "documents", without that of training.
        text_low: Lower end of the interval over documents, for the same models.
        text_high: Its upper end.
        seed_low: Lower end of the interval over seeds, on the same text; None with one seed.
        seed_high: Its upper end.
        p: p-value adjusted by Holm over all pairs of labels at this length; None if there is no interval.
        q: p-value adjusted by Benjamini and Hochberg: of the pairs with q below 0.05, one in twenty is expected to be noise.
        decided: Whether p is below `SIGNIFICANT` and the interval excludes 0, over seeds: only then one is better.
    """

    better: str
    worse: str
    length: int
    seeds: int
    documents: int
    value: float
    low: float | None
    high: float | None
    over: str | None
    text_low: float | None
    text_high: float | None
    seed_low: float | None
    seed_high: float | None
    p: float | None
    q: float | None
    decided: bool


def compared(sums: Mapping[str, Sums], length: int, metric: str, less_is_better: bool) -> list[Comparison]:
    """Every pair of labels that were measured at a length, the better first."""
    pairs: list[tuple[str, str, int, Estimate]] = []
    for (a, of_a), (b, of_b) in combinations(sums.items(), 2):
        estimate = difference(of_a, of_b, metric)
        if estimate is None or estimate.value is None:
            continue
        a_is_better = (estimate.value <= 0) == less_is_better
        names = (a, b) if a_is_better else (b, a)
        pairs.append((*names, of_a.of.shape[1], estimate.negative if estimate.value < 0 else estimate))
    known = [estimate.p for *_, estimate in pairs if estimate.p is not None]
    adjusted = iter(zip(holm(known), benjamini_hochberg(known), strict=True))
    return [_of(*pair, length, *((None, None) if pair[-1].p is None else next(adjusted))) for pair in pairs]


def _of(
    better: str, worse: str, documents: int, estimate: Estimate, length: int, p: float | None, q: float | None
) -> Comparison:
    assert estimate.value is not None
    decided = len(estimate.values) > 1 and p is not None and p < SIGNIFICANT and estimate.above(0) == HOLDS
    counts = length, len(estimate.values), documents
    return Comparison(better, worse, *counts, estimate.value, *estimate.ends, p, q, decided)
