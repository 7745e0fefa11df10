"""What a search may try: LongRoPE2's critical pair, starts, and candidates, by the numbers of the first author's code.

That code: J-shang/LongRoPE, branch dev/nishang/omni, evolution/search.py (critical pair), evolution/algorithms/genetic_base.py
(starts) and dim_mono.py (candidates). The numbers were computed with it.
"""

import math
from itertools import pairwise
from random import Random

import pytest

from longitude.extend.evolution import Bounds, RisingBounds, crossing, evolve, mutant
from longitude.extend.factors import Candidate, RotaryPairs, ntk_below
from longitude.extend.spaces import longrope, longrope2
from longitude.positions.scaling import NTK, rope_frequencies

LLAMA3 = RotaryPairs(base=500_000.0, rotary_dim=128, original_length=8192, length=131_072)
PHI3 = RotaryPairs(base=10_000.0, rotary_dim=96, original_length=4096, length=131_072)
SMALL = RotaryPairs(base=10_000.0, rotary_dim=32, original_length=256, length=512)


@pytest.mark.parametrize(
    ("pairs", "critical", "real"), [(LLAMA3, 34, 34.98411900147241), (PHI3, 33, 33.77016095531591), (SMALL, 6, None)]
)
def test_the_critical_pair(pairs, critical, real) -> None:
    """By hand for Llama 3: ln(8192 / 2 pi) / ln 500000 * 64 = 7.17303 / 13.12236 * 64 = 34.984; the ceiling less one is 34.
    Pair 34 needs 2 pi 500000^(34/64) = 6696 tokens for a turn, and pair 35 needs 8219."""
    assert pairs.critical == critical
    if real is not None:
        assert math.log(pairs.original_length / math.tau, pairs.base) * pairs.rotary_dim / 2 == pytest.approx(real)
    turns = [math.tau * pairs.base ** (2 * k / pairs.rotary_dim) for k in (critical, critical + 1)]
    assert turns[0] < pairs.original_length <= turns[1]


def test_the_critical_pair_at_its_ends() -> None:
    """A training length of less than a turn of the first pair leaves all to the search; one of more than the last's, none."""
    assert RotaryPairs(10_000.0, 16, 6, 64).critical == 0
    assert longrope2(RotaryPairs(10_000.0, 16, 6, 60)).starts["1.0 s"].factors == pytest.approx(
        [10 + 0.1 * k for k in range(8)]
    )
    with pytest.raises(ValueError, match=r"all 8 rotary pairs make a full turn within 131072 tokens.*--method ntk"):
        longrope2(RotaryPairs(10_000.0, 16, 131_072, 262_144))


def test_starts_are_those_of_the_code() -> None:
    """Phi-3 has s = 32, the code's own; ntk_init(48, 33, 32 + 3.2 j) gave these for j = 0 and 7."""
    starts = longrope2(PHI3).starts
    assert [*starts] == ["1.0 s", "1.1 s", "1.2 s", "1.3 s", "1.4 s", "1.5 s", "1.6 s", "1.7 s"]
    first, last = starts["1.0 s"].factors, starts["1.7 s"].factors
    pairs = (0, 1, 10, 20, 32, 33, 34, 47)
    assert [first[k] for k in pairs] == pytest.approx(
        [1.0, 1.110735379572726, 2.858288447746818, 8.169812850522913, 28.80974225590046, 32.0, 32.1, 33.4], rel=1e-9
    )
    assert [last[k] for k in pairs] == pytest.approx(
        [1.0, 1.1287399748339562, 3.3569050739972526, 11.268811675828498, 48.19533392356599, 54.4, 54.5, 55.8], rel=1e-9
    )
    assert {start.attention_factor for start in starts.values()} == {1.0}


def test_below_the_critical_pair_is_ntk() -> None:
    """NTK multiplies the base by a power, so that pair k's factor is a power of k: s^(2k/(dim-2)), of which the last is s."""
    plain, scaled = (rope_frequencies(64, 10_000.0, scheme).inverse for scheme in (None, NTK(4.0)))
    ntk = (plain / scaled).tolist()
    assert ntk_below(ntk, 20) == pytest.approx(ntk) and ntk_below(ntk, 31) == pytest.approx(ntk)
    assert ntk_below((9.0, 9.0, 16.0, 17.0), 2) == pytest.approx((1.0, 4.0, 16.0, 17.0))
    assert ntk_below((3.0, 2.0), 0) == (3.0, 2.0)


