"""The evolution that searches: laws of its candidates, and that it finds what there is to find."""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from longitude.extend.evolution import PUBLISHED, Bounds, evolve
from longitude.extend.factors import Candidate

BOUNDS = Bounds(low=1.0, high=5.0)
STARTS = [Candidate((4.0,) * 8, 1.0), Candidate(tuple(4 ** (k / 7) for k in range(8)), 1.0), Candidate((1.0,) * 8, 1.3)]
GOAL = (1.0, 1.0, 1.2, 1.3, 2.5, 3.4, 3.9, 4.6)


def distance(candidate: Candidate) -> float:
    return sum(math.log(a / b) ** 2 for a, b in zip(candidate.factors, GOAL, strict=True))


def distances(candidates: Sequence[Candidate]) -> list[float]:
    return [*map(distance, candidates)]


@pytest.mark.parametrize("evaluations", [10, 33, 400])
def test_every_candidate_is_new_monotone_and_within_bounds(evaluations) -> None:
    asked = []

    def evaluate(candidates: Sequence[Candidate]) -> list[float]:
        asked.extend(candidates)
        return distances(candidates)

    tried = evolve(STARTS, BOUNDS, evaluate, evaluations, Random(0))
    assert [*tried] == asked and len(asked) == len({*asked}) == evaluations
    assert asked[:3] == STARTS, "the starts, bounds or not"
    assert tried == {candidate: distance(candidate) for candidate in asked}
    for candidate in asked[3:]:
        assert all(a <= b for a, b in pairwise((1.0, *candidate.factors, 5.0)))
        assert candidate.attention_factor == 1


def test_how_many_are_tried() -> None:
    """As published; starts always; and no more where nothing new can be made."""
    assert PUBLISHED == 64 + 40 * 32
    assert [*evolve([*STARTS, STARTS[0]], BOUNDS, distances, 1, Random(0))] == STARTS
    start = Candidate((2.0,) * 4, 1.0)
    point = Bounds(low=2.0, high=2.0)
    assert [*evolve([start], point, lambda some: [0.0] * len(some), 50, Random(0))] == [start]


@pytest.mark.parametrize("seed", range(3))
def test_it_comes_near_to_what_is_best(seed) -> None:
    tried = evolve(STARTS, BOUNDS, distances, 600, Random(seed))
    assert min(tried.values()) < 0.25 * min(distance(start) for start in STARTS[:2])
