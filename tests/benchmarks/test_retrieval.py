"""What benchmarks/retrieval.py says of extended models."""

import pytest

from retrieval import kept, mean_score


def of(bits, scores):
    return {"bits": bits, "means": {length: {"value": value} for length, value in scores.items()}}


@pytest.mark.parametrize(("bits", "score", "words"), [(2.1, 0.89, ["perplexity"]), (2.11, 0.9, ["retrieval"])])
def test_kept_is_nearly_what_was_before(bits, score, words):
    """At most 1.05 of the bits and at least 0.9 of the score of the unchanged model at its training length."""
    unchanged = of({512: 2.0, 2048: 9.0}, {512: 1.0, 2048: 0.0})
    assert kept(of({512: 5.0, 2048: bits}, {512: 0.1, 2048: score}), unchanged, 512, 2048) == words


def test_a_mean_counts_every_question():
    """As near as Wilson's interval of all 20 of a length, 10 right: 0.299 to 0.701."""
    rows = [{"length": n, "value": value, "count": 10} for n, value in ((512, 0.2), (512, 0.8), (1024, 0.0))]
    assert list(mean_score(rows, 512).values()) == pytest.approx([0.5, 0.2993, 0.7007], abs=1e-4)