def obeys(candidate: Candidate, pairs: RotaryPairs, high: float) -> bool:
    """The space, written again."""
    d, factors = pairs.critical, candidate.factors
    below = all(math.isclose(factors[k], factors[d] ** (k / d)) for k in range(d))
    rising = all(b - a > 1e-6 for a, b in pairwise(factors))
    return (
        below
        and rising
        and pairs.factor - 1e-9 <= factors[d]
        and factors[-1] <= high
        and factors[-1] - factors[-2] <= 4.005
    )


@pytest.mark.parametrize(
    ("pairs", "high"), [(LLAMA3, 32.0), (PHI3, 64.0), (SMALL, 4.3), (RotaryPairs(10_000.0, 32, 300, 1111), 1111 / 150)]
)
def test_candidates_obey_the_space(pairs, high) -> None:
    """Mutants of mutants and crossings of them, thousands; of factors that are no whole number, too. At s = 2 the highest is a
    start's: 3.4 + 0.9."""
    space, random = longrope2(pairs), Random(0)
    assert space.bounds.high == pytest.approx(high) and isinstance(space.bounds, RisingBounds)
    assert all(space.bounds.hold(start) and obeys(start, pairs, high + 1e-9) for start in space.starts.values())
    parents, crossed = [*space.starts.values()], 0
    for _ in range(1500):
        child = mutant(random.choice(parents), space.bounds, random)
        d = pairs.critical
        assert len(child.factors) == pairs.rotary_dim // 2 and child.attention_factor == 1
        if space.bounds.hold(child):
            assert obeys(child, pairs, high + 1e-9), child
            parents = [*parents[-30:], child]
        else:  # the last is now too far above a neighbour that was drawn before it
            assert child.factors[-1] - child.factors[-2] > 4
        mixed = crossing(parents, space.bounds, random)
        assert mixed.factors[:d] == pytest.approx([mixed.factors[d] ** (k / d) for k in range(d)])
        if space.bounds.hold(mixed):
            crossed += 1
            assert obeys(mixed, pairs, high + 1e-9), mixed
    assert crossed > 100


def test_draws_are_hundredths_between_the_neighbours_and_reach_both_ends() -> None:
    bounds, random = RisingBounds(low=2.0, high=9.0, critical=2), Random(0)
    factors = (1.0, 1.42, 2.02, 2.05, 2.1)

    def drawn(k: int) -> set[float]:
        return {bounds.drawn(factors, k, random) for _ in range(5000)}

    assert drawn(2) == {2.0, 2.01, 2.02, 2.03, 2.04}, "from the lowest to below the neighbour"
    assert drawn(3) == {2.03, 2.04, 2.05, 2.06, 2.07, 2.08, 2.09}
    last = drawn(4)
    assert (min(last), max(last)) == (2.06, 6.05), "at most 4 above its neighbour"
    assert bounds.drawn((1.0, 1.4, 2.0, 2.01, 2.02), 3, random) == 2.01, "no other between them"
    close_to_high = {bounds.drawn((1.0, 2.0, 8.0, 8.97, 8.98), 4, random) for _ in range(100)}
    assert close_to_high == {8.98, 8.99, 9.0}


def test_each_factor_mutates_with_probability_three_tenths() -> None:
    space, random, changed = longrope2(LLAMA3), Random(1), 0
    start = space.starts["1.5 s"]
    for _ in range(500):
        child = mutant(start, space.bounds, random)
        changed += sum(a != b for a, b in zip(start.factors[34:], child.factors[34:], strict=True))
    assert 0.26 < changed / (500 * 30) < 0.31, "a draw may be the factor that there was"


def test_the_search_reaches_what_is_best_from_a_population_of_starts() -> None:
    """Eight starts are all that a small population holds; it goes on all the same."""
    space = longrope2(SMALL)
    goal = ntk_below([0.0] * 6 + [2.2, 2.3, 2.6, 2.7, 3.0, 3.1, 3.3, 3.6, 3.7, 4.1], 6)

    def distance(candidate: Candidate) -> float:
        return sum(math.log(a / b) ** 2 for a, b in zip(candidate.factors, goal, strict=True))

    starts = [*space.starts.values()]
    for count in (32, 400):
        tried = evolve(starts, space.bounds, lambda some: [*map(distance, some)], count, Random(0))
        assert len(tried) == count and [*tried][:8] == starts
        assert all(map(space.bounds.hold, tried))
    assert min(tried.values()) < 0.25 * min(map(distance, starts))


def test_the_space_of_longrope_is_every_pair() -> None:
    space = longrope(PHI3)
    assert space.bounds == Bounds(low=1.0, high=40.0, critical=0) and space.starts == PHI3.starts()
