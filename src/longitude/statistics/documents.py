"""Intervals over documents: the error bars of every loss that Longitude reports.

A metric of text is a function of one ratio of sums, sum(nats) / sum(weights), so documents are resampled whole, with
their nats and weights together: long documents count for more, and the tokens of one document are never treated as
independent. Percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13) by
scipy.stats.bootstrap, with a fixed seed. Two cells measured on the same documents are compared by resampling the
documents once for both, which removes the spread that the documents have in common.

These intervals are about trained models: they do not cover the variation of training again. Seeds and documents are crossed,
and seeds are few: `longitude.statistics.seeds` has intervals over them.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap

from longitude.errors import check_sizes, unknown

METRICS: dict[str, Callable] = {
    "bits_per_byte": lambda nats: nats / math.log(2),  # weights: bytes
    "perplexity": np.exp,  # weights: tokens
    "mean": lambda ratio: ratio,
}
RESAMPLES = 2000
Sums = tuple[ArrayLike, ArrayLike]
"""(nats, weights), each [documents]."""


class Interval(NamedTuple):
    """A value with its interval; None if there is none.

    Attributes:
        value: The metric; None if it is not finite.
        low: Lower end; None with fewer than two documents, or if it is not finite.
        high: Upper end; None in the same cases as `low`.
    """

    value: float | None
    low: float | None
    high: float | None


class Difference(NamedTuple):
    """A difference with its interval and p-value.

    Attributes:
        value: The difference; None if it is not finite.
        low: Lower end; None with fewer than two documents or seeds.
        high: Upper end; None in the same cases as `low`.
        p: Two-sided p-value; None in the same cases as `low`.
    """

    value: float | None
    low: float | None
    high: float | None
    p: float | None

    @property
    def interval(self) -> Interval:
        """The interval without the p-value."""
        return Interval(self.value, self.low, self.high)


def interval(
    nats: ArrayLike, weights: ArrayLike, *, metric: str = "bits_per_byte", resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """metric(sum of nats / sum of weights) with its 95% bootstrap interval over documents.

    Args:
        nats: [documents].
        weights: Same shape as nats.
        metric: "bits_per_byte" (weights are bytes), "perplexity" (weights are tokens) or "mean" (the plain ratio).
        resamples: Number of bootstrap resamples.
        seed: Random seed of the resampling.

    Returns:
        The value with its percentile interval.

    Raises:
        ValueError: For shapes that differ, unknown metrics, resamples < 1.

    Source:
        Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    return _bootstrap([(nats, weights)], lambda cell: cell, metric, seed, resamples).interval


def paired_difference(a: Sums, b: Sums, *, metric: str = "bits_per_byte", seed: int = 0) -> Interval:
    """`document_difference` without its p-value."""
    return document_difference(a, b, metric=metric, seed=seed).interval


def document_difference(a: Sums, b: Sums, *, metric: str = "bits_per_byte", seed: int = 0) -> Difference:
    """metric(a) - metric(b) on the same documents, negative if a is better.

    Args:
        a: (nats, weights), each [documents].
        b: Those of the other model, in the same order of documents.
        metric: "bits_per_byte" (weights are bytes), "perplexity" (weights are tokens) or "mean" (the plain ratio).
        seed: Random seed of the resampling, which draws documents once for both.

    Returns:
        The difference with its 95% percentile interval, and as its p-value the share of resamples on the other side of zero,
        doubled: never below 2 / (RESAMPLES + 1).

    Raises:
        ValueError: As `interval`.

    Source:
        Davison and Hinkley 1997, Bootstrap Methods and their Application, chapter 4
    """
    return _bootstrap([a, b], lambda a, b: a - b, metric, seed)


def paired_ratio(a: Sums, b: Sums, *, metric: str = "bits_per_byte") -> Interval:
    """metric(a) / metric(b) on the same documents; arguments and errors as of `document_difference`."""
    return _bootstrap([a, b], lambda a, b: a / b, metric).interval


def difference_of_ratios(sums: Sequence[Sums], *, metric: str = "bits_per_byte") -> Difference:
    """metric(a) / metric(b) - metric(c) / metric(d) of four sums on the same documents, as of `document_difference`."""
    return _bootstrap(sums, lambda a, b, c, d: a / b - c / d, metric)


def _bootstrap(cells, combine, metric, seed=0, resamples=RESAMPLES) -> Difference:
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS, "They are in longitude.statistics.documents.METRICS.")
    check_sizes("interval", resamples=resamples)
    sums = _sums(cells)
    documents = sums.shape[-1]

    def statistic(drawn, axis=-1):  # indices into documents [..., documents]
        totals = sums @ _counts(drawn, documents).T  # [cells, 2, resamples]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return combine(*METRICS[metric](totals[:, 0] / totals[:, 1])).reshape(drawn.shape[:-1])

    every = np.arange(documents)
    value = float(statistic(every))
    if not math.isfinite(value):
        return Difference(None, None, None, None)
    if documents < 2:
        return Difference(value, None, None, None)
    result = bootstrap(
        [every],
        statistic,
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, 2**21 // documents),  # bounds the resampled indices to 16 MiB
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = map(float, result.confidence_interval)
    if not (math.isfinite(low) and math.isfinite(high)):
        return Difference(value, None, None, None)
    drawn = result.bootstrap_distribution
    other_side = 1 + min((drawn <= 0).sum(), (drawn >= 0).sum())
    return Difference(value, low, high, min(1.0, 2 * float(other_side) / (resamples + 1)))


def _counts(indices: np.ndarray, size: int) -> np.ndarray:
    """Indices [..., n] below size -> how often each was drawn, [rows, size]: a resampled sum is counts @ values."""
    rows = indices.reshape(-1, indices.shape[-1])
    flat = rows + size * np.arange(len(rows))[:, None]
    return np.bincount(flat.ravel(), minlength=len(rows) * size).reshape(-1, size).astype(np.float64)


def _sums(cells) -> np.ndarray:
    """[cells, nats and weights, documents], float64, checked."""
    arrays = [np.asarray(array, dtype=np.float64) for cell in cells for array in cell]
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1 or 0 in shapes[0]:
        raise ValueError(
            f"sums must all be [documents] over the same documents, not empty; got shapes "
            f"{', '.join(str(shape) for shape in shapes)}; of several seeds, longitude.statistics.seeds has intervals"
        )
    return np.stack(arrays).reshape(len(cells), 2, -1)
