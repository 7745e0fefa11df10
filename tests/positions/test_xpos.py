"""xpos: published numbers, scores of two other libraries, the closed form at any position, and no overflow."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import longitude as lg
from longitude.positions.rotary import RotaryTable, XPos
from tests.support import refused_calls

LAYOUTS = ("half", "interleaved")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rotary.json").read_text())
LAST = 131_071


def magnitude(table: RotaryTable) -> torch.Tensor:
    return torch.hypot(table.cos, table.sin)


# Sun et al. 2022, with gamma = 0.4: zeta of the first and the last pair, and its root for scale_base = 512.
@pytest.mark.parametrize(
    ("head_dim", "zeta", "root"),
    [(4, [0.2857143, 0.6428571], [0.9975562, 0.9991374]), (64, [0.2857143, 0.9776786], [0.9975562, 0.9999559])],
)
def test_golden(head_dim: int, zeta: list, root: list) -> None:
    xpos, at = XPos(head_dim, "half"), torch.tensor([1, 512])
    tables = xpos.prepare(at, dtype=torch.float64)
    want = torch.tensor([root, zeta], dtype=torch.float64)
    torch.testing.assert_close(magnitude(tables.queries)[:, [0, -1]], want, atol=5e-8, rtol=0)
    torch.testing.assert_close(magnitude(tables.keys)[:, [0, -1]], 1 / want, atol=5e-7, rtol=0)


@pytest.mark.parametrize("row", GOLDEN["xpos"], ids=lambda row: f"{row['source']}-{row['scale_base']}")
def test_scores_equal_those_of_other_libraries(row: dict) -> None:
    q, k, want = (torch.tensor(row[name]) for name in ("q", "k", "scores"))
    xpos = XPos(q.shape[-1], "interleaved", scale_base=row["scale_base"])
    torch.testing.assert_close(xpos.rotate_queries(q, 0) @ xpos.rotate_keys(k, 0).mT, want, atol=5e-6, rtol=0)
    order = [*range(0, q.shape[-1], 2), *range(1, q.shape[-1], 2)]  # the same pairs, in the other layout
    half = XPos(q.shape[-1], "half", scale_base=row["scale_base"])
    scores = half.rotate_queries(q[..., order], 3) @ half.rotate_keys(k[..., order], 3).mT
    torch.testing.assert_close(scores, want, atol=5e-6, rtol=0)


def closed_form(q: np.ndarray, k: np.ndarray, n: int, m: int, layout: str, scale_base: float, gamma: float) -> float:
    """sum over pairs of zeta^((n - m)/scale_base) times rope's score, in plain numpy."""
    pairs = len(q) // 2
    first = np.arange(0, 2 * pairs, 2) if layout == "interleaved" else np.arange(pairs)
    second = first + (1 if layout == "interleaved" else pairs)
    angle = (n - m) * 10_000.0 ** (-np.arange(pairs) / pairs)
    zeta = (np.arange(pairs) / pairs + gamma) / (1 + gamma)
    dot, cross = q[first] * k[first] + q[second] * k[second], q[second] * k[first] - q[first] * k[second]
    return float((zeta ** ((n - m) / scale_base) * (dot * np.cos(angle) - cross * np.sin(angle))).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("scale_base", "gamma"), [(512, 0.4), (100.0, 0.1), (2048, 3.0)])
