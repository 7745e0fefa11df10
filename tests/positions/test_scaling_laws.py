"""What holds for every scaling scheme: a factor of 1 changes nothing, bounds, order, JSON, and errors that help."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from torch import Tensor

from longitude.positions.scaling import (
    NTK,
    SCHEMES,
    BaseChange,
    DynamicNTK,
    Frequencies,
    Linear,
    Llama3,
    LongRoPE,
    NTKByParts,
    Scaling,
    YaRN,
    base as base_module,
    from_dict,
    ntk as ntk_module,
    rope_frequencies,
)
from tests.support import refused_calls

ONES = [1.0] * 32
RISING = [1.25 ** (k / 2) for k in range(32)]


def inverse(scaling=None, **options) -> Tensor:
    return rope_frequencies(64, scaling=scaling, **options).inverse


# ---- laws ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "scaling",
    [
        Linear(1.0),
        NTK(1.0),
        DynamicNTK(1.0, 2048, max_length=2048),
        NTKByParts(1.0, 2048),
        NTKByParts(1.0, 2048, ramp="rotations"),
        YaRN(1.0, 2048),
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
        NTKByParts(s, 2048),
        NTKByParts(s, 2048, ramp="rotations"),
        YaRN(s, 2048),
        YaRN(s, 131_072),  # whose ramp ends beyond the last pair
        Llama3(s, 2048),
        LongRoPE(ONES, [min(x, s) for x in RISING], 2048, factor=s),
    ):
        scaled = inverse(scaling, base=base)
        bound = s + 1 if isinstance(scaling, DynamicNTK) else s  # at twice the length the bracket is s + 1
        assert (scaled[1:] < scaled[:-1]).all(), scaling
        assert (scaled <= plain).all() and (scaled >= plain / bound * (1 - 1e-12)).all(), scaling
        ratio = plain / scaled  # what rotations slower is stretched more
        assert (ratio[1:] >= ratio[:-1] - 1e-12).all(), scaling


def test_growing_lengths_only_slow_the_turning() -> None:
    for scaling in (DynamicNTK(2.0, 100, follow="sequence"), LongRoPE(ONES, RISING, 100, factor=2)):
        tables = [inverse(scaling, length=length) for length in (1, 100, 101, 200, 1000)]
        assert torch.equal(tables[0], tables[1])
        assert all((later <= earlier).all() for earlier, later in itertools.pairwise(tables))
        assert not torch.equal(tables[1], tables[2])


def test_equal_canonical_lengths_mean_equal_tables() -> None:
    """The table of a length is that of the number that stands for it, for the published rule."""
    for scaling in (DynamicNTK(2.0, 100, follow="sequence"), LongRoPE(ONES, RISING, 100, factor=2, follow="sequence")):
        for newest in (0, 98, 99, 100, 101, 500):
            asked = inverse(scaling, length=newest + 1)
            assert torch.equal(inverse(scaling, length=scaling.length_at(0, newest)), asked)


def test_other_schemes_follow_no_length() -> None:
    for scaling in (Linear(2.0), NTK(2.0), YaRN(2.0, 100), Llama3(2.0, 100), BaseChange(1e6)):
        assert scaling.length_at(5, 500) is None
        assert torch.equal(inverse(scaling, length=500), inverse(scaling))


def test_without_a_length_the_declared_or_the_original_one_counts() -> None:
    declared = inverse(DynamicNTK(2.0, 100), length=300)
    for follow in ("declared", "row", "sequence"):
        assert torch.equal(inverse(DynamicNTK(2.0, 100, max_length=300, follow=follow)), declared)
    for follow in ("row", "sequence"):
        assert torch.equal(inverse(DynamicNTK(2.0, 100, follow=follow)), inverse())


# ---- defaults, names and JSON ----------------------------------------------------------------------------------------
EXAMPLES = [
    Linear(4.0),
    NTK(4.0),
    DynamicNTK(2.0, 2048, max_length=8192, follow="row", step=100),
    DynamicNTK(2.0, 2048, follow="sequence"),
    NTKByParts(4.0, 2048, 16, 2, ramp="rotations"),
    YaRN(4.0, 2048, mscale=0.7, mscale_all_dim=0.7, truncate=False),
    YaRN(4.0, 2048, attention_factor=1.1),
    LongRoPE(ONES, RISING, 2048, factor=4.0, follow="row"),
    Llama3(8.0, 8192),
    BaseChange(5e5),
]


def test_defaults_are_the_published_ones() -> None:
    assert YaRN(4, 2048) == YaRN(
        4, 2048, 32, 1, None, None, None, ramp="dimensions", truncate=True
    )  # in the published order
    assert NTKByParts(4, 2048) == NTKByParts(4, 2048, beta_fast=32, beta_slow=1, ramp="dimensions", truncate=True)
    assert Llama3(8, 8192) == Llama3(8, 8192, low_freq_factor=1, high_freq_factor=4)
    assert DynamicNTK(2, 2048) == DynamicNTK(2, 2048, max_length=None, follow="declared", step=None)
    assert LongRoPE(ONES, ONES, 9, 2) == LongRoPE(ONES, ONES, 9, 2, None, None, follow="declared")


def test_names() -> None:
    assert Scaling().as_dict() == {"name": "none"}
    assert Frequencies(torch.ones(1), 1.5).softmax_factor == 1.0
    assert list(SCHEMES) == "base_change dynamic_ntk linear llama3 longrope ntk ntk_by_parts yarn".split()


@pytest.mark.parametrize("scaling", EXAMPLES, ids=lambda scaling: scaling.name)
def test_json_there_and_back(scaling: Scaling) -> None:
    spec = json.loads(json.dumps(scaling.as_dict()))
    assert spec == scaling.as_dict()  # lists, not tuples
    assert spec["name"] == scaling.name
    assert from_dict(spec) == scaling and hash(from_dict(spec)) == hash(scaling)
    assert set(spec) == {"name"} | {field.name for field in dataclasses.fields(scaling)}
    assert torch.equal(inverse(spec), inverse(scaling))


def test_from_dict_passes_schemes_and_none() -> None:
    assert from_dict(None) is None
    assert from_dict(EXAMPLES[0]) is EXAMPLES[0]


def test_frequencies_go_to_the_device_asked_for() -> None:
    for scaling in [None, *EXAMPLES]:
        assert inverse(scaling, device=torch.device("meta")).device.type == "meta"


def test_frequencies_are_as_wide_as_the_device_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some devices have no float64; the one here plays such a device."""
    for module in (base_module, ntk_module):
        monkeypatch.setattr(module, "wide", lambda device: torch.float32 if device.type == "meta" else torch.float64)
    for scaling in [None, *EXAMPLES]:
        assert inverse(scaling, device=torch.device("meta")).dtype == torch.float32
        assert inverse(scaling).dtype == torch.float64


