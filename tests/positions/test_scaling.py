"""Frequencies and the schemes that stretch them: published numbers and laws; tests/models compares tables with transformers'."""

import dataclasses
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longitude.positions.scaling import (
    NTK,
    SCHEMES,
    BaseChange,
    Clipped,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKByParts,
    Resonance,
    Scaling,
    YaRN,
    base as base_module,
    from_dict,
    ntk as ntk_module,
    rope_frequencies,
)
from longitude.positions.scaling.base import METHODS, method_of
from tests.support import refused

LISTS = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 8.0, 32.0]}
ONES = [1.0] * 32
RISING = [1.25 ** (k / 2) for k in range(32)]


def inverse(scaling=None, head_dim: int = 64, base: float = 10_000.0, **options) -> Tensor:
    return rope_frequencies(head_dim, base, scaling, **options).inverse


def theta(k: float, dim: int = 64, base: float = 10_000.0) -> float:
    return base ** (-2 * k / dim)


def exact(got: Tensor, want: list[float], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=tolerance, atol=0)


# ---- published numbers and tables ------------------------------------------------------------------------------------
def test_plain_frequencies() -> None:
    exact(inverse(head_dim=8), [1, 0.1, 0.01, 0.001], 1e-14)
    exact(inverse(head_dim=64, base=5e5, rotary_dim=16), [theta(k, 16, 5e5) for k in range(8)], 1e-14)


