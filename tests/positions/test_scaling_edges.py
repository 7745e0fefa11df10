"""Mistakes in rotary options that must be found by name, and configs that say all they mean."""

import json

import numpy as np
import pytest
import torch

import longitude as lg
from longitude.models import LongitudeConfig
from longitude.positions.hugging_face import RopeConfig, from_hugging_face, to_hugging_face
from longitude.positions.rotary import MultimodalRotary, Rotary
from longitude.positions.scaling import NTKByParts, YaRN, rope_frequencies
from tests.support import refused_calls

BASE = {"rope_theta": 1e4}


# ---- sections --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sections", "interleaved"), [((2, 3, 3), False), ((3, 3, 2), True)])
def test_sections_reach_the_encoding(sections: tuple, interleaved: bool) -> None:
    spec = {"rope_type": "linear", "factor": 2.0, "mrope_section": list(sections), "mrope_interleaved": interleaved}
    rope = from_hugging_face({"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_scaling": spec})
    assert isinstance(rope, RopeConfig)
    options = rope.options(32)
    assert options == {
        "base": 500.0, "scaling": lg.scaling.Linear(2.0), "rotary_dim": 16, "sections": sections,
        "arrangement": "interleaved" if interleaved else "contiguous",
    }  # fmt: skip
    found = rope.encoding(32, "half")
    assert type(found) is MultimodalRotary and (found.layout, found.sections) == ("half", sections)
    assert found.axis_of_pair == ([0, 1, 2, 0, 1, 2, 0, 1] if interleaved else [0, 0, 1, 1, 1, 2, 2, 2])
    assert torch.equal(found.frequencies().inverse, rope_frequencies(32, 500.0, rotary_dim=16).inverse / 2)
    with pytest.raises(TypeError, match=r"unexpected keyword argument '(sections|arrangement)'"):
        Rotary(32, "half", **options)
    with pytest.raises(ValueError, match="unknown option of 'rope' 'sections'"):
        lg.encoding("rope", head_dim=32, layout="half", **options)


def test_no_sections_is_plain_rope() -> None:
    rope = RopeConfig(500.0, YaRN(4.0, 2048), 0.5)
    found = rope.encoding(32, "interleaved")
    assert type(found) is Rotary and (found.layout, found.rotary_dim, found.base) == ("interleaved", 16, 500.0)
    assert found.scaling == YaRN(4.0, 2048)
    assert RopeConfig(500.0, proportion=0.5).encoding(32, "half").proportion == 0.5
    assert type(Rotary(32, "half", **rope.options(32))) is Rotary


def test_sections_and_proportion() -> None:
    both = RopeConfig(1e4, proportion=0.5, sections=(2, 3, 3))
    for call in (lambda: both.options(16), lambda: both.encoding(16, "half")):
        with pytest.raises(ValueError, match=r"mrope: expected sections without p-RoPE, got .*proportion=0.5"):
            call()


# ---- ramps by parts --------------------------------------------------------------------------------------------------
SHORT = "{}: expected an original_max_length in which a pair rotates beta_slow={} times, got {};"
INVERTED = [
    (NTKByParts(4.0, 3, beta_slow=1), 8, 2.0, SHORT.format("ntk_by_parts", 1, 3)),
    (YaRN(4.0, 8, beta_slow=16), 64, 10.0, SHORT.format("yarn", 16, 8)),
    (YaRN(4.0, 6, truncate=False), 64, 1e4, SHORT.format("yarn", 1, 6)),  # 6 / 2 pi is just below one rotation
]


@pytest.mark.parametrize(("scaling", "dim", "base", "message"), INVERTED, ids=[str(row[0]) for row in INVERTED])
def test_ramps_that_would_run_backwards(scaling, dim: int, base: float, message: str) -> None:
    with pytest.raises(ValueError, match=message + ".*ramp='rotations' has no such limit"):
        rope_frequencies(dim, base, scaling)
    with pytest.raises(ValueError, match=message):
        Rotary(dim, "half", base, scaling=scaling)
    options = scaling.as_dict() | {"ramp": "rotations", "truncate": True}
    rope_frequencies(dim, base, options)


