"""Which of two labels is better at a length, by how much, and whether that is more than noise."""

from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

from longitude.statistics.estimates import HOLDS, Estimate, Sums, difference
from longitude.statistics.seeds import benjamini_hochberg, holm

SIGNIFICANT = 0.05
"""Significance level for p-values adjusted by Holm."""


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


def orders_kept(smaller: Mapping[str, float], larger: Mapping[str, float]) -> tuple[int, int]:
    """How many pairs of labels stand in the same order in both, and how many pairs there are.

    Args:
        smaller: The value of each label, such as its loss at one size of models.
        larger: The value of each label at the next size; labels in one alone are left out.

    Source:
        Magnusson et al. 2025, DataDecide, https://arxiv.org/abs/2504.11393
    """
    pairs = [*combinations([label for label in smaller if label in larger], 2)]
    return sum((smaller[a] < smaller[b]) == (larger[a] < larger[b]) for a, b in pairs), len(pairs)


def _of(
    better: str, worse: str, documents: int, estimate: Estimate, length: int, p: float | None, q: float | None
) -> Comparison:
    assert estimate.value is not None
    decided = len(estimate.values) > 1 and p is not None and p < SIGNIFICANT and estimate.above(0) == HOLDS
    ends = (
        estimate.low,
        estimate.high,
        estimate.over,
        estimate.text_low,
        estimate.text_high,
        estimate.seed_low,
        estimate.seed_high,
    )
    return Comparison(better, worse, length, len(estimate.values), documents, estimate.value, *ends, p, q, decided)