@pytest.mark.parametrize(("dim", "base"), [(32, 10_000.0), (6, 0.001)])
def test_resonance_repeats_after_whole_numbers_of_tokens(dim: int, base: float) -> None:
    """Wang et al. 2024, section 4.1: a pair's wavelength is rounded. Pair 0 turns once in 6 tokens, not in 2 pi."""
    waves = [max(1, round(2 * math.pi * base ** (2 * k / dim))) for k in range(dim // 2)]
    exact(inverse(Resonance(), dim, base), [2 * math.pi / wave for wave in waves])
    assert waves[0] == 6


def test_resonance_rounds_what_yarn_gives() -> None:
    """As the authors' code, with its ramp of 2 and 1 rotations; the attention factor stays."""
    options = {"factor": 4.0, "original_max_length": 64, "beta_fast": 2}
    waves = (2 * math.pi / inverse(YaRN(**options), 32)).tolist()
    got = rope_frequencies(32, scaling=Resonance(**options))
    exact(got.inverse, [2 * math.pi / round(wave) for wave in waves])
    assert got[1:] == YaRN(**options).factors()


def test_a_model_with_resonance_is_extended_by_yarn_alone() -> None:
    """The longer model rounds YaRN's wavelengths; no other scheme knows what was trained."""
    longer = Resonance().then(YaRN(4.0, 64, beta_fast=2))
    assert longer == Resonance(4.0, 64, beta_fast=2)
    assert Resonance().then(Linear(4.0)) is longer.then(YaRN(4.0, 64)) is YaRN(4.0, 64).then(YaRN(2.0, 64)) is None


def test_resonance_without_a_factor_refuses_options_of_yarn() -> None:
    for options in ({"original_max_length": 64}, {"beta_fast": 2}, {"attention_factor": 2.0}):
        with refused("factor=1.0"):
            Resonance(**options)


@pytest.mark.parametrize(
    ("dim", "proportion", "rotating"),
    [(16, 1, 8), (16, 0.75, 6), (16, 0.7, 5), (16, 0.1, 0), (16, 0.0, 0), (4, 0.5, 1)],
)
def test_proportion_keeps_the_fastest_pairs_at_their_frequencies(dim: int, proportion: float, rotating: int) -> None:
    """p-RoPE: exponents over all rotary dimensions, unlike partial rotary; int(p d) // 2 pairs."""
    want = [theta(k, dim) if k < rotating else 0.0 for k in range(dim // 2)]
    exact(inverse(head_dim=dim, proportion=proportion), want)
    exact(inverse(Linear(2.0), head_dim=2 * dim, rotary_dim=dim, proportion=proportion), [x / 2 for x in want])


def test_linear_divides_and_never_rounds_positions() -> None:
    """Rounding p/s down would make 904 of 5000 neighbours collide (5000 over 4096)."""
    exact(inverse(Linear(5000 / 4096)), [theta(k) * 4096 / 5000 for k in range(32)])
    positions = torch.arange(5000)[:, None] * inverse(Linear(5000 / 4096))[0]
    assert len(positions.unique()) == 5000


def test_base_change() -> None:
    """Adjusted base frequencies of d = 64, base 1e6, and of Llama 3 (d = 128, base 5e5)."""
    exact(inverse(BaseChange(1e6))[-1:], [1.5399265e-6], 1e-7)
    exact(inverse(BaseChange(5e5), 128, base=123.0)[-1:], [2.4551408e-6], 1e-7)


@pytest.mark.parametrize(("factor", "ratio"), [(5000 / 4096, 1.2285814), (4.0, 4.1829366)])
def test_ntk_base(factor: float, ratio: float) -> None:
    """d = 64. With the exponent 2/(d-2), found in print, the ratios would be 1.0064539 and 1.0457341."""
    exact(inverse(NTK(factor)), [theta(k, 64, 10_000 * ratio) for k in range(32)], 1e-6)
    exact(inverse(NTK(factor))[-1:], [theta(31) / factor])  # the slowest is divided by the factor
    exact(inverse(NTK(factor), head_dim=4), [1, 0.01 / factor])  # two pairs suffice


def test_dynamic_ntk() -> None:
    """factor 2, L = 4096, length 8192, d = 64: base 31082.24; at factor 1 the bracket is length/L."""
    want = [theta(k, 64, 31_082.24) for k in range(32)]
    exact(inverse(DynamicNTK(2.0, 4096, max_length=8192)), want, 1e-6)
    exact(inverse(DynamicNTK(2.0, 4096), length=8192), want, 1e-6)
    exact(inverse(DynamicNTK(2.0, 4096, follow="row"), length=torch.tensor(8192)), want, 1e-6)
    exact(inverse(DynamicNTK(2.0, 3), length=torch.tensor(10)), inverse(DynamicNTK(2.0, 3), length=10).tolist())
    exact(inverse(DynamicNTK(1.0, 4096), length=8192), [theta(k, 64, 10_000 * 2 ** (64 / 62)) for k in range(32)])


@pytest.mark.parametrize("length", [1, 4095, 4096])
def test_dynamic_ntk_is_plain_up_to_the_original_length(length: int) -> None:
    """And returns to it when a sequence is shorter again. 3.3 x 4096 / 4096 would round."""
    for follow in ("declared", "row", "sequence"):
        assert torch.equal(inverse(DynamicNTK(3.3, 4096, 9000, follow), length=length), inverse())
        assert torch.equal(inverse(DynamicNTK(3.3, 4096, length, follow)), inverse())


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


def test_ramp_in_rotations() -> None:
    """YaRN's paper, as Llama3: linear in rotations within L, from 1 to 32. Up to 0.367 from the published code's."""
    rotations = [4096 * theta(k, 128) / (2 * math.pi) for k in range(64)]
    kept = [min(max((r - 1) / 31, 0), 1) for r in rotations]
    paper, code = inverse(Llama3(16.0, 4096, 1, 32), 128), inverse(YaRN(16.0, 4096), 128)
    exact(paper, [theta(k, 128) * (g + (1 - g) / 16) for k, g in enumerate(kept)])
    gap = (code - paper) / (inverse(head_dim=128) * 15 / 16)  # of gamma
    assert float(gap.abs().max()) == pytest.approx(0.367, abs=5e-4)
    assert float(code[33] / paper[33]) == pytest.approx(2.6, abs=0.05)


def test_yarn_frequency() -> None:
    """d = 128, L = 4096, s = 16: pair 32 lies 12/26 down the ramp from 20 to 46, where the rest is a sixteenth."""
    scaled = inverse(YaRN(16.0, 4096), 128)
    exact(scaled[32:33], [0.005673077], 1e-7)
    kept = [1 - min(max((k - 20) / 26, 0), 1) for k in range(64)]  # inverted, the slow pairs would stay
    exact(scaled, [theta(k, 128) * (g + (1 - g) / 16) for k, g in enumerate(kept)])
    assert torch.equal(scaled, inverse(NTKByParts(16.0, 4096), 128))


@pytest.mark.parametrize(
    ("scaling", "dim", "base", "kept"),
    [
        (YaRN(4.0, 6), 64, 1e4, [1.0] + [0.0] * 31),  # rounded outwards to pair 0: published, 0.001 wide
        (YaRN(4.0, 7, truncate=False), 64, 1e4, [1.0] + [0.0] * 31),  # between pairs 0 and 1
        (YaRN(4.0, 63, 2, 1), 2, 1e4, [1.0]),
        (YaRN(4.0, 30_000), 64, 15.0, [1.0] * 32),  # low is pair 59 of 64: every real pair rotates often
    ],
    ids=str,
)
def test_ramps_at_the_very_border(scaling, dim: int, base: float, kept: list) -> None:
    """What the published code still computes stays, to its value."""
    exact(inverse(scaling, dim, base), [theta(k, dim, base) * (g + (1 - g) / 4) for k, g in enumerate(kept)])


@pytest.mark.parametrize("truncate", [True, False])
def test_slower_pairs_are_scaled_more_or_refused(truncate: bool) -> None:
    """At every length up to 1024: what is left of a frequency never grows with the pair, and the law of each end holds."""
    refused = 0
    for original in [*range(1, 40), *(2**n for n in range(6, 11))]:
        for base in (3.0, 50.0, 1e4):
            scaling, plain = YaRN(4.0, original, truncate=truncate), inverse(None, 16, base)
            try:
                left = inverse(scaling, 16, base) / plain
            except ValueError:
                refused += 1
                continue
            rotations = original * plain / (2 * torch.pi)
            assert (left.diff() <= 1e-12).all(), (original, base)
            torch.testing.assert_close(left[rotations >= 32], torch.ones_like(left[rotations >= 32]))
            if not truncate:
                torch.testing.assert_close(left[rotations <= 1], torch.full_like(left[rotations <= 1], 0.25))
    assert refused == (9 if truncate else 18)


def test_llama3() -> None:
    """Llama 3.1: factor 8, L = 8192, base 5e5, d = 128. Pairs 0..28 stay, 29..34 are blended, 35..63 divided by 8."""
    ratio = inverse(head_dim=128, base=5e5) / inverse(Llama3(8.0, 8192), 128, 5e5)
    exact(ratio[[*range(29), *range(35, 64)]], [1.0] * 29 + [8.0] * 29, 0)
    exact(ratio[29:30], [1.2074840], 2e-7)  # published in float32
    exact(inverse(Llama3(8.0, 8192), 128, 5e5)[[29, 63]], [0.002166571, 3.0689259e-7], 5e-7)


G = 1.3688879  # 0.1 ln 40 + 1


@pytest.mark.parametrize(
    ("options", "attention", "softmax"),
    [
        ({"factor": 1}, 1, 1),
        ({"factor": 4}, 1.1386294, 1),
        ({"factor": 16}, 1.2772589, 1),
        ({"factor": 32}, 1.3465736, 1),
        ({"factor": 40}, G, 1),
        ({"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}, 1, 0.1147214 * 192**0.5),  # DeepSeek-V2
        ({"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}, 1, 0.1352338 * 192**0.5),  # and V3
        # Both given and not zero: their ratio. Else g(1). The second alone still sharpens the softmax, as published.
        ({"factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0}, 1.2608038 / G, G**2),
        ({"factor": 40, "mscale": 0.707}, G, 1),
        ({"factor": 40, "mscale": 0.707, "mscale_all_dim": 0}, G, 1),
        ({"factor": 40, "mscale": 0, "mscale_all_dim": 1.0}, G, G**2),
        ({"factor": 40, "mscale_all_dim": 1.0}, G, G**2),
        ({"factor": 1, "mscale": 0.5, "mscale_all_dim": 0.7}, 1, 1),
        ({"factor": 40, "attention_factor": 1.5}, 1.5, 1),
        ({"factor": 40, "attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 1.0}, 1.5, G**2),
    ],
    ids=str,
)
def test_factors_of_yarn(options: dict, attention: float, softmax: float) -> None:
    got = rope_frequencies(64, scaling=YaRN(original_max_length=4096, **options))[1:]
    assert got == (pytest.approx(attention, rel=5e-7), pytest.approx(softmax, rel=5e-7))


def test_longrope_lists_switch_after_the_original_length() -> None:
    short, long = ([theta(k, 8) / x for k, x in enumerate(LISTS[name])] for name in ("short_factor", "long_factor"))
    for follow in ("declared", "row", "sequence"):
        scaling = LongRoPE(**LISTS, original_max_length=100, factor=4.0, follow=follow)
        for length in (100, torch.tensor(100)):
            exact(inverse(scaling, 8, length=length), short)
            exact(inverse(scaling, 8, length=length + 1), long)
        exact(inverse(scaling, 8), long if follow == "declared" else short)
    for options, want in (
        ({"max_length": 100}, short),
        ({"factor": 2, "max_length": 100}, short),
        ({"max_length": 101}, long),
        ({"factor": 1.0}, short),
        ({"factor": 1.001}, long),
        ({"max_length": 400, "follow": "row"}, long),
    ):
        exact(inverse(LongRoPE(**LISTS, original_max_length=100, **options), 8), want)


@pytest.mark.parametrize(("s", "want"), [(1, 1.0), (2, 1.0408330), (8, 1.1180340), (32, 1.1902381)])
def test_longrope_attention_factor(s: int, want: float) -> None:
    """sqrt(1 + ln s / ln L), L = 4096; the same for both lists."""
    for option in ({"factor": s}, {"max_length": 4096 * s}, {"factor": s, "max_length": 10**6}):
        for length in (5, 10_000):
            got = rope_frequencies(64, scaling=LongRoPE(ONES, ONES, 4096, **option), length=length)
            assert got[1:] == (pytest.approx(want, abs=5e-8), 1.0)
    assert LongRoPE(ONES, ONES, 4096, 8, attention_factor=1.3).factors() == (1.3, 1.0)
    assert LongRoPE(ONES, ONES, 4096, max_length=1000).factors() == (1.0, 1.0)
    assert LongRoPE(ONES, ONES, 2, 4).factors() == (pytest.approx(3**0.5), 1.0)  # the shortest


# ---- which length ----------------------------------------------------------------------------------------------------
QUERY = torch.tensor([0, 98, 99, 100, 106, 107, 108, 250])
EXACT_LENGTHS = [100, 100, 100, 101, 107, 108, 109, 251]


@pytest.mark.parametrize(
    ("scaling", "row", "sequence"),
    [
        (DynamicNTK(2.0, 100), [100, 100, 100, 106, 112, 112, 112, 256], EXACT_LENGTHS),
        (DynamicNTK(2.0, 90), [90, 100, 100, 105, 110, 110, 110, 255], [90, 99, *EXACT_LENGTHS[2:]]),
        (DynamicNTK(2.0, 15), [15, 99, *EXACT_LENGTHS[2:]], [15, 99, *EXACT_LENGTHS[2:]]),
        (LongRoPE(ONES, ONES, original_max_length=100, factor=2), [100] * 3 + [101] * 5, [100] * 3 + [101] * 5),
    ],
)
def test_length_at(scaling: Scaling, row: list[int], sequence: list[int]) -> None:
    """One number for equal tables: the original length up to it, then steps (rows) or the exact length (sequence)."""
    declared, sequences = (replace(scaling, follow=follow) for follow in ("declared", "sequence"))
    assert declared.length_at(3, 1000) is None and declared.length_at(QUERY, QUERY) is None
    rows = replace(scaling, follow="row")
    assert rows.length_at(QUERY, QUERY * 0 + 1000).tolist() == row
    assert sequences.length_at(QUERY * 0, QUERY).tolist() == sequence
    for position, one, other in zip(QUERY.tolist(), row, sequence, strict=True):
        assert rows.length_at(position, 1000) == one and type(rows.length_at(position, 1000)) is int
        assert sequences.length_at(0, position) == other


@pytest.mark.parametrize("scaling", [DynamicNTK(2.0, 100), LongRoPE(ONES, RISING, 100, factor=2)], ids=lambda s: s.name)
def test_frequencies_that_follow_the_length(scaling: Scaling) -> None:
    """They fall as it grows, and equal canonical lengths mean equal tables."""
    follows = replace(scaling, follow="sequence")
    tables = [inverse(follows, length=length) for length in (1, 100, 101, 200, 1000)]
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[1], tables[2])
    assert all((later <= earlier).all() for earlier, later in itertools.pairwise(tables))
    for newest in (0, 98, 99, 100, 101, 500):
        asked = inverse(follows, length=newest + 1)
        assert torch.equal(inverse(follows, length=follows.length_at(0, newest)), asked)


def test_without_a_length_the_declared_or_the_original_one_counts() -> None:
    declared = inverse(DynamicNTK(2.0, 100), length=300)
    for follow in ("declared", "row", "sequence"):
        assert torch.equal(inverse(DynamicNTK(2.0, 100, max_length=300, follow=follow)), declared)
    for follow in ("row", "sequence"):
        assert torch.equal(inverse(DynamicNTK(2.0, 100, follow=follow)), inverse())
    for scaling in (Linear(2.0), NTK(2.0), YaRN(2.0, 100), Llama3(2.0, 100), BaseChange(1e6)):
        assert scaling.length_at(5, 500) is None
        assert torch.equal(inverse(scaling, length=500), inverse(scaling))


# ---- clipped pairs ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dim", "base", "original", "clipped"),
    [(64, 1e7, 262_144, 10), (128, 1e4, 4096, 18), (8, 10.0, 4096, 0), (8, 1e9, 1, 4)],  # Qwen3.5; Llama 2
)
def test_pairs_that_never_turn_fade_out(dim: int, base: float, original: int, clipped: int) -> None:
    """Faster pairs stay to the bit, the first of the others too; the slowest does not rotate, and in between they fall."""
    plain, got = inverse(None, dim, base), inverse(Clipped(original), dim, base)
    fast, ratio = dim // 2 - clipped, got / plain
    assert torch.equal(got[:fast], plain[:fast])
    assert (ratio[fast:].diff() < 0).all() and (ratio[fast:] + ratio[fast:].flip(0)).allclose(
        torch.ones_like(ratio[fast:])
    )
    assert clipped == 0 or abs(ratio[fast] - 1) < 1e-12 and abs(ratio[-1]) < 1e-12


def test_clipped_pairs_of_llama_3() -> None:
    """The authors' code: 20 of 64 pairs, times (1 + cos t) / 2 for 20 steps t from 0 to pi. These are its first, 7th and last."""
    got = inverse(Clipped(8192, 20), 128, 5e5) / inverse(None, 128, 5e5)
    exact(got[:44], [1.0] * 44)
    torch.testing.assert_close(got[[44, 50, 63]], torch.tensor([1, 0.77347, 0.0]).double(), atol=1e-5, rtol=0)


# ---- laws of every scheme --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "scaling",
    [
        Linear(1.0),
        NTK(1.0),
        DynamicNTK(1.0, 2048, max_length=2048),
        NTKByParts(1.0, 2048),
        YaRN(1.0, 2048, truncate=False, mscale=0.7, mscale_all_dim=0.5),
        LongRoPE(ONES, ONES, 2048, factor=1.0),
        Llama3(1.0, 2048),
        BaseChange(10_000.0),
        None,
    ],
)
def test_factor_one_is_plain_to_the_bit(scaling: Scaling | None) -> None:
    got, plain = rope_frequencies(64, scaling=scaling), rope_frequencies(64)
    assert torch.equal(got.inverse, plain.inverse) and got[1:] == (1.0, 1.0)


@pytest.mark.parametrize("base", [10_000.0, 5e5])
@pytest.mark.parametrize("s", [1.5, 4.0, 32.0])
def test_frequencies_fall_and_lie_between_interpolated_and_plain(s: float, base: float) -> None:
    plain = inverse(base=base)
    for scaling in (
        Linear(s),
        NTK(s),
        DynamicNTK(s, 2048, max_length=4096),
        YaRN(s, 2048),
        YaRN(s, 131_072),  # whose ramp ends beyond the last pair
        Llama3(s, 2048),
        LongRoPE(ONES, [min(x, s) for x in RISING], 2048, factor=s),
    ):
        ratio = plain / inverse(scaling, base=base)
        bound = s + 1 if isinstance(scaling, DynamicNTK) else s  # at twice the length the bracket is s + 1
        assert (inverse(scaling, base=base).diff() < 0).all(), scaling
        assert (ratio >= 1).all() and (ratio <= bound * (1 + 1e-12)).all(), scaling
        assert (ratio.diff() >= -1e-12).all(), scaling  # what rotates slower is stretched more


EXAMPLES = [
    Linear(4.0),
    NTK(4.0),
    DynamicNTK(2.0, 2048, max_length=8192, follow="row"),
    NTKByParts(4.0, 2048, 16, 2),
    YaRN(4.0, 2048, mscale=0.7, mscale_all_dim=0.7, truncate=False),
    LongRoPE(ONES, RISING, 2048, factor=4.0, follow="row"),
    Llama3(8.0, 8192),
    BaseChange(5e5),
    Clipped(2048, 5),
    Resonance(),
]
EXAMPLES += [kind.extending(4.0, 2048) for kind in SCHEMES.values() if kind not in [*map(type, EXAMPLES)]]


def test_schemes_as_json_and_back() -> None:
    assert {scaling.name for scaling in EXAMPLES} == {*SCHEMES}
    assert from_dict(None) is None and from_dict(EXAMPLES[0]) is EXAMPLES[0]
    for scaling in EXAMPLES:
        spec = json.loads(json.dumps(scaling.as_dict()))
        assert spec == scaling.as_dict()  # lists, not tuples
        assert from_dict(spec) == scaling and hash(from_dict(spec)) == hash(scaling)
        assert set(spec) == {"name"} | {field.name for field in dataclasses.fields(scaling)}
        assert torch.equal(inverse(spec), inverse(scaling))
        with pytest.raises(dataclasses.FrozenInstanceError):
            scaling.anything = 3.0  # type: ignore[attr-defined]


def test_frequencies_are_on_the_device_and_as_wide_as_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some devices have no float64; the one here plays such a device."""
    for module in (base_module, ntk_module):
        monkeypatch.setattr(module, "wide", lambda device: torch.float32 if device.type == "meta" else torch.float64)
    for scaling in [None, *EXAMPLES]:
        there = inverse(scaling, device=torch.device("meta"))
        assert (there.device.type, there.dtype, inverse(scaling).dtype) == ("meta", torch.float32, torch.float64)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_one_row_under_both_spellings_of_its_name(name: str) -> None:
    assert method_of(name) is method_of(name.replace("-", "_")) is METHODS[name]
    make = METHODS[name].make
    scheme = make and make(4.0, 4096)
    assert METHODS[name].searched or METHODS[name].needs_training or scheme is not None
    if scheme is not None:
        assert SCHEMES[scheme.name.replace("_", "-")] is type(scheme)