@pytest.mark.parametrize(
    ("scaling", "dim", "base", "kept"),
    [
        (YaRN(4.0, 6), 64, 1e4, [1.0] + [0.0] * 31),  # rounded outwards to pair 0: published, 0.001 wide
        (YaRN(4.0, 7, truncate=False), 64, 1e4, [1.0] + [0.0] * 31),  # between pairs 0 and 1
        (YaRN(4.0, 63, 2, 1), 2, 1e4, [1.0]),
        (YaRN(4.0, 30_000), 64, 15.0, [1.0] * 32),  # low is pair 59 of 64: every real pair rotations often
    ],
    ids=str,
)
def test_ramps_at_the_very_border(scaling, dim: int, base: float, kept: list) -> None:
    """What the published code still computes stays, to its value."""
    theta, stays = rope_frequencies(dim, base).inverse, torch.tensor(kept, dtype=torch.float64)
    want = theta * stays + theta / scaling.factor * (1 - stays)
    torch.testing.assert_close(rope_frequencies(dim, base, scaling).inverse, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("truncate", [True, False])
def test_slower_pairs_are_scaled_more_or_refused(truncate: bool) -> None:
    """At every length up to 1024: what is left of a frequency never grows with the pair, and the law of each end holds."""
    refused = 0
    for original in [*range(1, 40), *(2**n for n in range(6, 11))]:
        for base in (3.0, 50.0, 1e4):
            scaling = YaRN(4.0, original, truncate=truncate)
            plain = rope_frequencies(16, base).inverse
            try:
                left = rope_frequencies(16, base, scaling).inverse / plain
            except ValueError:
                refused += 1
                continue
            rotations = original * plain / (2 * torch.pi)
            assert (left.diff() <= 1e-12).all(), (original, base)
            torch.testing.assert_close(left[rotations >= 32], torch.ones_like(left[rotations >= 32]))
            if not truncate:
                torch.testing.assert_close(left[rotations <= 1], torch.full_like(left[rotations <= 1], 0.25))
    assert refused == (9 if truncate else 18)


# ---- mistakes --------------------------------------------------------------------------------------------------------
ORIGINAL = "original_max_position_embeddings"


def read(**given):
    return lambda: from_hugging_face({"rope_parameters": BASE | given, "max_position_embeddings": 64})


WRONG = [
    (read(rope_type=["yarn"]), r"unknown rope_type \['yarn'\]: did you mean 'yarn'"),
    (read(type={}.keys()), r"unknown rope_type dict_keys"),
    (
        lambda: from_hugging_face(BASE | {"rope_scaling": "yarn"}),
        "expected rope_scaling to be a mapping or None, got 'yarn'",
    ),
    (
        lambda: from_hugging_face(BASE | {"rope_scaling": []}),
        r"expected rope_scaling to be a mapping or None, got \[\]",
    ),
    (
        lambda: from_hugging_face(BASE | {"rope_parameters": 2}),
        "expected rope_parameters to be a mapping or None, got 2",
    ),
    (
        lambda: from_hugging_face("config.json"),
        r"expected a config as a mapping or an object with to_dict\(\), got 'config",
    ),
    (read(mrope_section=16), "expected mrope_section to be a list of numbers of pairs, got 16"),
    (read(mrope_section="abc"), "expected mrope_section to be a list of numbers of pairs, got 'abc'"),
    (read(mrope_section=[]), r"expected mrope_section to be a list of numbers of pairs, got \[\]"),
    (read(mrope_section=[2, 3.0, 3]), r"expected mrope_section to be a list of numbers of pairs, got \[2, 3.0, 3\]"),
    (read(mrope_section=[9, -1]), r"expected mrope_section to be a list of numbers of pairs, got \[9, -1\]"),
    (read(mrope_section=[2, 3, 3], mrope_interleaved="yes"), "expected mrope_interleaved True or False, got 'yes'"),
    (read(mrope_interleaved=True), "expected mrope_section, the pairs per axis, with mrope_interleaved, got none"),
    (read(partial_rotary_factor=True), "partial_rotary_factor above 0 and at most 1, got True"),
    (read(rope_type="yarn", **{ORIGINAL: "32"}), f"'yarn': expected {ORIGINAL} to be an int of 1 or more, got '32'"),
    (
        lambda: from_hugging_face(
            {"rope_parameters": BASE | {"rope_type": "yarn", ORIGINAL: 32}, "max_position_embeddings": "64"}
        ),
        "'yarn': expected max_position_embeddings to be an int of 1 or more, got '64'",
    ),
    (lambda: rope_frequencies(8, scaling={"name": ["yarn"]}), r"unknown scaling \['yarn'\]: did you mean 'yarn'"),
    (lambda: MultimodalRotary(16, "half", sections=4), "mrope: expected sections of pairs .*, got 4"),  # type: ignore[arg-type]
]


test_wrong = refused_calls(WRONG)


def test_what_stays_right() -> None:
    assert from_hugging_face(BASE | {"rope_scaling": {}, "rope_parameters": None}) == RopeConfig(1e4)
    assert read(mrope_interleaved=False)() == RopeConfig(1e4)
    # Nothing of linear depends on a length.
    linear = {"rope_scaling": {"type": "linear", "factor": 2}, "max_position_embeddings": "?"}
    assert from_hugging_face(BASE | linear) == RopeConfig(1e4, lg.scaling.Linear(2))
    assert from_hugging_face(to_hugging_face(RopeConfig(1e4, sections=(8, 0, 8)))) == RopeConfig(
        1e4, sections=(8, 0, 8)
    )


# ---- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["rope", "mrope"])
def test_config_holds_every_option_of_the_scheme(name: str) -> None:
    want = YaRN(4.0, 1024).as_dict()
    assert {"beta_fast", "truncate", "mscale", "ramp"} <= want.keys()
    for spec in ({"name": "yarn", "factor": 4.0, "original_max_length": 1024}, YaRN(4.0, 1024)):
        config = LongitudeConfig(encoding={"name": name, "scaling": spec})
        assert config.encoding["scaling"] == want  # type: ignore[index]
        assert json.loads(config.to_json_string())["encoding"]["scaling"] == want
    assert LongitudeConfig(encoding=name).encoding["scaling"] is None  # type: ignore[index]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"name": "yarm"}, "unknown scaling 'yarm': did you mean 'yarn'"),
        ({"name": "yarn", "factor": 4.0}, "'yarn' needs the option 'original_max_length'"),
        ({"name": "linear", "factor": 0.5}, "linear: expected a factor of 1 or more, got 0.5"),
        ("yarn", "scaling: expected a scheme, .* got 'yarn'"),
        (4.0, "scaling: expected a scheme, .* got 4.0"),
    ],
)
def test_config_refuses_a_wrong_scheme(scaling, message: str) -> None:
    for encoding in ({"name": "rope", "scaling": scaling}, [{"name": "mrope", "scaling": scaling}]):
        with pytest.raises(ValueError, match=message):
            LongitudeConfig(encoding=encoding)


def test_config_of_a_rotation_without_scaling() -> None:
    assert "scaling" not in LongitudeConfig(encoding="axial_rope").encoding  # type: ignore[operator]


@pytest.mark.parametrize(
    "slopes",
    [
        np.array([1.0, 0.5, 0.25, 0.125]),
        np.array([1.0, 0.5, 0.25, 0.125], dtype=np.float32),
        (1.0, 0.5, 0.25, 0.125),
        [np.float32(1.0), np.float64(0.5), 0.25, 0.125],
        torch.tensor([1.0, 0.5, 0.25, 0.125]),
    ],
    ids=lambda slopes: type(slopes).__name__,
)
def test_numbers_of_a_spec_become_plain(slopes) -> None:
    config = LongitudeConfig(encoding={"name": "alibi", "slopes": slopes, "num_heads": np.int64(4)})
    found = config.encoding["slopes"]  # type: ignore[index]
    assert found == [1.0, 0.5, 0.25, 0.125]
    assert type(found) is list and all(type(slope) is float for slope in found)
    assert json.loads(config.to_json_string())["encoding"] == config.encoding
