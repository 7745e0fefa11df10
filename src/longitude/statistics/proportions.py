"""Intervals of scores from 0 to 1: of a mean, and of a difference on the same questions."""

import math
from collections.abc import Sequence

QUANTILE = 1.959964
"""Standard normal quantile of a two-sided 95% interval."""


def mean(scores: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of scores from 0 to 1, one or more, with Wilson's 95% interval."""
    return wilson(math.fsum(scores) / len(scores), len(scores))


def wilson(value: float, count: int, quantile: float = QUANTILE) -> tuple[float, float, float]:
    """(value, low, high) of a mean of `count` scores from 0 to 1, with Wilson's interval (Wilson 1927), of 95% by default.

    The interval is made for right-or-wrong answers. Unlike a bootstrap, it has a width even for ten of ten. Scores between 0
    and 1 vary less than right-or-wrong ones of the same mean, so for them it is conservative.
    """
    shrink = 1 + quantile**2 / count
    middle = (value + quantile**2 / (2 * count)) / shrink
    half = quantile / shrink * math.sqrt(value * (1 - value) / count + (quantile / (2 * count)) ** 2)
    return value, min(value, max(0.0, middle - half)), max(value, min(1.0, middle + half))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """(difference of the means, low, high) of scores from 0 to 1 on the same questions, with a 95% interval.

    Bonett and Price 2012, Journal of Educational and Behavioral Statistics 37, 479: Wald's interval with two more pairs, one
    that only `ours` gets right and one that only `theirs` does. So it has a width even if all pairs are equal.
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    count = len(differences) + 2
    middle = math.fsum(differences) / count
    half = QUANTILE * math.sqrt(((math.fsum(x * x for x in differences) + 2) / count - middle**2) / count)
    value = math.fsum(differences) / len(differences)
    return value, min(value, max(-1.0, middle - half)), max(value, min(1.0, middle + half))
