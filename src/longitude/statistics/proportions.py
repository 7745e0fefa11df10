"""Intervals of scores from 0 to 1: of a mean, of a difference on the same questions, of a ratio of two means."""

import math
from collections.abc import Sequence

QUANTILE = 1.959964
"""Standard normal quantile of a two-sided 95% interval."""


def mean(scores: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of scores from 0 to 1, one or more, with Wilson's 95% interval."""
    return wilson(math.fsum(scores) / len(scores), len(scores))


def wilson(value: float, count: int, quantile: float = QUANTILE) -> tuple[float, float, float]:
    """(value, low, high) of a mean of `count` scores from 0 to 1, with Wilson's interval (Wilson 1927), of 95% by default.

    Wilson's interval is for right or wrong answers and has a width for ten of ten, too, where a bootstrap has none. Scores
    in between spread less than right-or-wrong ones of the same mean, so that for them it is on the wide side.
    """
    shrink = 1 + quantile**2 / count
    middle = (value + quantile**2 / (2 * count)) / shrink
    half = quantile / shrink * math.sqrt(value * (1 - value) / count + (quantile / (2 * count)) ** 2)
    return value, min(value, max(0.0, middle - half)), max(value, min(1.0, middle + half))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """(difference of the means, low, high) of scores from 0 to 1 on the same questions, with a 95% interval.

    Bonett and Price 2012, Journal of Educational and Behavioral Statistics 37, 479: Wald's interval with two more pairs, in
    which either is right alone, so that it has a width for a few pairs that are all alike, too.
    """
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    count = len(apart) + 2
    middle = math.fsum(apart) / count
    half = QUANTILE * math.sqrt(((math.fsum(x * x for x in apart) + 2) / count - middle**2) / count)
    value = math.fsum(apart) / len(apart)
    return value, min(value, max(-1.0, middle - half)), max(value, min(1.0, middle + half))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """(ratio, low, high) of two means, each (mean, low, high) of trials of its own; the second above 0.

    The interval is found from both intervals (Donner and Zou 2012, Statistical Methods in Medical Research 21, 347). Where the
    second may be 0, it has no upper end.
    """
    (p, low, high), (q, from_q, to_q) = ours, theirs
    least = p * q - math.sqrt(max(0.0, (p * q) ** 2 - low * to_q * (2 * p - low) * (2 * q - to_q)))
    most = p * q + math.sqrt(max(0.0, (p * q) ** 2 - high * from_q * (2 * p - high) * (2 * q - from_q)))
    below, above = to_q * (2 * q - to_q), from_q * (2 * q - from_q)
    return p / q, max(0.0, least / below), most / above if above > 0 else math.inf
