"""Where training positions come from: sorted, distinct, within range, and drawn as their papers say."""

from collections import Counter
from itertools import combinations

import pytest
import torch

from longitude.positions.samplers import Contiguous, Mixed, Randomized, Shifted, Skipped, sampler
from tests.support import refused_calls


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def is_uniform(counts: Counter, outcomes: list) -> None:
    """Each outcome and no other, about as often: chi square within 5 standard deviations of what chance gives."""
    assert set(counts) == set(outcomes)
    expected = counts.total() / len(outcomes)
    chi_square = sum((counts[outcome] - expected) ** 2 / expected for outcome in outcomes)
    free = len(outcomes) - 1
    assert chi_square < free + 5 * (2 * free) ** 0.5


SKIPPED = [Skipped(100), Skipped(100, 5), Skipped(40, 1), Skipped(17, 17)]
EVERY = [Contiguous(), Randomized(100), Randomized(17), *SKIPPED, Shifted(100), Shifted(17)]


@pytest.mark.parametrize("draw", EVERY, ids=str)
def test_positions_are_sorted_distinct_and_within_range(draw) -> None:
    positions = draw(200, 17, seeded())
    assert positions.shape == (200, 17) and positions.dtype == torch.int64
    assert bool((positions.diff(dim=1) > 0).all())
    assert positions.min() >= 0 and positions.max() < getattr(draw, "max_length", 17)


@pytest.mark.parametrize("draw", EVERY, ids=str)
def test_a_generator_decides_them(draw) -> None:
    state = torch.get_rng_state()
    one, again, other = (draw(8, 17, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone
    assert torch.equal(one, again)
    fixed = isinstance(draw, Contiguous) or draw.max_length == 17 or getattr(draw, "chunks", 2) == 1
    assert torch.equal(one, other) == fixed
    assert not fixed or one.tolist() == [list(range(17))] * 8


def test_randomized_subsets_are_uniform() -> None:
    """Ruoss et al. 2023, section 3: sampled without replacement, sorted."""
    rows = Randomized(6)(20_000, 3, seeded()).tolist()
    is_uniform(Counter(map(tuple, rows)), list(combinations(range(6), 3)))


def runs(row: list[int]) -> tuple[int, ...]:
    """Where positions do not count up by one."""
    return tuple(t for t in range(1, len(row)) if row[t] != row[t - 1] + 1)


def test_skipped_moves_the_second_run() -> None:
    """Zhu et al. 2024, section 3.2: the second is moved on by 0 .. max_length - length, and the cut is anywhere."""
    rows = Skipped(9)(20_000, 5, seeded()).tolist()
    assert all(row[0] == 0 for row in rows)
    is_uniform(Counter(row[-1] - 4 for row in rows), [0, 1, 2, 3, 4])
    moved = [row for row in rows if row[-1] > 4]
    is_uniform(Counter(map(runs, moved)), [(1,), (2,), (3,), (4,)])


def test_skipped_draws_each_skip_from_the_one_before() -> None:
    """u_c is uniform in u_(c-1) .. max_length - length. Three tokens in three chunks: p = 0, 1 + u_1, 2 + u_2."""
    rows = Skipped(6, chunks=3)(20_000, 3, seeded()).tolist()
    is_uniform(Counter(row[1] - 1 for row in rows), [0, 1, 2, 3])
    for first in (0, 1, 2):
        is_uniform(Counter(row[2] - 2 for row in rows if row[1] - 1 == first), list(range(first, 4)))


def test_skipped_cuts_are_uniform() -> None:
    rows = Skipped(10_000, chunks=3)(20_000, 5, seeded()).tolist()
    cuts = [runs(row) for row in rows if len(runs(row)) == 2]
    assert len(cuts) > 19_900
    is_uniform(Counter(cuts), list(combinations(range(1, 5), 2)))


def test_shifted_rows_have_one_offset() -> None:
    """Kiyono et al. 2021, section 3.1: uniform, the same for all tokens of a sequence."""
    rows = Shifted(9)(20_000, 5, seeded())
    assert bool((rows.diff(dim=1) == 1).all())
    is_uniform(Counter(rows[:, 0].tolist()), [0, 1, 2, 3, 4])


@pytest.mark.parametrize(("length", "parts"), [(16, [16, 8, 4, 2]), (17, [17, 9, 5, 3]), (3, [3, 2, 1, 1])])
def test_mixed_windows_have_parts_of_one_length(length, parts) -> None:
    """Pouransari et al. 2024, section 2: lengths by powers of two; here each has as many tokens as any other."""
    expected = Counter(tuple(t % part for t in range(length)) for part in parts)
    found = Counter(map(tuple, Mixed()(4000, length, seeded()).tolist()))
    assert set(found) == set(expected)
    assert all(abs(found[row] / 4000 - times / 4) < 0.05 for row, times in expected.items())  # 7 standard deviations
    assert torch.equal(Mixed()(8, length, seeded(1)), Mixed()(8, length, seeded(1)))
    assert {row[-1] for row in Mixed(1)(200, 16, seeded()).tolist()} == {15, 7}


def test_sampler_by_name() -> None:
    """Frozen, so two of the same options are one key."""
    assert len({sampler("contiguous"), Contiguous(), sampler("randomized", max_length=7), Randomized(7)}) == 2
    assert sampler("skipped", max_length=7, chunks=3) == Skipped(7, 3)
    assert sampler("skipped", max_length=7) == Skipped(7, 2)


test_wrong_use = refused_calls(
    [
        (lambda: sampler("randomised", max_length=7), "'randomised'", "'randomized'"),
        (lambda: sampler("skipped", max_len=7), "'skipped'", "'max_len'", "'max_length'"),
        (lambda: Randomized(5)(1, 6, seeded()), "Randomized", "max_length=5", "6"),
        (lambda: Skipped(9, 5)(1, 4, seeded()), "chunks=5", "4"),
        (lambda: Contiguous()(0, 3, seeded()), "Contiguous", "0"),
        (lambda: sampler("mixed", max_length=7), "'mixed'", "'max_length'"),
    ]
)