def test_frequencies_compile_in_one_graph() -> None:
    """Lengths as tensors: no branch on their values."""
    for scaling in (DynamicNTK(2.0, 100, follow="row"), LongRoPE(ONES, RISING, 100, factor=2, follow="row")):

        def tables(position: Tensor, scaling=scaling) -> Tensor:
            return inverse(scaling, length=scaling.length_at(position, position))

        compiled = torch.compile(tables, fullgraph=True, backend="eager")
        for position in (99, 100, 250):
            torch.testing.assert_close(compiled(torch.tensor(position)), tables(torch.tensor(position)))


# ---- errors ----------------------------------------------------------------------------------------------------------
L = {"original_max_length": 2048}
WRONG = [
    (lambda: rope_frequencies(7), "even rotary_dim of at most head_dim=7, got 7"),
    (lambda: rope_frequencies(8, rotary_dim=10), "at most head_dim=8, got 10"),
    (lambda: rope_frequencies(8, rotary_dim=0), "rotary_dim to be an int of 1 or more, got 0"),
    (lambda: rope_frequencies(8.0, rotary_dim=8), "head_dim to be an int of 1 or more, got 8.0"),
    (lambda: rope_frequencies(8, base=0), "base above 0, got 0"),
    (lambda: rope_frequencies(8, proportion=1.1), "proportion from 0 to 1, got 1.1"),
    (lambda: rope_frequencies(8, proportion=-0.1), "proportion from 0 to 1, got -0.1"),
    (lambda: rope_frequencies(8, proportion=True), "proportion from 0 to 1, got True"),
    (lambda: rope_frequencies(8, proportion="all"), "proportion from 0 to 1, got 'all'"),
    (lambda: Linear(0.5), "linear: expected a factor of 1 or more, got 0.5; it multiplies lengths"),
    (lambda: Linear(-2.0), "linear: expected factor above 0, got -2.0"),
    (lambda: Linear(math.nan), "factor above 0, got nan"),
    (lambda: Linear(None), "linear: expected factor above 0, got None"),
    (lambda: YaRN(4, None), "original_max_length to be an int of 1 or more, got None"),
    (lambda: LongRoPE(ONES, ONES, None, 4), "original_max_length to be an int of 1 or more, got None"),
    (lambda: Linear("4"), "factor above 0, got '4'"),
    (lambda: NTK(0.99), "ntk: expected a factor of 1 or more"),
    (lambda: DynamicNTK(0.5, 2048), "dynamic_ntk: expected a factor of 1 or more"),
    (lambda: DynamicNTK(2, 2048.5), "dynamic_ntk: expected original_max_length to be an int of 1 or more, got 2048.5"),
    (lambda: DynamicNTK(2, 2048, 0), "expected max_length to be an int of 1 or more, got 0"),
    (lambda: DynamicNTK(2, 2048, step=0), "expected step to be an int of 1 or more, got 0"),
    (
        lambda: DynamicNTK(2, 2048, max_length=4096, step=8),
        "expected step only with follow='row', got follow='declared'",
    ),
    (lambda: DynamicNTK(2, 2048, follow="rows"), "follow 'declared', 'row' or 'sequence', got 'rows'"),
    (lambda: inverse(DynamicNTK(2, 2048)), "expected max_length, the length that follow='declared' chooses"),
    (lambda: rope_frequencies(2, scaling=NTK(2)), "ntk: expected a rotary_dim of 4 or more, got 2"),
    (
        lambda: rope_frequencies(2, scaling=DynamicNTK(2, 9, 18)),
        "dynamic_ntk: expected a rotary_dim of 4 or more, got 2",
    ),
    (lambda: NTKByParts(0.5, 2048), "ntk_by_parts: expected a factor of 1 or more"),
    (lambda: YaRN(4, 0), "yarn: expected original_max_length to be an int of 1 or more, got 0"),
    (
        lambda: YaRN(4, 2048, 1, 32),
        "yarn: expected beta_fast, the larger number of rotations, above beta_slow, got 1 and 32",
    ),
    (lambda: YaRN(4, 2048, 1, 1), "above beta_slow, got 1 and 1"),
    (lambda: YaRN(4, 2048, 32, 0), "beta_slow above 0, got 0"),
    (lambda: YaRN(4, 2048, math.nan), "beta_fast above 0, got nan"),
    (lambda: YaRN(4, 2048, ramp="paper"), "'dimensions' or 'rotations', got 'paper'"),
    (lambda: YaRN(4, 2048, truncate="no"), "truncate to be True or False, got 'no'"),
    (lambda: YaRN(4, 2048, truncate=False, ramp="rotations"), "the ramp in rotations has nothing to round"),
    (lambda: YaRN(4, 2048, attention_factor=0), "yarn: expected attention_factor above 0, got 0"),
    (lambda: YaRN(4, 2048, mscale=-1), "yarn: expected mscale above 0, got -1"),
    (lambda: YaRN(4, 2048, mscale_all_dim="1"), "yarn: expected mscale_all_dim above 0, got '1'"),
    (lambda: inverse(YaRN(4, 2048), base=1.0), "yarn: expected a base above 1, got 1.0"),
    (lambda: Llama3(0.5, 2048), "llama3: expected a factor of 1 or more"),
    (lambda: Llama3(8, 2048, 4, 4), "llama3: expected high_freq_factor above low_freq_factor, got 4 and 4"),
    (lambda: Llama3(8, 2048, 0, 4), "llama3: expected low_freq_factor above 0, got 0"),
    (lambda: Llama3(8, 2048, 1, math.nan), "llama3: expected high_freq_factor above 0, got nan"),
    (lambda: BaseChange(-1.0), "base_change: expected base above 0, got -1.0"),
    (lambda: LongRoPE(1.0, ONES, 2048, 4), "longrope: expected short_factor to be a list of numbers, got 1.0"),
    (lambda: LongRoPE(ONES, [1.0, "2"], 2048, 4), r"expected long_factor\[1\] above 0, got '2'"),
    (lambda: LongRoPE([1.0, 0.0], ONES, 2048, 4), r"expected short_factor\[1\] above 0, got 0.0"),
    (lambda: LongRoPE(ONES, ONES, 2048), "expected factor, max_length or attention_factor, got none"),
    (lambda: LongRoPE(ONES, ONES, 1, 4), "original_max_length of 2 or more, got 1"),
    (lambda: LongRoPE(ONES, ONES, 2048, 0.5), "longrope: expected a factor of 1 or more"),
    (lambda: LongRoPE(ONES, ONES, 2048, attention_factor=-1), "attention_factor above 0, got -1"),
    (lambda: LongRoPE(ONES, ONES, 2048, 4, follow="all"), "longrope: expected follow 'declared'"),
    (lambda: inverse(LongRoPE(ONES, ONES, 9, attention_factor=1.0)), "longrope: expected max_length"),
    (lambda: inverse(LongRoPE(ONES[1:], ONES, 9, 2)), r"short_factor of 32 numbers \(rotary_dim/2\), got 31"),
    (lambda: inverse(LongRoPE(ONES, ONES * 2, 9, 2)), r"long_factor of 32 numbers \(rotary_dim/2\), got 64"),
    (lambda: from_dict({"name": "yarm", "factor": 4}), "unknown scaling 'yarm': did you mean 'yarn'?"),
    (lambda: from_dict({"name": "linear", "facter": 4}), "option of 'linear' 'facter': did you mean 'factor'?"),
    (lambda: from_dict({"name": "linear", "factor": 4, "facter": 4}), "'facter': did you mean 'factor'?"),
    (lambda: from_dict({"name": "yarn"} | L), "'yarn' needs the option 'factor'"),
    (lambda: from_dict({"rope_type": "yarn"}), "a Hugging Face config is read by from_hugging_face"),
    (lambda: from_dict("yarn"), "expected a scheme, .* got 'yarn'"),
]


test_wrong_options = refused_calls(WRONG)


def test_schemes_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Linear(2.0).factor = 3.0  # type: ignore[misc]
