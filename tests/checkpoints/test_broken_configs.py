"""Broken files, each refused or reported in one sentence that names the key."""

import json
import warnings
from typing import Any

import pytest
from transformers import AutoConfig

import longitude as lg
from longitude.check.quick import random_model
from longitude.checkpoints.lint import contradictions, remarks
from longitude.checkpoints.load import config_of
from longitude.cli import main
from tests.checkpoints.published import ORIGINAL

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96,
    "intermediate_size": 64, "pad_token_id": 0, "max_position_embeddings": 4096, "rope_theta": 10000.0,
}  # fmt: skip
FLAT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"type": "linear", "factor": 2.0}
LISTS = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, ORIGINAL: 2048}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a base of no size": ({"rope_theta": 0}, "rope_theta"),
    "a base in quotes": ({"rope_theta": "10000"}, "rope_theta"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "a misspelt schema": ({"rope_scalling": {"type": "linear", "factor": 2.0}}, "rope_scalling"),
    "a misspelt factor": ({"rope_scaling": {"type": "linear", "facter": 2.0}}, "facter"),
    "a type of nobody": ({"rope_scaling": {"type": "yarnn", "factor": 2.0}}, "yarnn"),
    "a type that is a number": ({"rope_scaling": {"type": 3, "factor": 2.0}}, "rope_type"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "factor"),
    "a factor below one": ({"rope_scaling": {"type": "linear", "factor": 0.25}}, "factor"),
    "a list for a schema": ({"rope_scaling": ["linear", 2.0]}, "rope_scaling"),
    "two schemas": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
        "rope_scaling",
    ),
    "two types": ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    "a training length beyond the declared": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, ORIGINAL: 8192}}, ORIGINAL,
    ),
    "a factor that ends before the declared length": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, ORIGINAL: 1024}}, "factor",
    ),
    "a list of zeros": ({"rope_scaling": LISTS | {"short_factor": [0.0] * 8}}, "short_factor"),
    "borders the wrong way round": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, ORIGINAL: 2048, "beta_fast": 1, "beta_slow": 32}}, "beta_fast",
    ),
    "a share above one": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    "an odd share": ({"rope_scaling": LINEAR, "partial_rotary_factor": 0.3125}, "partial_rotary_factor"),
    "a base that is null, and a slip of it": ({"rope_theta": None, "rope_thet": 500000.0}, "rope_thet"),
    "two bases": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, "rope_theta"),
    "two training lengths": ({ORIGINAL: 1024, "rope_scaling": {"type": "yarn", "factor": 2.0, ORIGINAL: 2048}}, ORIGINAL),
    "a training length below zero": ({"rope_scaling": {"type": "yarn", "factor": 2.0, ORIGINAL: -1024}}, ORIGINAL),
    "lists of head_dim numbers": (
        {"rope_scaling": LISTS | {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}}, "short_factor",
    ),
    "axes of too few pairs": (
        {"model_type": "qwen2_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}, "mrope_section",
    ),
    "a window below zero": ({"model_type": "gemma3_text", "head_dim": 16, "sliding_window": -4}, "sliding_window"),
    "a window of nothing in all layers": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    "chunks of nothing": ({"model_type": "llama4_text", "attention_chunk_size": 0}, "attention_chunk_size"),
    "no layers between those without windows": ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "pattern"),
    "no parameters of one layer type": (
        {"model_type": "gemma3_text", "head_dim": 16, "rope_parameters": {"full_attention": FLAT}}, "sliding_attention",
    ),
    "a slip of a layer type": (
        {"model_type": "gemma3_text", "head_dim": 16, "rope_parameters": {"full_attention": FLAT, "sliding_atention": FLAT}},
        "sliding_atention",
    ),
    "bases of too few layers": ({"model_type": "granite_swa", "layer_rope_theta": [10000.0]}, "layer_rope_theta"),
    "an odd width": ({"model_type": "gptj", "rotary_dim": 7, "n_embd": 64, "n_head": 4, "n_layer": 2}, "rotary_dim"),
    "a list for the part about text": ({"text_config": [1, 2]}, "text_config"),
    "a largest bias below zero": ({"model_type": "mpt", "attn_config": {"alibi_bias_max": -8}}, "alibi_bias_max"),
    "heads that cannot share keys": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "a type that is null": ({"rope_parameters": FLAT | {"rope_type": None}, "rope_theta": None}, "rope_type"),
    "parameters by layer type where all layers are one": (
        {"rope_parameters": {"full_attention": FLAT, "sliding_attention": FLAT}}, "layer type",
    ),
    "layers that rotate, for some": ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore")
def test_broken(name, tmp_path):
    """By `check`, which reads the file and the class's config; of what the class refuses, by the error of its file. And by
    from_hugging_face: refused with the key, or read as the class reads it with a warning that names the key."""
    change, key = BROKEN[name]
    raw = LLAMA | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    try:
        config = config_of(tmp_path)
        of_file = [*contradictions(raw, config), *remarks(raw, config)]
    except ValueError as error:
        of_file = [str(error)]
    assert all("\n" not in sentence for sentence in of_file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lg.from_hugging_face(raw)
            of_dict = [str(warning.message) for warning in caught]
        except ValueError as error:
            of_dict = [str(error)]
    for sentences in (of_file, of_dict):
        assert any(key in sentence for sentence in sentences), sentences


QWEN2 = {"model_type": "qwen2", "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"model_type": "mistral", "sliding_window": -4}, "sliding_window"),
        (QWEN2 | {"use_sliding_window": False}, "use_sliding_window"),
    ],
)
def test_what_no_model_runs_with_is_named(change, key, tmp_path):
    """By `check --quick`, which said only what torch does: sizes of tensors that differ, a NoneType that is no integer."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ValueError, match=key):
        random_model(str(tmp_path))


@pytest.mark.slow
def test_show_says_what_contradicts_itself(tmp_path, capsys):
    change, key = BROKEN["two bases"]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    assert main(["show", str(tmp_path / "config.json"), "--json"]) == 0
    assert any(key in note for note in json.loads(capsys.readouterr().out)["about"][0]["notes"])


def test_the_file_that_is_broken_is_right_without_its_change():
    assert [*contradictions(LLAMA, AutoConfig.for_model(**LLAMA))] == [] and lg.from_hugging_face(LLAMA)
