"""Scores of answers, and means of trials with intervals."""

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
