"""Scores of answers, means of trials and their ratios, with intervals."""

import math

import numpy as np
import pytest

from longitude.measure.retrieval import tasks
from longitude.statistics import proportions


def test_scores_are_the_published_ones():
    number = tasks.first_number
    assert [number(output, ["12345"]) for output in (" 12345.", "12345 67", "is 12345", "012345")] == [1] * 4
    assert [number(output, ["12345"]) for output in ("", " 1234", " 123456", "7 12345", "12,345", "none")] == [0] * 6
    assert tasks.match_all("ABC, def and 12", ["abc", "DEF", "ghi", "12"]) == 0.75
    assert tasks.match_all("xabcx", ["abc"]) == 1 and tasks.match_all("a b c", ["abc"]) == 0


def test_intervals_are_wilsons():
    # Brown, Cai and DasGupta 2001: (p + z^2/2n +- z sqrt(p q / n + z^2/4n^2)) / (1 + z^2/n), z = 1.96
    expected = {(10, 10): (0.7225, 1.0), (0, 10): (0.0, 0.2775), (8, 10): (0.4902, 0.9433), (25, 50): (0.3664, 0.6336)}
    for (right, count), interval in expected.items():
        value, *got = proportions.mean([1.0] * right + [0.0] * (count - right))
        assert value == right / count and got == pytest.approx(interval, abs=1e-4)
    assert proportions.mean([0.75, 0.25])[0] == 0.5 and proportions.mean([0.5])[1] < 0.5 < proportions.mean([0.5])[2]


@pytest.mark.parametrize(("ours", "theirs"), [((50, 100), (80, 100)), ((0, 20), (20, 20)), ((300, 400), (30, 40))])
def test_the_interval_of_a_ratio_covers(ours, theirs):
    """Of samples drawn again and again: at least 93 % of intervals hold the true ratio (95 in the limit)."""
    draw, (p, q) = np.random.default_rng(0), (ours[0] / ours[1], theirs[0] / theirs[1])
    value, low, high = proportions.ratio(proportions.wilson(p, ours[1]), proportions.wilson(q, theirs[1]))
    assert value == pytest.approx(p / q) and low <= value <= high
    held = tried = 0
    for _ in range(2000):
        a, b = draw.binomial(ours[1], p) / ours[1], draw.binomial(theirs[1], q) / theirs[1]
        if b > 0:
            _, low, high = proportions.ratio(proportions.wilson(a, ours[1]), proportions.wilson(b, theirs[1]))
            held, tried = held + (low - 1e-12 <= p / q <= high + 1e-12), tried + 1
    assert held / tried > 0.93


def test_the_interval_of_a_ratio_is_the_published_formula():
    """Donner and Zou 2012, equations for L and U, from limits (0.2, 0.6) of 0.4 and (0.5, 0.9) of 0.8."""
    value, low, high = proportions.ratio((0.4, 0.2, 0.6), (0.8, 0.5, 0.9))
    root = math.sqrt(0.32**2 - 0.2 * 0.9 * (0.8 - 0.2) * (1.6 - 0.9))
    assert (value, low) == pytest.approx((0.5, (0.32 - root) / (0.9 * (1.6 - 0.9))))
    root = math.sqrt(0.32**2 - 0.6 * 0.5 * (0.8 - 0.6) * (1.6 - 0.5))
    assert high == pytest.approx((0.32 + root) / (0.5 * (1.6 - 0.5)))
    assert proportions.ratio((0.5, 0.2, 0.8), (0.1, 0.0, 0.3))[2] == math.inf
