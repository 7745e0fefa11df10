"""Drawings of encodings against the formulas of their papers, written out by hand, and of mixers against what they compute."""

import math

import numpy as np
import pytest
import torch

import longitude as lg
from longitude.drawings import mixers
from longitude.drawings.build import Shape, built
from longitude.drawings.drawing import Grid, Lines
from longitude.drawings.encodings import drawings, trained

SHAPE = Shape(length=64, heads=4, head_dim=16)


def drawn(label: str, name: str, shape: Shape = SHAPE) -> Lines | Grid:
    return {each.name: each for each in drawings(built(label, shape).encoding, shape)}[name]


def lines(label: str, name: str, shape: Shape = SHAPE) -> dict[str, dict[float, float]]:
    """Line -> x -> y."""
    found = drawn(label, name, shape).lines
    return {of: dict(zip(np.asarray(x).tolist(), np.asarray(y).tolist(), strict=True)) for of, (x, y) in found.items()}


def near(found: dict[float, float], formula, atol: float = 1e-12) -> None:
    np.testing.assert_allclose([*found.values()], [formula(x) for x in found], rtol=1e-12, atol=atol)


# ---- biases ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("heads", "slopes"), [(4, [2**-2, 2**-4, 2**-6, 2**-8]), (3, [2**-4, 2**-8, 2**-2])])
def test_alibi_falls_by_the_slopes_of_the_paper(heads, slopes):
    shape = Shape(length=64, heads=heads, head_dim=16)
    for head, slope in enumerate(slopes, 1):
        near(lines("alibi", "bias", shape)[f"head {head}"], lambda d, slope=slope: -slope * d)


def test_a_one_sided_alibi_has_a_side_for_each_half_of_its_heads():
    found = lines("alibi:future=one-sided", "bias")
    past = {name: [d for d, y in line.items() if math.isfinite(y)] for name, line in found.items()}
    assert min(past["head 1"]) == min(past["head 2"]) == 0 == max(past["head 3"]) == max(past["head 4"])


