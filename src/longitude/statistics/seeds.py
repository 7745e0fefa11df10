"""Intervals over seeds: the variation of training the same model again.

Seeds are few, so a mean over them has a t-interval on one value per seed (Student 1908). Two models whose seeds saw the same
data in the same order are compared by their differences seed by seed, which removes what the order of the data does to both.
Documents are crossed with seeds, not nested in them: every seed is measured on the same ones. Their interval
(`longitude.statistics.documents`) is another one, about the same models on other text, and
`longitude.statistics.estimates` combines both.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from longitude.statistics.documents import Difference, Interval


def t_interval(values: ArrayLike) -> Interval:
    """The mean of one value per seed with its 95% t-interval.

    Args:
        values: [seeds].

    Returns:
        The mean with its interval; no ends with one seed.

    Raises:
        ValueError: For no values.

    Source:
        Student 1908, https://doi.org/10.1093/biomet/6.1.1
    """
    return _t(values).interval


def seed_difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """The mean of a - b over seeds, paired: negative if a is smaller.

    Args:
        a: One value per seed, [seeds].
        b: One value per seed of the other model, in the same order; each seed trained both on the same data.

    Returns:
        The mean difference with its t-interval and p-value; neither with one seed.

    Raises:
        ValueError: For different numbers of values, and as `t_interval`.

    Source:
        Student 1908, https://doi.org/10.1093/biomet/6.1.1
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a and b must have a value for each of the same seeds, got shapes {a.shape} and {b.shape}")
    return _t(a - b)


def holm(p: Sequence[float]) -> list[float]:
    """p-values of several comparisons, adjusted so that a level bounds the probability of any false finding.

    Args:
        p: One for each comparison of a table.

    Returns:
        The adjusted values in the same order.

    Raises:
        ValueError: For a value outside 0 to 1.

    Source:
        Holm 1979, https://www.jstor.org/stable/4615733
    """
    values, order = _sorted(p)
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(stepped, 1)
    return adjusted.tolist()


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """Adjust p-values of several comparisons for the false discovery rate: the expected share of noise among findings.

    Args:
        p: One for each comparison of a table, independent or positively dependent.

    Returns:
        The adjusted values in the same order.

    Raises:
        ValueError: For a value outside 0 to 1.

    Source:
        Benjamini and Hochberg 1995, https://doi.org/10.1111/j.2517-6161.1995.tb02031.x
    """
    return stats.false_discovery_control(_sorted(p)[0]).tolist() if len(p) else []


def _sorted(p: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """p-values, checked, and their order."""
    values = np.asarray(p, np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"p-values must be from 0 to 1, got {list(p)}")
    return values, np.argsort(values, kind="stable")


def _t(values: ArrayLike) -> Difference:
    """t-test and t-interval of the mean of a sample, against zero."""
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values must be one number per seed, [seeds], got shape {values.shape}")
    value = float(values.mean())
    if not math.isfinite(value):
        return Difference(None, None, None, None)
    if len(values) < 2:
        return Difference(value, None, None, None)
    if np.ptp(values) == 0:  # seeds that change nothing
        return Difference(value, value, value, float(value == 0))
    test: Any = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval()
    return Difference(value, float(low), float(high), float(test.pvalue))
