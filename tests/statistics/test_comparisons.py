"""Which of two labels is better, and when that is called so: over seeds and documents together."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from longitude.statistics.documents import Interval
from longitude.statistics.estimates import (
    HOLDS,
    UNCLEAR,
    Estimate,
    Sums,
    change_beyond,
    combined,
    compared,
    difference,
)
from longitude.statistics.seeds import benjamini_hochberg, holm, t_interval

OVER = np.ones((3, 4))


def pair(by_document, less_is_better=True):
    """b above a by these numbers, of each document, for every seed."""
    a = np.arange(12.0).reshape(3, 4)
    [found] = compared(
        {"a": Sums((0, 1, 2), a, OVER), "b": Sums((0, 1, 2), a + by_document, OVER)}, 64, "mean", less_is_better
    )
    return found


def test_the_better_is_lower_or_higher_and_ahead_by_a_number_above_0():
    assert (pair([1, 2, 1, 2]).better, pair([1, 2, 1, 2], less_is_better=False).better) == ("a", "b")
    assert pair([1, 2, 1, 2]).value == pair([1, 2, 1, 2], less_is_better=False).value == 1.5


def test_pairs_at_a_length_are_adjusted_together_by_holm_and_by_benjamini_and_hochberg():
    random = np.random.default_rng(3)
    shifts = {"a": 0.0, "b": 1.0, "c": 0.9, "d": 0.3}
    sums = {
        label: Sums((0, 1, 2), shift + random.normal(0, 0.25, (3, 8)), np.ones((3, 8)))
        for label, shift in shifts.items()
    }
    found = compared(sums, 64, "mean", True)
    raw = [difference(sums[a], sums[b], "mean").p for a, b in combinations(sums, 2)]
    assert len(found) == 6 and [each.p for each in found] == pytest.approx(holm(raw))
    assert [each.q for each in found] == pytest.approx(benjamini_hochberg(raw)) != pytest.approx(holm(raw))


def test_one_seed_decides_nothing_however_sure_its_documents_are():
    a = np.arange(40.0)[None]
    [found] = compared({"a": Sums((0,), a, a * 0 + 1), "b": Sums((0,), a + 1, a * 0 + 1)}, 64, "mean", True)
    assert found.over == "documents" and found.low > 0 and found.p < 0.05 and not found.decided


def test_a_difference_of_every_seed_is_called_so_only_where_other_documents_would_not_change_it():
    assert pair([1, 2, 1, 2]).decided
    few = pair([9, -4, -4, 1])  # every seed has the same difference, which one document makes
    assert few.seed_low == few.seed_high == 0.5 and few.low < 0 and few.p > 0.5 and not few.decided


def test_nothing_holds_of_which_an_interval_is_missing():
    assert Estimate(1.0, 0.5, 1.5, "seeds and documents", 0.5, 1.5).below(2) == HOLDS
    assert Estimate(1.0, 0.5, 1.5, "seeds").below(2) == Estimate(1.0, None, None, None, 0.5, 1.5).below(2) == UNCLEAR


def test_the_other_direction_has_every_number_negated_and_the_ends_turned():
    found = Estimate(1.0, 0.5, 2.0, "seeds and documents", 0.6, 1.5, 0.01, (0.9, 1.1), 0.7, 1.8)
    assert found.negative == Estimate(
        -1.0, -2.0, -0.5, "seeds and documents", -1.5, -0.6, 0.01, (-0.9, -1.1), -1.8, -0.7
    )
    assert found.negative.negative == found
    less = found.less(0.5)
    numbers = (less.value, less.low, less.text_high, less.seed_low, *less.values)
    assert numbers == pytest.approx((0.5, 0.0, 1.0, 0.2, 0.4, 0.6))
    assert less.p is None, "that of no difference from 0 says nothing of another number"


def test_a_change_beyond_another_is_paired_by_seed_and_by_document():
    """By hand: each seed rises by 0.1 more than its control does, and each document by as much."""
    nats, rise = np.array([[1.0, 2, 5], [2.0, 3, 6]]), np.array([[0.5], [0.2]])
    start, over = Sums((0, 1), nats, np.ones((2, 3))), np.ones((2, 3))
    after, of_control = Sums((0, 1), nats * (1.1 + rise), over), Sums((0, 1), nats * (1 + rise), over)
    turned = Sums((2, 1, 0), np.vstack([[9.0, 9, 9], of_control.of[::-1]]), np.ones((3, 3)))  # with a seed of its own
    turned_start = Sums((1, 0), nats[::-1], over)
    found = change_beyond(after, start, turned, turned_start, "mean")
    numbers = (found.value, found.seed_low, found.seed_high, *found.values)
    assert numbers == pytest.approx((0.1,) * 5) and (found.text_low, found.text_high) == pytest.approx((0.1, 0.1))
    assert change_beyond(of_control, start, after, start, "mean").value == pytest.approx(-0.1)
    assert change_beyond(after, start, of_control, turned.only([2]), "mean") is None
    assert change_beyond(after, start, of_control, Sums((0, 1), nats[:, :2], over[:, :2]), "mean") is None


def crossed(random, seeds, of_seeds, of_documents, of_both, documents=100):
    """Values [seeds, documents] of mean 0: what is the seed's, the document's, and that of the two together."""
    parts = random.normal(0, of_seeds, (seeds, 1)), random.normal(0, of_documents, (1, documents))
    return parts[0] + parts[1] + random.normal(0, of_both, (seeds, documents))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("effects", [(1, 0, 0), (1, 3, 0), (1, 10, 0), (0.1, 10, 5)], ids=str)
def test_the_combined_interval_covers_the_truth_on_other_text_and_by_other_seeds(seeds, effects):
    """Of 600 crossed samples at least 92 %: the promise is 95 %, of which four standard errors are 3.6 %."""
    random, covered, agreeing = np.random.default_rng(seeds), 0, 0
    for _ in range(600):
        drawn = crossed(random, seeds, *effects)
        means = drawn.mean(0)
        half = stats.norm.ppf(0.975) * means.std() / np.sqrt(len(means))
        found = combined(
            t_interval(drawn.mean(1)), Interval(means.mean(), means.mean() - half, means.mean() + half), seeds
        )
        covered += found.low <= 0 <= found.high
        agreeing += (found.p > 0.05) == (found.low <= 0 <= found.high)
    assert covered / 600 > 0.915 and agreeing == 600


def test_the_combined_interval_is_inside_neither_and_is_one_of_them_where_the_other_is_a_point():
    seeds, text = Interval(1.0, 0.6, 1.4), Interval(1.0, 0.7, 1.5)
    found = combined(seeds, text, 3)
    assert (found.low, found.high) == pytest.approx((0.5, 1 + np.hypot(0.4, 0.5)))
    point = Interval(1.0, 1.0, 1.0)
    assert combined(seeds, point, 3).interval == pytest.approx(seeds)
    assert combined(point, text, 3).interval == pytest.approx(text)


@pytest.mark.parametrize("sign", [1, -1])
def test_p_is_5_percent_where_the_end_of_a_lopsided_interval_reaches_0(sign):
    near, seeds, text = 0.5, (0.4, 0.4), (0.3, 1.5)  # distances of the ends: those towards 0, and those away from it
    intervals = [Interval(sign * near, *sorted((sign * (near - a), sign * (near + b)))) for a, b in (seeds, text)]
    found = combined(*intervals, 3)
    assert (found.low if sign > 0 else found.high) == pytest.approx(0, abs=1e-12) and found.p == pytest.approx(0.05)
