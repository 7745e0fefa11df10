"""Rotary options of Hugging Face configs: both forms, both directions, and transformers' own tables of what we write."""

import json

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

import longitude as lg
from longitude.checkpoints.config import from_hugging_face
from longitude.positions.hugging_face import RopeConfig, to_hugging_face
from longitude.positions.rotary import MultimodalRotary, Rotary
from longitude.positions.scaling import NTK, BaseChange, DynamicNTK, Linear, Llama3, LongRoPE, NTKByParts, Scaling, YaRN
from tests.support import refused_calls

SHORT, LONG = [1.0 + k / 32 for k in range(32)], [1.2**k for k in range(32)]
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ORIGINAL: 2048}
LISTS = {"short_factor": SHORT, "long_factor": LONG}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, ORIGINAL: 4096} | LISTS


def parameters(**given) -> RopeConfig:
    rope = from_hugging_face({"rope_parameters": {"rope_theta": 1e4} | given, "max_position_embeddings": 8192})
    assert isinstance(rope, RopeConfig)
    return rope


# ---- reading ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, None),
        ({"rope_type": "default"}, None),
        ({"rope_type": None}, None),
        ({"type": "linear", "factor": 2}, Linear(2)),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTK(2.0, 8192, follow="sequence")),
        (YARN, YaRN(4.0, 2048)),
        ({"rope_type": "yarn", "factor": 4.0}, YaRN(4.0, 8192)),
        ({"rope_type": "yarn", ORIGINAL: 2048}, YaRN(4.0, 2048)),
        ({"rope_type": "yarn", "factor": None, ORIGINAL: 2048, "beta_fast": None}, YaRN(4.0, 2048)),
        (
            YARN | {"beta_fast": 64, "beta_slow": 2, "attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5},
            YaRN(4.0, 2048, 64, 2, 1.5, 1.0, 0.5),
        ),
        (YARN | {"truncate": False}, YaRN(4.0, 2048, truncate=False)),
        (LONGROPE, LongRoPE(SHORT, LONG, 4096, factor=2.0, follow="sequence")),
        (LONGROPE | {"rope_type": "su"}, LongRoPE(SHORT, LONG, 4096, factor=2.0, follow="sequence")),
        (
            LONGROPE | {"factor": 8, "attention_factor": 1.1},
            LongRoPE(SHORT, LONG, 4096, 8, attention_factor=1.1, follow="sequence"),
        ),
        (LONGROPE | {ORIGINAL: None}, LongRoPE(SHORT, LONG, 8192, factor=1.0, follow="sequence")),
        (LONGROPE | {ORIGINAL: 10_000}, LongRoPE(SHORT, LONG, 10_000, factor=1.0, follow="sequence")),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 3}, Llama3(8, 8192, 2, 3)),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}, Linear(2.0)),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 1.0}, None),
    ],
)
def test_types(given: dict, want) -> None:
    rope = parameters(**given)
    assert rope.scaling == want
    assert rope.base == given.get("rope_theta", 1e4)
    share = given.get("partial_rotary_factor", 1.0)
    assert (rope.partial_rotary_factor, rope.proportion) == (1.0, share)
    if ORIGINAL not in given or given[ORIGINAL] is not None:  # the old form means the same
        inner = {name: value for name, value in given.items() if name != "rope_theta"}
        old = {"rope_theta": rope.base, "rope_scaling": inner, "max_position_embeddings": 8192}
        assert from_hugging_face(old) == rope


def scaling_of(config: dict) -> Scaling | None:
    rope = from_hugging_face(config)
    assert isinstance(rope, RopeConfig)
    return rope.scaling


def test_partial_and_legacy_names() -> None:
    assert from_hugging_face({"rope_theta": 5e5}) == RopeConfig(5e5)
    half = {"rope_theta": 5e5, "rope_scaling": None, "partial_rotary_factor": 0.5}
    assert from_hugging_face(half) == RopeConfig(5e5, None, 0.5)
    assert from_hugging_face({"rope_theta": 1e4, "rope_scaling": {}, "rope_parameters": None}) == RopeConfig(1e4)
    assert from_hugging_face({"rotary_emb_base": 10_000, "rotary_pct": 0.25}) == RopeConfig(10_000, None, 0.25)
    assert parameters(partial_rotary_factor=0.25) == RopeConfig(1e4, None, 0.25)
    same = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}
    assert from_hugging_face(same | {"rope_parameters": same["rope_scaling"]}) == RopeConfig(1e4, Linear(2))