def test_temperatures_are_their_formulas():
    saved = trained(built("ssmax", SHAPE).encoding)
    assert isinstance(saved, lg.SSMax)
    near(lines("ssmax", "temperature-by-keys")["factor"], lambda n: saved.rate[0].item() * math.log(n), 1e-7)
    near(lines("log_n:trained_length=64", "temperature-by-keys")["factor"], lambda n: math.log(n) / math.log(64))
    steps = lines("llama4_temperature:floor_scale=16", "temperature-by-position")["factor"]
    near(steps, lambda i: 1 + 0.1 * math.log(1 + (i + 1) // 16))
    assert drawn("rope+ssmax", "temperature-by-keys").title.startswith("What a query is multiplied by")


def test_t5_reads_the_buckets_of_the_paper():
    """Half of the buckets for an offset each, the others logarithmic up to max_distance."""

    def bucket(n: float) -> int:
        return int(n) if n < 16 else min(31, 16 + int(math.log(n / 16) / math.log(128 / 16) * 16 + 1e-9))

    near(lines("t5", "buckets")["row"], bucket)
    assert drawn("t5", "buckets").marks == {"the last row": 128}
    saved = trained(built("t5", SHAPE).encoding)  # a bias is drawn as a study trained it
    assert isinstance(saved, lg.T5Bias)
    table = saved.table.detach()
    near(lines("t5", "bias")["head 3"], lambda d: table[bucket(d), 2].item())


def test_rows_of_deberta_and_logarithms_of_swin():
    """Rows of DeBERTa are offsets from -span on; Swin v2 reads sign(d) log2(1 + 8 |d| / (W - 1)) / 3, of 1 at 7/8 (W - 1)."""
    near(lines("deberta:span=16", "buckets")["row"], lambda d: min(max(d + 16, 0), 31))
    read = lines("swin_v2:sides=9,9", "logarithms")["u"]
    near(read, lambda d: math.copysign(math.log2(1 + abs(d)) / 3, d))
    assert read[7] == 1


# ---- rotations -------------------------------------------------------------------------------------------------------
PAIRS = 8
THETA = [10_000 ** (-2 * k / 16) for k in range(PAIRS)]


def test_wavelengths_of_rope():
    near(lines("rope", "wavelengths")["no scaling"], lambda k: 2 * math.pi / THETA[int(k)])
    assert [*lines("rope:proportion=0.5", "wavelengths")["no scaling"]] == [0, 1, 2, 3]  # the others do not rotate


def test_a_scheme_is_drawn_before_and_after():
    label = "rope:scaling=linear,factor=8"
    found = lines(label, "wavelengths")
    near(found["no scaling"], lambda k: 2 * math.pi / THETA[int(k)])
    near(found["its own linear"], lambda k: 16 * math.pi / THETA[int(k)])
    assert drawn(label, "wavelengths").levels == {"training length": 64}
    follows = "rope:scaling=dynamic,factor=2,original_max_length=32,follow=sequence"
    slower = lines(follows, "wavelengths")["its own dynamic"]
    near(slower, lambda k: 2 * math.pi / THETA[int(k)] * (2 * 128 / 32 - 1) ** (2 * k / 14))
    assert drawn(follows, "wavelengths").levels == {"training length": 32}


def test_scores_of_rotated_vectors_are_sums_of_cosines():
    found = lines("rope:layout=half", "scores")
    near(found["q = k, all dimensions alike"], lambda d: sum(math.cos(d * t) for t in THETA) / PAIRS)
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta = torch.tensor(THETA, dtype=torch.float64)
    a, b = (torch.complex(v[0, :8], v[0, 8:]) for v in (q, k))
    product, norms = a * b.conj(), q.norm() * k.norm()
    near(found["random q and k, 1"], lambda d: (product * torch.exp(1j * theta * d)).real.sum() / norms)


# ---- the input -------------------------------------------------------------------------------------------------------
def test_the_sinusoid_table():
    grid = drawn("sinusoidal", "table")
    assert grid.rows[:2] == ["0", "1"] and len(grid.columns) == 64
    angles = np.outer(np.arange(48), [10_000 ** (-(c - c % 2) / 64) for c in grid.columns])
    want = np.where(np.asarray(grid.columns) % 2 == 0, np.sin(angles), np.cos(angles))
    np.testing.assert_allclose(grid.values, want, atol=1e-12)
    cosine = lines("sinusoidal", "codes")["cosine"]
    near(cosine, lambda d: sum(math.cos(d * 10_000 ** (-2 * i / 64)) for i in range(32)) / 32)


# ---- weights ----------------------------------------------------------------------------------------------
def test_weights_are_a_softmax_of_what_position_adds():
    found = lines("alibi", "weights")["head 1"]
    total = sum(math.exp(-d / 4) for d in range(64))
    near(found, lambda d: math.exp(-d / 4) / total)
    raw = [math.exp(4 * sum(math.cos(d * t) for t in THETA) / PAIRS) for d in range(64)]  # q.k = 16, scale 1/4
    near(lines("rope", "weights")["every head"], lambda d: raw[int(d)] / sum(raw))


# ---- axes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", ["pope", "fope"])
def test_rotations_of_each_head_its_own_are_drawn(label):
    """PoPE widens queries, and FoPE has series of each head of keys."""
    assert all(np.isfinite(y).all() for _, y in drawn(label, "scores").lines.values())


# ---- mixers ----------------------------------------------------------------------------------------------------------
def of_mixer(label: str, name: str) -> Lines | Grid:
    shape = Shape(length=64, heads=2, head_dim=8)
    return {each.name: each for each in mixers.drawings(built(label, shape).mixers[0].module, shape)}[name]


def test_keys_of_a_window():
    grid = of_mixer("window:size=3", "keys")
    for name, row in zip(grid.rows, grid.values, strict=True):
        want = [int(name) - key in (0, 1, 2) for key in grid.columns]
        assert row.astype(bool).tolist() == want


def test_influence_ends_where_a_window_does():
    offsets, share = of_mixer("window:size=5", "influence").lines["influence"]
    assert np.isfinite(share).tolist() == [d < 5 for d in offsets] and np.nanmax(share) == 1


SIZED = {"window": "window:size=8", "chunks": "chunks:size=8"}


@pytest.mark.parametrize("name", [SIZED.get(name, name) for name in lg.list_mixers()])
def test_every_mixer_has_an_influence(name):
    _, share = of_mixer(name, "influence").lines["influence"]
    assert np.nanmax(share) == 1 and share[0] > 0
