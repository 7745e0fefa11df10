"""What configs say of positions: numbers of published ones, families that rotate some layers or none, and broken files."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GraniteSWAConfig, PhimoeConfig

import longitude as lg
from longitude.checkpoints.compare import read, ropes
from longitude.checkpoints.config import positions_of_layers
from longitude.checkpoints.declared import of_full_attention, text_part
from longitude.checkpoints.lint import contradictions, remarks
from longitude.checkpoints.load import built_without_weights
from longitude.drawings import checkpoint
from longitude.positions.hugging_face import NotUnderstood, RopeConfig
from longitude.positions.scaling import Linear, YaRN
from tests.checkpoints.published import KIMI_K2, MPT_16, ORIGINAL, PUBLISHED, QWEN3_VL, said
from tests.support import refused, refused_calls

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 96, "intermediate_size": 64,
    "pad_token_id": 0,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


test_parts_that_differ = refused_calls(
    [
        (lambda: text_part({"text_config": 3}), "text_config", "3"),
        (lambda: of_full_attention({"full": RopeConfig(1e4), "other": RopeConfig(1e4, Linear(2.0))}), "full", "other"),
        (lambda: of_full_attention({"sliding_attention": RopeConfig(1e4)}), "sliding_attention"),
    ]
)


# ---- published numbers -----------------------------------------------------------------------------------------------
def test_factors_that_differ_are_not_understood():
    scheme = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, ORIGINAL: 64, "factor": 2.0}
    shape = SMALL | {"num_key_value_heads": 4, "rope_theta": 1e4}
    config = PhimoeConfig(**shape, rope_scaling={**scheme, "short_mscale": 1.1, "long_mscale": 1.2})  # type: ignore[call-arg]
    with pytest.raises(NotUnderstood, match="short_mscale") as error:
        ropes(config)
    assert error.value.keys == ("rope_scaling.short_mscale", "rope_scaling.long_mscale")


def test_mpt_with_another_largest_bias(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MPT_16))
    config = checkpoint.read(str(tmp_path / "config.json"))
    [alibi] = checkpoint.encodings(config).values()
    assert alibi.slopes == [2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16]


@pytest.mark.parametrize("interleaved", [{}, {"mrope_interleaved": True}, {"mrope_interleaved": False}])
def test_qwen3_vl_interleaves_its_axes_whatever_its_file_says(interleaved):
    scheme = {"rope_type": "default", "mrope_section": [24, 20, 20], **interleaved}
    rope = lg.from_hugging_face(QWEN3_VL | {"num_hidden_layers": 2, "rope_scaling": scheme})
    assert rope == RopeConfig(5000000, sections=(24, 20, 20), interleaved=True)


def test_llama_4_scout_has_no_ramp():
    """high_freq_factor = low_freq_factor: a pair turns at least once within L and stays, or it is divided by 16."""
    rope = lg.from_hugging_face(PUBLISHED["Llama 4 Scout"] | {"num_hidden_layers": 4})
    assert isinstance(rope, RopeConfig)
    inverse = lg.rope_frequencies(128, base=rope.base, scaling=rope.scaling, length=8).inverse
    plain = lg.rope_frequencies(128, base=500_000.0).inverse
    stays = 8192 * plain / (2 * torch.pi) >= 1
    torch.testing.assert_close(inverse, torch.where(stays, plain, plain / 16), rtol=1e-12, atol=0)
    assert 0 < int(stays.sum()) < 64


# ---- layers that rotate, and layers that do not ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "more", "rotates"),
    [
        ("jamba", {"num_experts": 2}, []),
        ("afmoe", {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts": 4}, [0, 2]),
        ("granite_swa", {"layer_rope_theta": [1e4, 0, 1e4, 0]}, [0, 2]),
        ("kolibri1", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}, [0, 2]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of kernels that are not here
def test_which_layers_rotate(kind, more, rotates):
    reading = read(AutoConfig.for_model(kind, **SMALL | {"num_key_value_heads": 2} | more))
    assert reading.layers is not None
    assert [n for n, layer in enumerate(reading.layers) if layer is not None] == rotates
    if not rotates:
        assert reading.ropes == {}


@pytest.mark.parametrize("key", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_the_class_does_not_read_may_be_nothing(key):
    assert lg.from_hugging_face({"model_type": "llama", "rope_parameters": PLAIN, key: 0, **SMALL}).base == 1e4


def test_a_layer_without_attention_has_no_mixer():
    config = AutoConfig.for_model("lfm2", **SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2)
    conv, full = lg.checkpoints.layers_from_hugging_face(config, "half")[:2]
    assert (conv.attends, full.attends) == (False, True) and full.mixer == {"name": "attention"}
    assert conv.encoding == [{"name": "nope"}] and full.encoding[0]["name"] == "rope"
    with refused("attention"):
        _ = conv.mixer


def test_bases_by_layer():
    """One type of layers, two bases: no RopeConfig has both, and each layer has its own."""
    config = GraniteSWAConfig(
        **SMALL, num_key_value_heads=2, layer_types=["full_attention"] * 4, layer_rope_theta=[1e4, 1e6, 0, 1e4]
    )
    with pytest.raises(NotUnderstood, match="layer_rope_theta"):
        lg.from_hugging_face(config)
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    config.layer_rope_theta = [1e4, 1e6, 1e4, 0]
    layers = lg.checkpoints.layers_from_hugging_face(config, "half")
    assert [layer.encoding[0].get("base") for layer in layers] == [1e4, 1e6, 1e4, None]
    by_type = lg.from_hugging_face(config)
    assert by_type == {
        "sliding_attention": RopeConfig(1e4),
        "full_attention": RopeConfig(1e6, rotates=(False, True, False, False)),
    }


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gpt2", "in its input"),
        ("bloom", "cannot be looked into"),
        ("roberta", "input"),
        pytest.param("glm5_next", "not understood", marks=pytest.mark.slow),
    ],
)
def test_positions_that_are_no_rotation_are_said(kind, message):
    text = {"text_config": SMALL | {"num_key_value_heads": 4}} if kind == "glm5_next" else SMALL
    config = AutoConfig.for_model(kind, **text)
    with pytest.warns(UserWarning, match=message):
        assert lg.from_hugging_face(config) == {}
    with pytest.raises(NotUnderstood, match=message):
        lg.checkpoints.layers_from_hugging_face(config, "half")


def test_a_model_type_that_transformers_does_not_have_is_said():
    want = RopeConfig(50000.0, YaRN(32.0, 4096, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0))
    with pytest.warns(UserWarning, match="model_type 'kimi_k2'"):
        assert lg.from_hugging_face(KIMI_K2 | {"model_type": "kimi_k2"}) == want


def test_a_class_has_a_base_of_its_own_and_that_of_all_classes_is_none():
    """Gemma 3's files may have no base; Llama's, without one, have lost it."""
    small = {"num_hidden_layers": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    by_type = lg.from_hugging_face({"model_type": "gemma3_text", **small})
    assert by_type == {"full_attention": RopeConfig(1e6, Linear(8.0)), "sliding_attention": RopeConfig(1e4)}
    with refused("rope_theta"):
        lg.from_hugging_face({"model_type": "llama", **small})


@pytest.mark.parametrize("bases", [[1e6, 0, 1e6, 0], [1e4, 0, 1e6, 1e6]])
def test_bases_of_layers_are_the_bases_of_a_file(bases):
    """Granite's class rotates by them alone, and a file without rope_theta has lost nothing; Llama's reads no such key."""
    raw = {"model_type": "granite_swa", **SMALL, "num_key_value_heads": 2, "layer_rope_theta": bases}
    raw["layer_types"] = ["full_attention" if base == 1e6 else "sliding_attention" for base in bases]
    assert said(raw)[0] == []
    layers = lg.checkpoints.layers_from_hugging_face(raw, "half")
    assert [layer.encoding[0].get("base", 0) for layer in layers] == bases
    with refused("rope_theta"):
        lg.from_hugging_face({"model_type": "llama", **SMALL, "layer_rope_theta": bases})


def test_parameters_of_a_rotation_that_are_not_there_are_not_remarked():
    """MPT's class has none, and a file that has some is told that they do nothing."""
    assert said(MPT_16)[1] == [] and len(remarks(MPT_16 | {"rope_theta": 1e4}, AutoConfig.for_model(**MPT_16))) == 1