@pytest.mark.parametrize(
    ("given", "key", "want"),
    [
        ({"rope_parameters": {"rope_theta": 2.0}, "partial_rotary_factor": 0.1}, "rope_theta", RopeConfig(2.0, None, 0.1)),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}}, "rope_type", RopeConfig(1e4, Linear(2))),
        ({ORIGINAL: 64, "rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 32}}, ORIGINAL, RopeConfig(1e4, YaRN(4.0, 64))),
    ],
)  # fmt: skip
def test_two_values(given: dict, key: str, want: RopeConfig) -> None:
    """The one that transformers takes, with a warning."""
    with pytest.warns(UserWarning, match=key):
        assert from_hugging_face({"rope_theta": 1e4, "max_position_embeddings": 256} | given) == want


def test_layer_types() -> None:
    """Each with its own base and scheme; None for layers without rotation; and the older two-base form."""
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default"},
        "none": None,
    }
    ropes = from_hugging_face({"rope_parameters": nested, "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    assert ropes == {
        "full_attention": RopeConfig(1e6, Linear(8.0), 0.5),
        "sliding_attention": RopeConfig(1e4, None, 0.5),
        "none": None,
    }
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    want = {"full_attention": RopeConfig(1e6, Linear(8.0)), "sliding_attention": RopeConfig(1e4)}
    assert from_hugging_face(old) == want
    two = {"full_attention": RopeConfig(1e6), "sliding_attention": RopeConfig(1e4)}
    assert from_hugging_face({"global_rope_theta": 1e6, "local_rope_theta": 1e4}) == two


@pytest.mark.parametrize(("sections", "interleaved"), [((2, 3, 3), False), ((3, 3, 2), True)])
def test_sections_reach_the_encoding(sections: tuple, interleaved: bool) -> None:
    spec = {"type": "linear", "factor": 2.0, "mrope_section": list(sections), "mrope_interleaved": interleaved}
    rope = from_hugging_face({"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_scaling": spec})
    assert rope == RopeConfig(500.0, Linear(2.0), 0.5, sections=sections, interleaved=interleaved)
    found = rope.encoding(32, "half")
    assert type(found) is MultimodalRotary and (found.layout, found.sections) == ("half", sections)
    assert found.axis_of_pair == ([0, 1, 2, 0, 1, 2, 0, 1] if interleaved else [0, 0, 1, 1, 1, 2, 2, 2])
    assert torch.equal(found.frequencies().inverse, lg.rope_frequencies(32, 500.0, rotary_dim=16).inverse / 2)


def test_no_sections_is_plain_rope() -> None:
    rope = RopeConfig(500.0, YaRN(4.0, 2048), 0.5, 0.25)
    options = {"base": 500.0, "scaling": YaRN(4.0, 2048), "rotary_dim": 16, "proportion": 0.25}
    assert rope.options(32) == options and parameters(mrope_interleaved=False) == RopeConfig(1e4)
    assert repr(rope.encoding(32, "interleaved")) == repr(Rotary(32, "interleaved", **options))
    assert RopeConfig(1e4, None, 0.4).rotary_dim(80) == 32


def test_original_length_outside_comes_first() -> None:
    """Phi-3 keeps it next to max_position_embeddings; transformers reads it first for flat parameters of every type."""
    outside = {"rope_theta": 1e4, "max_position_embeddings": 131_072, ORIGINAL: 4096}
    yarn = {"type": "yarn", "factor": 4.0}
    for inside, want in (
        ({"type": "longrope"} | LISTS, LongRoPE(SHORT, LONG, 4096, 32.0, follow="sequence")),
        (yarn, YaRN(4.0, 4096)),
        (yarn | {"max_position_embeddings": 131_072}, YaRN(4.0, 4096)),  # a copy of what stands outside
        ({"type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 3}, Llama3(8, 4096, 2, 3)),
        ({"type": "dynamic", "factor": 2.0}, DynamicNTK(2.0, 131_072, follow="sequence")),  # which has no such key
    ):
        assert scaling_of(outside | {"rope_scaling": inside}) == want
    nested = {"rope_theta": 1e4, ORIGINAL: 4096, "rope_parameters": {"full_attention": yarn | {ORIGINAL: 2048}}}
    assert from_hugging_face(nested) == {"full_attention": RopeConfig(1e4, YaRN(4.0, 2048))}


# ---- writing ---------------------------------------------------------------------------------------------------------
ROPES = [
    RopeConfig(5e5),
    RopeConfig(1e4, None, 0.25),
    RopeConfig(1e4, None, proportion=0.75),
    RopeConfig(1e4, None, proportion=0.0),
    RopeConfig(1e4, Linear(4.0)),
    RopeConfig(1e4, Linear(4.0), proportion=0.5),
    RopeConfig(1e4, DynamicNTK(2.0, 2048, follow="sequence"), 0.5),
    RopeConfig(1e6, YaRN(4.0, 2048)),
    RopeConfig(1e6, YaRN(4.0, 2048, 64, 2, 1.2, truncate=False), 0.5),
    RopeConfig(1e4, YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=1.0), sections=(8, 12, 12)),
    RopeConfig(1e4, LongRoPE(SHORT, LONG, 4096, 32.0, follow="sequence")),
    RopeConfig(1e4, LongRoPE(SHORT, LONG, 4096, 32.0, attention_factor=1.1, follow="sequence")),
    RopeConfig(5e5, Llama3(8.0, 8192, 1.0, 4.0)),
    RopeConfig(5e5, sections=(8, 12, 12), interleaved=True),
]


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_there_and_back(rope: RopeConfig, style: str) -> None:
    written = json.loads(json.dumps(to_hugging_face(rope, style=style)))
    assert from_hugging_face(written) == rope
    assert (style in written) and ("rope_theta" in written) == (style == "rope_scaling")
    if style == "rope_scaling":
        assert "partial_rotary_factor" not in (written["rope_scaling"] or {})


def test_written_forms() -> None:
    """Exactly what stands in a config.json."""
    assert to_hugging_face(RopeConfig(5e5)) == {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert to_hugging_face(RopeConfig(5e5), style="rope_scaling") == {"rope_scaling": None, "rope_theta": 5e5}
    yarn = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 2048, "beta_fast": 32, "beta_slow": 1, "truncate": True}
    written = to_hugging_face(RopeConfig(1e6, YaRN(4.0, 2048), 0.5), style="rope_scaling")
    assert written == {"rope_scaling": yarn, "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    dynamic = to_hugging_face(RopeConfig(1e4, DynamicNTK(2.0, 2048, follow="row")))
    assert dynamic["max_position_embeddings"] == 2048 and dynamic["rope_parameters"]["rope_type"] == "dynamic"
    declared = RopeConfig(1e4, LongRoPE(SHORT, LONG, 4096, max_length=8192))
    written = to_hugging_face(declared, style="rope_scaling")
    assert written["max_position_embeddings"] == 8192 and written[ORIGINAL] == 4096
    sections = to_hugging_face(RopeConfig(1e4, sections=(8, 12, 12)))["rope_parameters"]
    assert sections == {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}


@pytest.mark.parametrize(
    "rope",
    [
        *[rope for rope in ROPES if rope.scaling is not None or rope.proportion != 1],
        RopeConfig(1e4, NTKByParts(4.0, 2048, 16, 2)),
        RopeConfig(1e4, NTKByParts(4.0, 2048, truncate=False), 0.5),
        RopeConfig(1e4, NTK(4.0)),
        RopeConfig(1e4, NTK(4.0), 0.5),
        RopeConfig(1e4, BaseChange(5e5), 0.5),
    ],
    ids=str,
)
def test_transformers_computes_our_tables(rope: RopeConfig) -> None:
    """Their functions on the exported config: the table at any length, and the factor of cos and sin."""
    written = to_hugging_face(rope, head_dim=64)
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, **{"max_position_embeddings": 131_072} | written)
    kind = config.rope_parameters["rope_type"]
    for length in (None, 2048, 4096, 4097, 20_000):
        ours = rope.encoding(64, "half").frequencies(length)
        if kind == "default":  # a base and nothing else
            share = config.rope_parameters.get("partial_rotary_factor", 1.0)
            theirs, factor = lg.rope_frequencies(int(64 * share), config.rope_parameters["rope_theta"])[:2]
        else:
            theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        torch.testing.assert_close(ours.inverse, theirs.double(), rtol=1e-6, atol=0)
        assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("more", [{}, {"mscale_all_dim": 0.707}, {"mscale": 1.0}, {"mscale": 0.5, "mscale_all_dim": 1}])
def test_softmax_factor_is_deepseeks(more: dict) -> None:
    """An explicit attention_factor is for cos and sin alone."""
    for given in (YARN | more, YARN | more | {"attention_factor": 1.5}):
        ours = lg.rope_frequencies(64, scaling=parameters(**given).scaling).softmax_factor
        assert 192**-0.5 * ours == pytest.approx(yarn_apply_mscale(given, 192**-0.5), rel=1e-12)


def test_layer_types_there_and_back() -> None:
    ropes = {"full_attention": RopeConfig(1e6, YaRN(4.0, 2048)), "sliding_attention": RopeConfig(1e4), "none": None}
    written = json.loads(json.dumps(to_hugging_face(ropes)))
    assert from_hugging_face(written) == ropes
    dynamic = {"a": RopeConfig(1e4, DynamicNTK(2.0, 2048, follow="sequence")), "b": RopeConfig(1e4)}
    assert to_hugging_face(dynamic)["max_position_embeddings"] == 2048
    assert from_hugging_face(to_hugging_face(dynamic)) == dynamic


# ---- errors ----------------------------------------------------------------------------------------------------------
def read(**given):
    return lambda: parameters(**given)


def config(**entries):
    return lambda: from_hugging_face(entries)


def write(rope, **options):
    return lambda: to_hugging_face(rope, **options)


LINEAR, DEFAULT = {"type": "linear", "factor": 2}, {"rope_type": "default"}
BOTH = RopeConfig(1e4, proportion=0.5, sections=(2, 3, 3))
test_wrong_configs = refused_calls(
    [
        (config(rope_scaling=LINEAR), "rope_theta"),
        (config(rope_parameters={"a": DEFAULT}), "rope_theta"),
        (config(rope_scaling=LINEAR, rope_parameters=YARN), "rope_parameters", "rope_scaling"),
        (config(rope_theta=1e4, rope_scaling="yarn"), "rope_scaling", "'yarn'"),
        (lambda: from_hugging_face("config.json"), "config", "to_dict"),
        (read(rope_type="yarm"), "rope_type", "'yarm'", "'yarn'"),
        (read(rope_type="linear", factr=2), "rope_type", "'linear'", "'factr'", "'factor'"),
        (read(rope_type="yarn", factor=2, short_factor=SHORT), "rope_type", "'yarn'", "'short_factor'"),
        (read(rope_type="linear"), "'linear'", "factor"),
        (read(rope_type="longrope", short_factor=SHORT), "'longrope'", "long_factor"),
        (read(rope_type="yarn"), "'yarn'", "factor", ORIGINAL, "max_position_embeddings"),
        (config(rope_parameters=YARN | {ORIGINAL: "32"}), "'yarn'", ORIGINAL, "'32'"),
        (config(rope_parameters=YARN, max_position_embeddings="64"), "max_position_embeddings", "1", "'64'"),
        (read(partial_rotary_factor=0), "partial_rotary_factor", "got 0"),
        (read(mrope_section="abc"), "mrope_section", "'abc'"),
        (read(mrope_interleaved=True), "mrope_section", "mrope_interleaved"),
        (lambda: BOTH.encoding(16, "half"), "mrope", "proportion=0.5"),
        (write({"a": RopeConfig(1e4)}, style="rope_scaling"), "'rope_parameters'"),
        (write(RopeConfig(1e4, NTK(2.0))), "NTK", "head_dim"),
        (write(RopeConfig(1e4, NTK(2.0), proportion=0.5)), "RoPE"),
        (
            write({"a": RopeConfig(1e4, DynamicNTK(2.0, 9)), "b": RopeConfig(1e4, DynamicNTK(2.0, 8))}),
            "max_position_embeddings",
            "'b'",
        ),
    ]
)
