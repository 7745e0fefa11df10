"""Frequencies and the schemes that stretch them: published numbers, the published library's tables, laws, and pitfalls."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longitude.positions.hugging_face import from_hugging_face
from longitude.positions.scaling import (
    NTK,
    BaseChange,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKByParts,
    Scaling,
    YaRN,
    rope_frequencies,
)

LISTS = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 8.0, 32.0]}
ONES = {"short_factor": [1.0] * 32, "long_factor": [1.0] * 32}


def inverse(scaling=None, head_dim: int = 64, base: float = 10_000.0, **options) -> Tensor:
    return rope_frequencies(head_dim, base, scaling, **options).inverse


def theta(k: float, dim: int = 64, base: float = 10_000.0) -> float:
    return base ** (-2 * k / dim)


def exact(got: Tensor, want: list[float], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=tolerance, atol=0)


# ---- plain -----------------------------------------------------------------------------------------------------------
def test_plain_frequencies() -> None:
    exact(inverse(head_dim=8), [1, 0.1, 0.01, 0.001], 1e-14)
    exact(inverse(head_dim=64, base=5e5, rotary_dim=16), [theta(k, 16, 5e5) for k in range(8)], 1e-14)
    assert rope_frequencies(8)[1:] == (1.0, 1.0)
    assert inverse().dtype == torch.float64


@pytest.mark.parametrize(
    ("dim", "proportion", "turning"), [(16, 1, 8), (16, 0.75, 6), (16, 0.7, 5), (16, 0.1, 0), (16, 0.0, 0), (4, 0.5, 1)]
)
def test_proportion_keeps_the_fastest_pairs_at_their_frequencies(dim: int, proportion: float, turning: int) -> None:
    """p-RoPE: exponents over all rotary dimensions, unlike partial rotary; int(p d) // 2 pairs."""
    want = [theta(k, dim) if k < turning else 0.0 for k in range(dim // 2)]
    exact(inverse(head_dim=dim, proportion=proportion), want)
    exact(inverse(Linear(2.0), head_dim=2 * dim, rotary_dim=dim, proportion=proportion), [x / 2 for x in want])


# ---- the published library -------------------------------------------------------------------------------------------
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "scaling.json").read_text())


def label(case: dict) -> str:
    p = case["rope_parameters"]
    return f"{p['rope_type']}-{case['head_dim']}-{p['rope_theta']:g}-{case['length']}"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=label)
def test_tables_of_transformers(case: dict) -> None:
    """Their float32 tables, made by tests/golden/make_scaling.py."""
    rope = from_hugging_face({name: case[name] for name in ("rope_parameters", "max_position_embeddings")})
    got = rope_frequencies(case["head_dim"], length=case["length"], **rope.options(case["head_dim"]))
    exact(got.inverse, case["inverse"], 1e-6)
    assert got.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)