# ---- what is said of a config ----------------------------------------------------------------------------------------
def rotating(**rope: Any) -> dict[str, Any]:
    """A Llama with these rope parameters."""
    return {"model_type": "llama", **SMALL, "max_position_embeddings": 64, "rope_parameters": PLAIN | rope}


def test_a_share_that_its_class_does_not_read_is_a_contradiction():
    [fault], _ = said(rotating(partial_rotary_factor=0.5))
    assert "partial_rotary_factor" in fault and "LlamaRotaryEmbedding" in fault
    assert said(rotating(partial_rotary_factor=0.5, rope_type="linear", factor=2.0))[0] == []  # there it does


def test_a_factor_beyond_the_declared_length_is_remarked():
    yarn = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32}
    wrong, [remark] = said(rotating(**yarn))
    assert wrong == [] and "4.0" in remark and "64" in remark and "128" in remark
    assert said(rotating(**yarn | {"factor": 2.0})) == ([], [])


@pytest.mark.slow
@pytest.mark.filterwarnings("error")  # of keys that are not understood
def test_deepseek_v4_has_a_base_of_its_own_where_keys_are_compressed() -> None:
    config = AutoConfig.for_model("deepseek_v4", **SMALL | {"compress_rope_theta": 77777.0})
    assert {name: rope.base for name, rope in ropes(config).items()} == {"main": 1e4, "compress": 77777.0}
    lg.from_hugging_face(config)
    assert [*contradictions(config.to_dict(), config)] == []


# ---- what is to be known, and what is missing ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 1.0},
        {"rope_parameters": PLAIN | {"rope_theta": 0.5}},
        {"rope_scaling": PLAIN | {"rope_theta": 1}},
    ],
)
def test_a_base_by_which_no_pair_is_slower_is_a_contradiction(keys):
    assert any("rope_theta" in sentence for sentence in said(SMALL | keys | {"model_type": "llama"})[0])


def test_a_window_is_read_where_its_class_has_another_name_for_it():
    """RecurrentGemma writes attention_window_size; to_dict() of its config has that name alone."""
    config = AutoConfig.for_model("recurrent_gemma", **SMALL, num_key_value_heads=1, attention_window_size=24)
    others = {None} if getattr(config, "layer_types", None) else set()  # transformers 5.21 has none
    assert {layer.window for layer in positions_of_layers(config, "half")} == {24} | others


def test_a_type_of_layers_without_rope_parameters_is_named():
    """Cohere Compass has none by default, and its class raises a KeyError of the type alone."""
    config = AutoConfig.for_model("cohere_compass_text", **SMALL)
    with refused("rope_parameters", "full_attention"):
        built_without_weights("here", config)
    with refused("rope_parameters", "full_attention"):
        lg.from_hugging_face(config)
