"""Intervals over seeds: Student's published sample, pairing, coverage, adjusted p-values."""

import numpy as np
import pytest

from longitude.statistics.seeds import (
    benjamini_hochberg,
    holm,
    seed_difference,
    t_interval,
)
from tests.support import refused_calls

# Additional hours of sleep by two drugs, ten patients: Student 1908, p. 20.
DEXTRO = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
LAEVO = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_students_own_sample():
    """The interval and p-value that R's t.test(extra ~ group, data = sleep, paired = TRUE) prints of it."""
    found = seed_difference(DEXTRO, LAEVO)
    assert found.interval == pytest.approx((-1.58, -2.4598858, -0.7001142), abs=1e-7)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert seed_difference(LAEVO, DEXTRO).interval == pytest.approx((1.58, 0.7001142, 2.4598858), abs=1e-7)
    assert t_interval(np.subtract(DEXTRO, LAEVO)) == found.interval


def test_three_seeds_by_the_table_of_t():
    """t of two degrees of freedom is 4.303 at 97.5 %, in every book's table."""
    half = 4.302653 * np.std([2.0, 3.0, 4.0], ddof=1) / np.sqrt(3)
    assert t_interval([2.0, 3.0, 4.0]) == pytest.approx((3.0, 3.0 - half, 3.0 + half), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_cover_the_truth_as_often_as_they_promise(seeds):
    drawn = np.random.default_rng(seeds).normal(2, 1, (2000, seeds))
    covered = sum(found.low <= 2 <= found.high for found in map(t_interval, drawn))
    assert covered / 2000 == pytest.approx(0.95, abs=0.02)  # four standard errors


def test_what_seeds_share_is_no_noise_of_their_difference():
    shared = np.array([0.0, 10.0, -10.0])
    assert seed_difference(shared + 1, shared) == (1.0, 1.0, 1.0, 0.0)
    assert seed_difference(shared, shared) == (0.0, 0.0, 0.0, 1.0)


def test_one_seed_has_no_interval_and_nothing_finite_no_value():
    assert t_interval([2.5]) == (2.5, None, None)
    assert seed_difference([2.5], [2.0]) == (0.5, None, None, None)
    assert t_interval([2.5, np.inf]) == (None, None, None)


def test_holm_steps_down():
    """Of four: the smallest times 4, the next times 3, none below one before it, none above 1 (Holm 1979, section 2)."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_finds_something_in_noise_no_more_often_than_promised():
    noise = np.random.default_rng(0).random((4000, 10))
    assert np.mean([min(holm(each)) < 0.05 for each in noise]) == pytest.approx(0.05, abs=0.014)


# Fifteen hypotheses of a trial of rt-PA: Benjamini and Hochberg 1995, section 4.1.
TRIAL = [
    0.0001,
    0.0004,
    0.0019,
    0.0095,
    0.0201,
    0.0278,
    0.0298,
    0.0344,
    0.0459,
    0.324,
    0.4262,
    0.5719,
    0.6528,
    0.759,
    1.0,
]


def test_benjamini_and_hochbergs_own_example():
    """At 5 % they reject the four smallest, where Bonferroni's way and Holm's reject three."""
    assert sum(each < 0.05 for each in benjamini_hochberg(TRIAL)) == 4
    assert sum(each < 0.05 for each in holm(TRIAL)) == 3
    assert benjamini_hochberg([]) == [] and benjamini_hochberg(TRIAL[::-1]) == benjamini_hochberg(TRIAL)[::-1]


test_wrong_use = refused_calls([
    (lambda: t_interval([]), "0"),
    (lambda: t_interval([[1.0]]), "[seeds]", "1"),
    (lambda: seed_difference([1.0, 2.0], [1.0]), "2", "1"),
    (lambda: holm([0.5, 1.5]), "0", "1"),
    (lambda: benjamini_hochberg([-0.1]), "0", "1"),
])  # fmt: skip
