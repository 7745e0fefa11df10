"""What benchmarks/retrieval.py says of extended models."""

import pytest

from retrieval import mean_score


def test_a_mean_counts_every_question():
    """As near as Wilson's interval of all 20 of a length, 10 right: 0.299 to 0.701."""
    rows = [{"length": n, "value": value, "count": 10} for n, value in ((512, 0.2), (512, 0.8), (1024, 0.0))]
    assert list(mean_score(rows, 512).values()) == pytest.approx([0.5, 0.2993, 0.7007], abs=1e-4)
