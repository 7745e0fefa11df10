"""The evolutionary search of LongRoPE (Ding et al. 2024): mutants and crossings of the best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from longitude.extend.factors import Candidate, RotaryPairs

POPULATION = 64
ROUNDS = 40
"""Rounds of the evolution as published; a search with fewer tries has a smaller population."""
GENE = 0.3
"""Probability that a factor mutates; in a crossing, half of it is that of taking the other parent's factor."""
STEP = 0.01
"""New factors are multiples of it."""
TRIES = 20
"""Attempts to make a candidate that is new and within the bounds, before the search gives it up."""

PUBLISHED = POPULATION + ROUNDS * POPULATION // 2
"""Candidates that the published search tries."""


@dataclass(frozen=True)
class Bounds:
    """Factors within low .. high that never fall from pair to pair."""

    low: float
    high: float

    @classmethod
    def of(cls, pairs: RotaryPairs) -> Bounds:
        """From 1 to 1.25 times the extension, for every pair."""
        return cls(1.0, 1.25 * pairs.factor)

    def hold(self, candidate: Candidate) -> bool:
        """Whether a candidate is within them."""
        return all(a <= b for a, b in pairwise((self.low, *candidate.factors, self.high)))

    def drawn(self, factors: Sequence[float], k: int, random: Random) -> float:
        """A new factor of pair k, between those of its neighbours: a multiple of STEP, or one of theirs."""
        low = self.low if k == 0 else factors[k - 1]
        high = self.high if k == len(factors) - 1 else factors[k + 1]
        drawn = round(round(random.uniform(low, high) / STEP) * STEP, 10)
        return min(high, max(low, drawn))


def evolve(
    starts: Sequence[Candidate],
    bounds: Bounds,
    evaluate: Callable[[Sequence[Candidate]], Sequence[float]],
    evaluations: int,
    random: Random,
) -> dict[Candidate, float]:
    """Every candidate that was tried, in the order of trying, with its loss; first all starts, bounds or not.

    A population begins with the starts and mutants of them. In each round its better half stays, and as many new ones are
    added: half of them mutants of one of these, half crossings of two. Nothing is tried twice. The same arguments and losses
    give the same result: to continue after an interruption, call it again with an `evaluate` that keeps its results.

    Args:
        starts: Tried first.
        bounds: Limits of all other genes.
        evaluate: The losses of candidates that do not depend on each other: all starts, then those of each round.
        evaluations: Number of candidates to try, starts included.
        random: Source of random numbers.
    """

    def losses(candidates: Sequence[Candidate]) -> dict[Candidate, float]:
        return dict(zip(candidates, evaluate(candidates), strict=True))

    tried = losses([*dict.fromkeys(starts)])
    size = max(8, len(tried) + 2, min(POPULATION, evaluations // ROUNDS // 4 * 4))
    parents, crossings = list(tried), 0
    while len(tried) < evaluations:
        children = _children(parents, size - len(parents), crossings, tried, bounds, random)
        if not children:
            break
        children = children[: evaluations - len(tried)]
        tried |= losses(children)
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
    """`count` new candidates, `crossings` of them by crossing; fewer if no new one can be made."""

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
    factors = list(parent.factors)
    for k in range(len(factors)):
        if random.random() < GENE:
            factors[k] = bounds.drawn(factors, k, random)
    return Candidate(tuple(factors), 1.0)


def crossing(parents: Sequence[Candidate], random: Random) -> Candidate:
    """Crossover: a parent with some factors of another, and attention factor 1. Factors may decrease somewhere."""
    a, b = random.sample(parents, 2)
    factors = list(a.factors)
    for k in range(len(factors)):
        if random.random() < GENE / 2:
            factors[k] = b.factors[k]
    return Candidate(tuple(factors), 1.0)