def test_golden_cases_are_of_every_type() -> None:
    types = {case["rope_parameters"]["rope_type"] for case in GOLDEN["cases"]}
    assert types == {"linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}
    assert GOLDEN["versions"]["transformers"]


# ---- linear, base ----------------------------------------------------------------------------------------------------
def test_linear_divides_and_never_rounds_positions() -> None:
    """Rounding p/s down would make 904 of 5000 neighbours collide (5000 over 4096)."""
    exact(inverse(Linear(5000 / 4096)), [theta(k) * 4096 / 5000 for k in range(32)])
    positions = torch.arange(5000)[:, None] * inverse(Linear(5000 / 4096))[0]
    assert len(positions.unique()) == 5000


def test_base_change() -> None:
    """Adjusted base frequencies of d = 64, base 1e6, and of Llama 3 (d = 128, base 5e5)."""
    exact(inverse(BaseChange(1e6))[-1:], [1.5399265e-6], 1e-7)
    exact(inverse(BaseChange(5e5), 128)[-1:], [2.4551408e-6], 1e-7)
    exact(inverse(BaseChange(5e5), base=123.0), [theta(k, 64, 5e5) for k in range(32)])


# ---- NTK -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("factor", "ratio"), [(5000 / 4096, 1.2285814), (4.0, 4.1829366)])
def test_ntk_base(factor: float, ratio: float) -> None:
    """d = 64. With the exponent 2/(d-2), found in print, the ratios would be 1.0064539 and 1.0457341."""
    exact(inverse(NTK(factor)), [theta(k, 64, 10_000 * ratio) for k in range(32)], 1e-6)
    exact(inverse(NTK(factor))[-1:], [theta(31) / factor])  # the slowest is divided by the factor
    assert inverse(NTK(factor))[0] == 1.0
    exact(inverse(NTK(factor), head_dim=4), [1, 0.01 / factor])  # two pairs suffice


def test_dynamic_ntk() -> None:
    """factor 2, L = 4096, length 8192, d = 64: base 31082.24; at factor 1 the bracket is length/L."""
    scaling = DynamicNTK(2.0, 4096, max_length=8192)
    want = [theta(k, 64, 31_082.24) for k in range(32)]
    exact(inverse(scaling), want, 1e-6)
    exact(inverse(DynamicNTK(2.0, 4096), length=8192), want, 1e-6)
    exact(inverse(DynamicNTK(2.0, 4096, follow="row"), length=torch.tensor(8192)), inverse(scaling).tolist())
    assert inverse(DynamicNTK(2.0, 3, follow="row"), length=torch.tensor(10)).dtype == torch.float64
    exact(inverse(DynamicNTK(2.0, 3), length=torch.tensor(10)), inverse(DynamicNTK(2.0, 3), length=10).tolist())
    exact(inverse(DynamicNTK(1.0, 4096), length=8192), [theta(k, 64, 10_000 * 2 ** (64 / 62)) for k in range(32)])


@pytest.mark.parametrize("length", [1, 4095, 4096])
def test_dynamic_ntk_is_plain_up_to_the_original_length(length: int) -> None:
    """And returns to it when a sequence is shorter again. 3.3 x 4096 / 4096 would round."""
    for follow in ("declared", "row", "sequence"):
        assert torch.equal(inverse(DynamicNTK(3.3, 4096, 9000, follow), length=length), inverse())
        assert torch.equal(inverse(DynamicNTK(3.3, 4096, length, follow)), inverse())


# ---- by parts --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dim", "original", "truncate", "want"),
    [
        (64, 2048, True, (8, 21)),
        (64, 2048, False, (8.064, 20.105)),
        (128, 4096, True, (20, 46)),
        (128, 4096, False, (20.944, 45.027)),
        (16, 10**9, True, (13, 15)),  # clamped at d - 1, which lies beyond the last pair
        (64, 201, True, (0, 13)),  # and at 0
        (64, 6, True, (0, 0.001)),  # equal borders stand 0.001 apart
    ],
)
def test_borders_of_the_published_ramp(dim: int, original: int, truncate: bool, want: tuple) -> None:
    got = NTKByParts(4.0, original, truncate=truncate).borders(dim, 10_000.0)
    assert got == (pytest.approx(want, abs=5e-4) if not truncate else want)


def test_yarn_frequency() -> None:
    """d = 128, L = 4096, s = 16: pair 32 lies 12/26 down the ramp from 20 to 46, where the rest is a sixteenth."""
    scaled = inverse(YaRN(16.0, 4096), 128)
    exact(scaled[32:33] / theta(32, 128), [0.5673077], 1e-7)
    exact(scaled[32:33], [0.005673077], 1e-7)
    kept = [1 - min(max((k - 20) / 26, 0), 1) for k in range(64)]  # inverted, the slow pairs would stay
    exact(scaled, [theta(k, 128) * (g + (1 - g) / 16) for k, g in enumerate(kept)])
    assert torch.equal(scaled, inverse(NTKByParts(16.0, 4096), 128))


@pytest.mark.parametrize("scheme", [NTKByParts, YaRN])
def test_ramp_in_rotations(scheme: type) -> None:
    """The paper's: linear in rotations within L, from 1 to 32. Up to 0.367 from the published code's; 2.6 times at pair 33."""
    rotations = [4096 * theta(k, 128) / (2 * math.pi) for k in range(64)]
    kept = [min(max((r - 1) / 31, 0), 1) for r in rotations]
    paper = inverse(scheme(16.0, 4096, ramp="rotations"), 128)
    exact(paper, [theta(k, 128) * (g + (1 - g) / 16) for k, g in enumerate(kept)])
    code = inverse(scheme(16.0, 4096), 128)
    gap = (code - paper) / (inverse(head_dim=128) * 15 / 16)  # of gamma
    assert float(gap.abs().max()) == pytest.approx(0.367, abs=5e-4)
    assert float(code[33] / paper[33]) == pytest.approx(2.6, abs=0.05)