def test_scores_equal_the_closed_form_anywhere(layout: str, scale_base: float, gamma: float) -> None:
    """Through the tables of the query's block, from near and far; and where nothing says a length."""
    q, k = np.random.default_rng(0).normal(size=(2, 8))
    xpos, x = XPos(8, layout, scale_base=scale_base, gamma=gamma), torch.tensor(np.stack([q, k]))[:, None, None, None]
    block = xpos.length_at(0, 0)
    for n in (0, 1, block - 1, block, block + 1, 5000, 100_003, LAST):
        for m in {n, n - 1, n - 7, n - 700, n - block, n // 2, 0}:
            if m < 0:
                continue
            want = closed_form(q, k, n, m, layout, scale_base, gamma)
            length = xpos.length_at(n, LAST)
            rotated_q = xpos.queries(x[0], xpos.prepare(torch.tensor([n]), length, torch.float64))
            rotated_k = xpos.keys(x[1], xpos.prepare(torch.tensor([m]), length, torch.float64))
            assert float((rotated_q * rotated_k).sum()) == pytest.approx(want, abs=2e-9)  # angles of 131,071 in float64
            if (scale_base, n) == (512, 5000):
                direct = xpos.rotate_queries(x[0], n) * xpos.rotate_keys(x[1], m)
                assert float(direct.sum()) == pytest.approx(want, abs=2e-9)


def test_blocks() -> None:
    """The length is the end of the query's block, whatever the newest key: decoding sees the tables of a whole pass."""
    xpos = XPos(8, "half")
    half = int(math.log(16) * 512 / math.log(1.4 / 0.4))  # where zeta_0 is about to fall to 1/16
    assert xpos.length_at(0, 0) == xpos.length_at(2 * half - 1, 10**6) == 2 * half
    assert xpos.length_at(2 * half, 2 * half) == xpos.length_at(4 * half - 1, 4 * half) == 4 * half
    query = torch.tensor([[0, 2 * half - 1, 2 * half, LAST]])
    assert torch.equal(xpos.length_at(query, query), (query // (2 * half) + 1) * 2 * half)
    assert (xpos.stable_keys, xpos.causal_only, xpos.relative, xpos.shared) == (False, True, True, True)
    assert XPos(8, "half", scale_base=1e-9).length_at(5, 5) == 6  # never an empty block
    assert XPos(8, "half", gamma=1e300).length_at(LAST, LAST) == 2**41  # nor one that no int64 holds


@pytest.mark.parametrize(("scale_base", "gamma"), [(512, 0.4), (37.5, 0.4), (512, 1e-4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_overflow_at_any_position(dtype: torch.dtype, scale_base: float, gamma: float) -> None:
    """Queries and keys at all of 0 .. 131,071 by the tables of any block: finite, and those that meet no larger than 16."""
    xpos = XPos(4, "interleaved", scale_base=scale_base, gamma=gamma).to(dtype)
    positions = torch.arange(0, LAST + 1, 257)
    x = torch.full((1, 1, len(positions), 4), 30.0, dtype=dtype)
    for n in (0, 5000, 100_003, LAST):
        end = xpos.length_at(n, LAST)
        tables = xpos.prepare(positions, end, dtype)
        assert tables.queries.cos.dtype == tables.keys.sin.dtype == torch.float32
        assert bool(xpos.queries(x, tables).isfinite().all())
        assert bool(xpos.keys(x, tables).isfinite().all())
        here = xpos.prepare(torch.arange(end - xpos.length_at(0, 0), end), end, dtype)
        for table in here:
            assert 1 / 16.1 < float(magnitude(table).min()) < 0.1 < 10 < float(magnitude(table).max()) < 16.01
        assert float(magnitude(tables.keys).max()) < 16.01
        assert float(magnitude(tables.queries).max()) < 16.01


def test_keys_after_the_block_take_the_magnitude_of_its_end() -> None:
    xpos = XPos(8, "half")
    end = xpos.length_at(0, 0)
    tables = xpos.prepare(torch.tensor([end - 1, end, end + 1, 2 * end]), end, torch.float64)
    sizes = magnitude(tables.keys)
    torch.testing.assert_close(sizes[1:], sizes[1].expand(3, 4), atol=1e-12, rtol=0)
    assert bool((sizes[0] < sizes[1]).all())
    early = magnitude(xpos.prepare(torch.tensor([0, end, end + 1]), 2 * end, torch.float64).queries)
    torch.testing.assert_close(early[0], early[1], atol=1e-12, rtol=0)
    assert bool((early[1] > early[2]).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_falling_it_is_rope(layout: str) -> None:
    """gamma beyond all bounds makes zeta 1."""
    xpos, rope = XPos(8, layout, base=500.0, gamma=1e15), lg.Rotary(8, layout, base=500.0)
    x = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    for table in (xpos.rotate_queries, xpos.rotate_keys):
        torch.testing.assert_close(table(x, 100), rope.rotate(x, 100), atol=1e-12, rtol=0)


def test_without_a_length_positions_must_fit_the_dtype() -> None:
    """Magnitudes up to the root of the greatest number; float64 reaches beyond 131,071."""
    x = torch.ones(1, 4)
    for dtype, reach in ((torch.float16, 2266), (torch.bfloat16, 18_129), (torch.float32, 18_130)):
        greatest = math.log(torch.finfo(dtype).max) / 2
        assert int(greatest * 512 / math.log(3.5)) == reach
        near = XPos(4, "half").rotate_keys(x.to(dtype), reach - 1)
        assert bool(near.isfinite().all())
        with pytest.raises(
            ValueError, match=rf"xpos without a length, in {dtype}: expected positions 0 \.\. {reach - 1}"
        ):
            XPos(4, "half").rotate_keys(x.to(dtype), reach)
    assert bool(XPos(4, "half").rotate_keys(x.double(), LAST).isfinite().all())


WRONG = [
    (lambda: XPos(7, "half"), "even rotary_dim"),
    (lambda: XPos(8, "neox"), "expected layout"),
    (lambda: XPos(8, "half", base=0.0), "base"),
    (lambda: XPos(8, "half", scale_base=0), "xpos: expected scale_base above 0, got 0"),
    (lambda: XPos(8, "half", gamma=-0.4), "xpos: expected gamma above 0, got -0.4"),
    (lambda: XPos(8, "half").rotate(torch.zeros(2, 6), 0), r"xpos: expected \[B, H, L, 8\], got \[1, 1, 2, 6\]"),
    (lambda: XPos(8, "half").rotate_keys(torch.zeros(2, 6), 0), r"xpos: expected \[B, H, L, 8\]"),
    (lambda: XPos(8, "half").prepare(torch.tensor([1.5])), "xpos: expected integer positions"),
    (lambda: XPos(8, "half").prepare(torch.tensor([-3]), 4), "xpos: .* got -3 .. -3"),
]


test_wrong_options = refused_calls(WRONG)
