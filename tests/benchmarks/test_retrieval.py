"""What benchmarks/retrieval.py says of extended models."""

from typing import Any

import pytest

from retrieval import kept, mean_score


def of(bits: dict[int, float], scores: dict[int, float]) -> dict[str, Any]:
    return {"bits": bits, "means": {length: {"value": value} for length, value in scores.items()}}


@pytest.mark.parametrize(
    ("bits", "score", "words"),
    [
        (2.1, 0.9, ["perplexity", "retrieval"]),
        (2.11, 0.9, ["retrieval"]),
        (2.1, 0.89, ["perplexity"]),
        (3.0, 0.0, []),
    ],
)
def test_kept_is_nearly_what_was_before(bits: float, score: float, words: list[str]) -> None:
    """At most 1.05 of the bits and at least 0.9 of the score of the unchanged model at its training length."""
    unchanged = of({512: 2.0, 2048: 9.0}, {512: 1.0, 2048: 0.0})
    assert kept(of({512: 5.0, 2048: bits}, {512: 0.1, 2048: score}), unchanged, 512, 2048) == words


def test_a_mean_counts_every_question() -> None:
    """Of one length; as near as Wilson's interval of all its questions (10 of 20: 0.299 to 0.701)."""
    rows = [
        {"length": 512, "value": 0.2, "count": 10},
        {"length": 512, "value": 0.8, "count": 10},
        {"length": 1024, "value": 0.0, "count": 10},
    ]
    assert list(mean_score(rows, 512).values()) == pytest.approx([0.5, 0.2993, 0.7007], abs=1e-4)