def test_betas_are_numbers_of_turns_within_the_original_length() -> None:
    """Pairs of at least beta_fast rotations stay, of at most beta_slow are interpolated: by either ramp."""
    rotations = 4096 * inverse() / (2 * math.pi)
    for ramp in ("dimensions", "rotations"):
        scaled = inverse(NTKByParts(8.0, 4096, 128, 2, ramp=ramp)) / inverse()
        fast, slow = (
            rotations >= 128 * 10_000 ** (2 / 64),
            rotations <= 2 * 10_000 ** (-2 / 64),
        )  # a pair further, for rounding
        assert torch.equal(scaled[fast], torch.ones_like(scaled[fast])) and fast.sum() >= 5
        assert torch.equal(scaled[slow], torch.full_like(scaled[slow], 1 / 8)) and slow.sum() >= 8
        assert ((scaled[~fast & ~slow] < 1) | (scaled[~fast & ~slow] > 1 / 8)).all()


def test_llama3() -> None:
    """Llama 3.1: factor 8, L = 8192, base 5e5, d = 128. Pairs 0..28 stay, 29..34 are blended, 35..63 divided by 8."""
    ratio = inverse(head_dim=128, base=5e5) / inverse(Llama3(8.0, 8192), 128, 5e5)
    assert torch.equal(ratio[:29], torch.ones(29, dtype=torch.float64))
    assert torch.equal(ratio[35:], torch.full((29,), 8.0, dtype=torch.float64))
    assert ((ratio[29:35] > 1) & (ratio[29:35] < 8)).all()
    exact(ratio[29:30], [1.2074840], 2e-7)  # published in float32
    exact(inverse(Llama3(8.0, 8192), 128, 5e5)[[29, 63]], [0.002166571, 3.0689259e-7], 5e-7)


def test_llama3_is_by_parts_with_turns_from_1_to_4() -> None:
    by_parts = NTKByParts(8.0, 8192, beta_fast=4, beta_slow=1, ramp="rotations")
    assert torch.equal(inverse(Llama3(8.0, 8192)), inverse(by_parts))
    other = NTKByParts(8.0, 8192, beta_fast=6, beta_slow=2, ramp="rotations")
    assert torch.equal(inverse(Llama3(8.0, 8192, 2, 6)), inverse(other))


# ---- YaRN's temperature ----------------------------------------------------------------------------------------------
def factors(**options) -> tuple[float, float]:
    return rope_frequencies(64, scaling=YaRN(original_max_length=4096, **options))[1:]


@pytest.mark.parametrize(("s", "want"), [(1, 1), (4, 1.1386294), (16, 1.2772589), (32, 1.3465736), (40, 1.3688879)])
def test_yarn_attention_factor(s: float, want: float) -> None:
    assert factors(factor=s) == (pytest.approx(want, abs=5e-8), 1.0)


def test_deepseek_factors() -> None:
    """V2: both 0.707, factor 40: g = 1.2608038 and the scale of 192 dimensions 0.1147214; V3: both 1, 0.1352338."""
    assert factors(factor=40, mscale=0.707, mscale_all_dim=0.707) == (1.0, pytest.approx(1.5896262, abs=5e-8))
    assert 192**-0.5 * factors(factor=40, mscale=0.707, mscale_all_dim=0.707)[1] == pytest.approx(0.1147214, abs=5e-8)
    assert 192**-0.5 * factors(factor=40, mscale=1.0, mscale_all_dim=1.0)[1] == pytest.approx(0.1352338, abs=5e-8)


def test_mscale_counts_only_with_its_partner() -> None:
    """Both given and not zero: their ratio. Else g(1). The second alone still sharpens the softmax, as published."""
    g = 1.3688879
    ratio = (1 + 0.0707 * math.log(40)) / (1 + 0.1 * math.log(40))
    assert factors(factor=40, mscale=0.707, mscale_all_dim=1.0) == (pytest.approx(ratio), pytest.approx(g**2))
    assert factors(factor=40, mscale=0.707) == (pytest.approx(g), 1.0)
    assert factors(factor=40, mscale=0.707, mscale_all_dim=0) == (pytest.approx(g), 1.0)
    assert factors(factor=40, mscale=0, mscale_all_dim=1.0) == (pytest.approx(g), pytest.approx(g**2))
    assert factors(factor=40, mscale_all_dim=1.0) == (pytest.approx(g), pytest.approx(g**2))
    assert factors(factor=1, mscale=0.5, mscale_all_dim=0.7) == (1.0, 1.0)


def test_explicit_attention_factor_overrides() -> None:
    assert factors(factor=40, attention_factor=1.5) == (1.5, 1.0)
    assert factors(factor=40, attention_factor=1.5, mscale=0.7, mscale_all_dim=0.5)[0] == 1.5


