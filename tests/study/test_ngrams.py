"""Tables of short contexts against a loop over the formula, and on text that they know by heart."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from longitude.study.ngrams import NGrams, ngram_bits


def loop(training, window, at, order, vocabulary):
    """p of window[at], by dictionaries."""
    p = 1 / vocabulary
    for k in range(1, min(order, at + 1) + 1):
        after = defaultdict(Counter)
        for row in training.tolist():
            for i in range(max(1, k - 1), len(row)):
                after[tuple(row[i - k + 1 : i])][row[i]] += 1
        seen = after[tuple(window[at - k + 1 : at])]
        if seen:
            p = (seen[window[at]] + len(seen) * p) / (seen.total() + len(seen))
    return p


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equal_to_the_formula(order):
    random = np.random.default_rng(order)
    training, held_out = random.integers(0, 5, (7, 12)), random.integers(0, 6, (3, 9))
    got = NGrams(training, order, 6).nats(held_out)
    want = [[-np.log(loop(training, row, i, order, 6)) for i in range(1, 9)] for row in held_out.tolist()]
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_sum_to_one(order):
    training = np.random.default_rng(0).integers(0, 4, (20, 9))
    tables = NGrams(training, order, 5)
    last = [np.exp(-tables.nats(np.array([[3, 1, token]]))[0, -1]) for token in range(5)]
    assert sum(last) == pytest.approx(1)


def test_a_longer_context_tells_more_of_a_text_that_repeats():
    text = np.resize([0, 1, 0, 2], (50, 17))
    bits = ngram_bits(text, [text[:1]], (1, 2, 3), 3)
    assert (
        bits[3] < 0.1 < bits[2] < 0.8 < bits[1]
    )  # after 0 comes 1 or 2: half a bit a token, and the token before tells


@pytest.mark.parametrize(("order", "vocabulary"), [(0, 256), (8, 256), (4, 100_000)])
def test_orders_that_do_not_fit(order, vocabulary):
    with pytest.raises(ValueError, match="order: expected 1 or more"):
        NGrams(np.zeros((1, 3), int), order, vocabulary)
