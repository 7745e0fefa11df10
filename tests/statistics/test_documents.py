"""Bootstrap intervals over documents: against closed forms, and under pairing."""

import math

import numpy as np
import pytest

from longitude.statistics.documents import document_difference, interval, paired_difference, paired_ratio
from tests.support import refused_calls


def sums(documents, *, spread=1.0, seed=0):
    """nats and weights of documents of different lengths, losses around 2 nats."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(50, 500, documents).astype(float)
    return weights * (2 + spread * rng.normal(size=documents)), weights


def test_value_is_the_ratio_of_sums_and_the_seed_fixes_its_interval():
    nats, weights = sums(40)
    ratio = nats.sum() / weights.sum()
    for metric, value in (("bits_per_byte", ratio / math.log(2)), ("perplexity", math.exp(ratio)), ("mean", ratio)):
        assert interval(nats, weights, metric=metric).value == pytest.approx(value, rel=1e-14)
    assert interval(nats, weights) == interval(nats, weights)
    assert interval(nats, weights) != interval(nats, weights, seed=1)


def test_width_is_the_delta_method_of_a_ratio():
    """Var(sum y / sum w) = sum (y - r w)^2 / (sum w)^2: the percentile interval is r +- 1.96 of its root."""
    nats, weights = sums(400)
    ratio = nats.sum() / weights.sum()
    error = np.sqrt(((nats - ratio * weights) ** 2).sum()) / weights.sum()
    _, low, high = interval(nats, weights, metric="mean", resamples=20000)
    assert (low, high) == pytest.approx((ratio - 1.96 * error, ratio + 1.96 * error), abs=0.06 * error)


def test_two_documents_have_a_closed_form():
    """Resamples of two documents: both a, both b (1/4 each), or one of each (1/2)."""
    assert interval([1.0, 9.0], [1.0, 3.0], metric="mean") == (2.5, 1.0, 3.0)


@pytest.mark.slow
def test_intervals_cover_the_truth_about_as_often_as_they_promise():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        weights = rng.integers(50, 150, 60).astype(float)
        result = interval(weights * rng.normal(2, 1, 60), weights, metric="mean", resamples=500, seed=trial)
        covered += result.low <= 2 <= result.high
    assert 0.90 <= covered / 300 <= 0.98  # 0.95 +- 0.0126 a standard error, less the percentile method's small deficit


def test_pairing_removes_what_documents_share():
    nats, weights = sums(50)
    result = paired_difference((nats + 0.1 * weights, weights), (nats, weights), metric="mean")
    assert result == pytest.approx((0.1, 0.1, 0.1), abs=1e-12)
    alone = interval(nats, weights, metric="mean")
    assert alone.high - alone.low > 0.3
    assert paired_ratio((3 * nats, weights), (nats, weights), metric="mean") == pytest.approx((3, 3, 3), rel=1e-12)
    assert paired_difference(sums(30), sums(30), metric="perplexity") == (0.0, 0.0, 0.0)


def test_difference_has_a_sign_and_an_order():
    (a, weights), b = sums(50), sums(50)[0] - 10
    there, back = paired_difference((a, weights), (b, weights)), paired_difference((b, weights), (a, weights))
    assert there.value > 0
    assert there == pytest.approx((-back.value, -back.high, -back.low))


def test_the_p_value_of_a_difference_is_the_share_of_resamples_on_the_other_side():
    """Of two documents a quarter of the resamples is both times the one that a is worse on."""
    ones = np.ones(2)
    found = document_difference(([1.0, 4.0], ones), ([2.0, 2.0], ones), metric="mean")
    assert (
        found.interval == paired_difference(([1.0, 4.0], ones), ([2.0, 2.0], ones), metric="mean") == (0.5, -1.0, 2.0)
    )
    assert found.p == pytest.approx(2 * 0.25, abs=0.05)
    assert document_difference((2 * ones, ones), (ones, ones), metric="mean").p == 2 / 2001  # no resample is below zero
    assert document_difference((ones, ones), (ones, ones), metric="mean").p == 1


def test_missing_stays_missing():
    nats, weights = sums(10)
    nats[3] = np.nan
    assert interval(nats, weights) == (None, None, None)
    assert paired_difference((nats, weights), sums(10)) == (None, None, None)
    assert interval([1e6], [1.0], metric="perplexity") == (None, None, None)  # exp overflows
    assert interval([0.0, 0.0], [0.0, 0.0]) == (None, None, None)
    assert interval([3.0], [2.0], metric="mean") == (1.5, None, None)


test_wrong_use = refused_calls([
    (lambda: interval([1.0, 2.0], [1.0]), "2", "1"),
    (lambda: interval([], []), "[documents]", "0"),
    (lambda: interval(1.0, 1.0), "documents"),
    (lambda: interval(*sums(2), metric="perplexty"), "'perplexty'", "'perplexity'"),
    (lambda: interval(*sums(2), resamples=0), "resamples", "1", "0"),
    (lambda: paired_difference(sums(10), sums(11)), "[documents]", "10", "11"),
    (lambda: interval(np.ones((3, 10)), np.ones((3, 10))), "[documents]", "3", "10"),
])  # fmt: skip