# ---- LongRoPE --------------------------------------------------------------------------------------------------------
def test_longrope_lists_switch_after_the_original_length() -> None:
    short, long = ([theta(k, 8) / x for k, x in enumerate(LISTS[name])] for name in ("short_factor", "long_factor"))
    for follow in ("declared", "row", "sequence"):
        scaling = LongRoPE(**LISTS, original_max_length=100, factor=4.0, follow=follow)
        for length in (100, torch.tensor(100)):
            exact(inverse(scaling, 8, length=length), short)
            exact(inverse(scaling, 8, length=length + 1), long)
        exact(inverse(scaling, 8), long if follow == "declared" else short)
    exact(inverse(LongRoPE(**LISTS, original_max_length=100, max_length=100), 8), short)
    exact(inverse(LongRoPE(**LISTS, original_max_length=100, factor=2, max_length=100), 8), short)
    exact(inverse(LongRoPE(**LISTS, original_max_length=100, max_length=101), 8), long)
    exact(inverse(LongRoPE(**LISTS, original_max_length=100, factor=1.0), 8), short)
    exact(inverse(LongRoPE(**LISTS, original_max_length=100, factor=1.001), 8), long)
    exact(inverse(LongRoPE(**LISTS, original_max_length=100, max_length=400, follow="row"), 8), long)


@pytest.mark.parametrize(("s", "want"), [(1, 1.0), (2, 1.0408330), (8, 1.1180340), (32, 1.1902381)])
def test_longrope_attention_factor(s: int, want: float) -> None:
    """sqrt(1 + ln s / ln L), L = 4096; the same for both lists."""
    options = [{"factor": s}, {"max_length": 4096 * s}, {"factor": s, "max_length": 10**6}]
    for option in options:
        for length in (5, 10_000):
            got = rope_frequencies(64, scaling=LongRoPE(**ONES, original_max_length=4096, **option), length=length)
            assert got[1:] == (pytest.approx(want, abs=5e-8), 1.0)
    assert LongRoPE(**ONES, original_max_length=4096, factor=8, attention_factor=1.3).factors() == (1.3, 1.0)
    assert LongRoPE(**ONES, original_max_length=4096, max_length=1000).factors() == (1.0, 1.0)
    assert LongRoPE(**ONES, original_max_length=2, factor=4).factors() == (pytest.approx(3**0.5), 1.0)  # the shortest


# ---- which length ----------------------------------------------------------------------------------------------------
QUERY = torch.tensor([0, 98, 99, 100, 106, 107, 108, 250])


@pytest.mark.parametrize(
    ("scaling", "row", "sequence"),
    [
        (
            DynamicNTK(2.0, 100, follow="row", step=8),
            [100, 100, 100, 108, 108, 108, 116, 252],
            [100, 100, 100, 101, 107, 108, 109, 251],
        ),
        (DynamicNTK(2.0, 100), [100, 100, 100, 106, 112, 112, 112, 256], [100, 100, 100, 101, 107, 108, 109, 251]),
        (DynamicNTK(2.0, 90), [90, 100, 100, 105, 110, 110, 110, 255], [90, 99, 100, 101, 107, 108, 109, 251]),
        (DynamicNTK(2.0, 15), [15, 99, 100, 101, 107, 108, 109, 251], [15, 99, 100, 101, 107, 108, 109, 251]),
        (LongRoPE(**ONES, original_max_length=100, factor=2), [100] * 3 + [101] * 5, [100] * 3 + [101] * 5),
    ],
)
def test_length_at(scaling: Scaling, row: list[int], sequence: list[int]) -> None:
    """One number for equal tables: the original length up to it, then steps (rows) or the exact length (sequence)."""
    without_step = {"step": None} if isinstance(scaling, DynamicNTK) else {}
    declared, sequences = (replace(scaling, follow=follow, **without_step) for follow in ("declared", "sequence"))
    assert declared.length_at(3, 1000) is None and declared.length_at(QUERY, QUERY) is None
    rows = replace(scaling, follow="row")
    assert rows.length_at(QUERY, QUERY * 0 + 1000).tolist() == row
    assert sequences.length_at(QUERY * 0, QUERY).tolist() == sequence
    assert rows.length_at(QUERY, QUERY).dtype == torch.int64
    for position, one, other in zip(QUERY.tolist(), row, sequence, strict=True):
        assert rows.length_at(position, 1000) == one and type(rows.length_at(position, 1000)) is int
        assert sequences.length_at(0, position) == other
