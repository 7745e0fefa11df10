"""Which of two labels is better, and when that is called so: over seeds and over documents, both."""

import numpy as np

from longitude.statistics.comparisons import compared
from longitude.statistics.estimates import HOLDS, UNCLEAR, Estimate, Sums

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


def test_a_difference_of_every_seed_is_called_so_only_where_other_documents_would_not_change_it():
    assert pair([1, 2, 1, 2]).decided
    few = pair([9, -4, -4, 1])  # every seed has the same difference, which one document makes
    assert few.p == 0 and few.text_low < 0 and not few.decided


def test_nothing_holds_of_which_an_interval_is_missing():
    assert Estimate(1.0, 0.5, 1.5, "seeds", 0.5, 1.5).below(2) == HOLDS
    assert Estimate(1.0, 0.5, 1.5, "seeds").below(2) == Estimate(1.0, None, None, None, 0.5, 1.5).below(2) == UNCLEAR
