"""A number of a study with what seeds and documents say of it, each on its own: they are crossed, and never mixed.

With several seeds the interval is a t-interval over them (`longitude.statistics.seeds`), and the bootstrap over documents
(`longitude.statistics.documents`) says what other text would change about the same models. With one seed there is only the
latter, and nothing is known of training again.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from longitude.statistics.documents import (
    METRICS,
    Difference,
    Interval,
    document_difference,
    interval,
    paired_ratio,
)
from longitude.statistics.seeds import seed_difference, t_interval

HOLDS, LOST, UNCLEAR = "holds", "does not hold", "cannot tell"
WEAK = "learned too little"
"""A loss that does not rise says nothing about position where there was little to lose."""


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
        """[documents] each, summed over the seeds: the models as they are."""
        return self.of.sum(0), self.over.sum(0)

    def only(self, seeds: Sequence[int]) -> "Sums":
        """The sums of these seeds alone."""
        rows = [self.seeds.index(seed) for seed in seeds]
        return Sums(tuple(seeds), self.of[rows], self.over[rows])


class Estimate(NamedTuple):
    """A value with its intervals; what is missing is None.

    Attributes:
        value: The mean over seeds.
        low: Lower end of the 95% interval that is reported: over the seeds, with one over the documents of its text.
        high: Its upper end.
        over: What it is over; None where there is none.
        text_low: Lower end of the 95% interval over documents, of the models as they are.
        text_high: Its upper end.
        p: Two-sided p-value of a difference, over what the interval is over.
        values: One per seed.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    over: Literal["seeds", "documents"] | None = None
    text_low: float | None = None
    text_high: float | None = None
    p: float | None = None
    values: tuple[float, ...] = ()

    def below(self, limit: float) -> str:
        """`HOLDS` where every interval lies below the limit, `LOST` where every one lies above, else `UNCLEAR`."""
        ends = [end for end in (self.low, self.high, self.text_low, self.text_high) if end is not None]
        if len(ends) < 4:
            return UNCLEAR
        return HOLDS if max(ends) < limit else LOST if min(ends) > limit else UNCLEAR

    @property
    def negative(self) -> "Estimate":
        """Of b - a, where it is of a - b."""
        value, low, high, text_low, text_high = (
            None if end is None else -end for end in (self.value, self.high, self.low, self.text_high, self.text_low)
        )
        return Estimate(value, low, high, self.over, text_low, text_high, self.p, tuple(-v for v in self.values))

    def less(self, number: float) -> "Estimate":
        """It less a number that is known."""
        ends = (self.value, self.low, self.high, self.text_low, self.text_high)
        value, low, high, text_low, text_high = (None if end is None else end - number for end in ends)
        return Estimate(value, low, high, self.over, text_low, text_high, None, tuple(v - number for v in self.values))

    def above(self, limit: float) -> str:
        """`HOLDS` where every interval lies above the limit, `LOST` where every one lies below, else `UNCLEAR`."""
        return {HOLDS: LOST, LOST: HOLDS, UNCLEAR: UNCLEAR}[self.below(limit)]


def estimated(values: ArrayLike, text: Interval | Difference, seeds: Interval | Difference | None = None) -> Estimate:
    """An estimate of one value per seed, whose interval over documents is `text`; seeds: theirs, by default `t_interval`."""
    seeds = seeds or t_interval(values)
    each = tuple(np.asarray(values, np.float64).tolist())
    chosen, over = (seeds, "seeds") if len(each) > 1 else (text, "documents")
    over = None if chosen.low is None else over
    p = getattr(chosen, "p", None)
    return Estimate(seeds.value, chosen.low, chosen.high, over, text.low, text.high, p, each)


def per_seed(sums: Sums, metric: str) -> np.ndarray:
    """The metric of each seed, [seeds], over all documents."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return METRICS[metric](sums.of.sum(1) / sums.over.sum(1))


def level(sums: Sums, metric: str) -> Estimate:
    """The metric itself."""
    return estimated(per_seed(sums, metric), interval(*sums.pooled, metric=metric))


def change(a: Sums, b: Sums, metric: str) -> Estimate | None:
    """metric(a) / metric(b) - 1, paired by seed and document; None without a seed in common."""
    both = common(a, b)
    if both is None:
        return None
    a, b = both
    text = paired_ratio(a.pooled, b.pooled, metric=metric)
    text = Interval(*(None if bound is None else bound - 1 for bound in text))
    return estimated(per_seed(a, metric) / per_seed(b, metric) - 1, text)


def difference(a: Sums, b: Sums, metric: str) -> Estimate | None:
    """metric(a) - metric(b), paired likewise, with its p-value."""
    both = common(a, b)
    if both is None:
        return None
    a, b = both
    x, y = per_seed(a, metric), per_seed(b, metric)
    return estimated(x - y, document_difference(a.pooled, b.pooled, metric=metric), seed_difference(x, y))


def common(a: Sums, b: Sums) -> tuple[Sums, Sums] | None:
    """Both with the seeds that both have; None where there is none, or the documents differ."""
    seeds = [seed for seed in a.seeds if seed in b.seeds]
    if not seeds or a.of.shape[1] != b.of.shape[1]:
        return None
    return a.only(seeds), b.only(seeds)
