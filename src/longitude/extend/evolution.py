"""The evolutionary search of LongRoPE (Ding et al. 2024): factors that never fall, mutants and crossings of the best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from longitude.extend.factors import Candidate

POPULATION = 64
ROUNDS = 40
"""As published; a search of fewer tries has a smaller population."""
GENE = 0.3
"""Probability that a factor mutates; half of it, that a crossing takes the other parent's."""
STEP = 0.01
"""New factors are multiples of it."""
TRIES = 20
"""Attempts to make a candidate that is new and monotone, before the search does without."""

PUBLISHED = POPULATION + ROUNDS * POPULATION // 2
"""Candidates that the published search tries."""


@dataclass(frozen=True)
class Bounds:
    """Factors within low .. high that never fall from pair to pair."""

    low: float
    high: float

    def hold(self, candidate: Candidate) -> bool:
        """Whether the factors of a candidate are within them and never fall."""
        return all(a <= b for a, b in pairwise((self.low, *candidate.factors, self.high)))


def evolve(
    starts: Sequence[Candidate],
    bounds: Bounds,
    evaluate: Callable[[Candidate], float],
    evaluations: int,
    random: Random,
) -> dict[Candidate, float]:
    """Every candidate that was tried, in the order of trying, with its loss; first all starts, bounds or not.

    A population begins with the starts and mutants of them. In each round its better half stays, and as many new ones are
    added: half of them mutants of one of these, half crossings of two. Nothing is tried twice. The same arguments and losses
    give the same result: to continue after an interruption, call it again with an `evaluate` that caches its results.
    """
    tried = {start: evaluate(start) for start in dict.fromkeys(starts)}
    size = max(8, min(POPULATION, evaluations // ROUNDS // 4 * 4))
    parents, crossings = list(tried), 0
    while len(tried) < evaluations:
        children = _children(parents, size - len(parents), crossings, tried, bounds, random)
        if not children:
            break
        children = children[: evaluations - len(tried)]
        tried |= {child: evaluate(child) for child in children}
        parents = sorted([*parents, *children], key=tried.__getitem__)[: size // 2]
        crossings = size // 4
    return tried


def _children(
    parents: Sequence[Candidate],
    count: int,
    crossings: int,
    tried: Collection[Candidate],
    bounds: Bounds,
    random: Random,
) -> list[Candidate]:
    """`count` new ones, `crossings` of them crossings; fewer where no new one can be made."""

    def new(make: Callable[[], Candidate]) -> Candidate | None:
        for _ in range(TRIES):
            candidate = make()
            if candidate not in tried and candidate not in children and bounds.hold(candidate):
                return candidate
        return None

    children: list[Candidate] = []
    for i in range(count):
        made = new(lambda: crossing(parents, random)) if i < crossings else None
        made = made or new(lambda: mutant(random.choice(parents), bounds, random))
        if made is not None:
            children.append(made)
    return children


def mutant(parent: Candidate, bounds: Bounds, random: Random) -> Candidate:
    """Each factor, with probability GENE, drawn again between its neighbours'; an attention factor of 1."""
    factors = [bounds.low, *parent.factors, bounds.high]
    for k in range(1, len(factors) - 1):
        if random.random() < GENE:
            low, high = factors[k - 1], factors[k + 1]
            drawn = round(round(random.uniform(low, high) / STEP) * STEP, 10)
            factors[k] = min(high, max(low, drawn))
    return Candidate(tuple(factors[1:-1]), 1.0)


def crossing(parents: Sequence[Candidate], random: Random) -> Candidate:
    """One of two with some factors of the other, and an attention factor of 1. It may fall somewhere."""
    a, b = random.sample(parents, 2)
    factors = tuple(y if random.random() < GENE / 2 else x for x, y in zip(a.factors, b.factors, strict=True))
    return Candidate(factors, 1.0)
