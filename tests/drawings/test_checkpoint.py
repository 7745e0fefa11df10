"""What `longitude show config.json` says, against formulas of the papers; configs of transformers' own classes."""

import copy
import json
import math
import re

import numpy as np
import pytest
import transformers

import longitude as lg
from longitude.drawings import checkpoint
from longitude.drawings.rotations import Rotation
from longitude.positions.hugging_face import RopeConfig
from tests.checkpoints.published import PUBLISHED, RELEASED

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FEW = {"num_hidden_layers": 2, "vocab_size": 64}


@pytest.fixture
def saved(tmp_path):
    """config -> the path of its config.json, and the config as it is read from there."""

    def save(config):
        config.save_pretrained(tmp_path)
        path = str(tmp_path / "config.json")
        return path, checkpoint.read(path)

    return save


def words(path, config) -> dict[str, str]:
    return dict(checkpoint.words(checkpoint.facts(path, config)))


def test_turns_and_border_of_llama(saved):
    """Pair k turns L base^(-2k/d) / 2 pi times within L."""
    config = transformers.LlamaConfig(rope_parameters=LLAMA3, max_position_embeddings=131_072, head_dim=128, **FEW)
    path, config = saved(config)
    about = checkpoint.facts(path, config)
    [rotation] = about["rotations"]
    turns = [8192 * 500_000 ** (-2 * k / 128) / (2 * math.pi) for k in range(64)]
    assert rotation["turns"] == pytest.approx(turns, rel=1e-12)
    assert rotation["turned"] == sum(turn >= 1 for turn in turns) == 35
    found = words(path, config)
    assert found["length"] == "131,072 tokens declared, 8,192 before scaling"
    assert found["border"] == "pairs 35 to 63 never finished one: 45% of them"
    assert [each.name for each in checkpoint.drawings(config)] == ["wavelengths"]


def test_what_longer_contexts_do_under_each_scheme(saved):
    """Of 4 pairs, two never finished a rotation within 64 tokens; ntk slows the last by s exactly, those before by less."""
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64, **FEW)
    [rotation] = checkpoint.rotations(saved(config)[1])[0]
    theta = [10_000 ** (-2 * k / 8) for k in range(4)]
    assert [64 * t >= 2 * math.pi for t in theta] == [True, True, False, False]
    found = {(each.scheme, each.factor): each for factor in (2, 4, 8) for each in rotation.stretched(factor)}
    for factor in (2, 4, 8):
        assert found["no scaling", factor].unseen == 0.5
        assert found["linear", factor].unseen == found["yarn", factor].unseen == 0
        assert found["ntk", factor].unseen == 0.25
        assert found["linear", factor].fastest == factor and found["ntk", factor].fastest == 1
        assert found["linear", factor].slowest == pytest.approx(2 * math.pi * factor / theta[3], rel=1e-12)
        assert found["yarn", factor].temperature == pytest.approx(0.1 * math.log(factor) + 1)


def test_learned_numbers_of_another_model_are_not_drawn(saved):
    _, config = saved(transformers.T5Config(**FEW))
    assert [drawing.name for drawing in checkpoint.drawings(config)] == ["buckets"]


def test_layers_with_windows_and_rotations_of_their_own(saved):
    path, config = saved(transformers.Gemma3TextConfig(sliding_window=512, num_hidden_layers=6, vocab_size=64))
    about = checkpoint.facts(path, config)
    assert about["layers"]["sliding_attention"]["window"] == 512
    kinds = {rotation["layers"]: rotation for rotation in about["rotations"]}
    full, near = kinds["full_attention"], kinds["sliding_attention"]
    assert full["base"] == 1_000_000 and near["base"] == 10_000
    assert near["turns"][0] == pytest.approx(512 / (2 * math.pi)) and near["longer"] == []
    assert "5 of sliding_attention over 512 tokens" in words(path, config)["layers"]


def test_a_checkpoint_in_the_terminal(command, saved):
    path, _ = saved(transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64, **FEW))
    code, out, _ = command("show", path)
    assert code == 0 and max(map(len, out.splitlines()[1:])) <= 80
    assert re.search(r"no scaling +50% +50% +50% ", out)
    code, out, err = command("show", path, "--length", 32)
    assert code == 2 and "--length" in err and str(path) in err


@pytest.mark.parametrize("kind", ["blt", "gptj"])
def test_a_config_of_which_nothing_is_understood_is_shown_all_the_same(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind}))
    config = checkpoint.read(str(path))
    about = checkpoint.facts(str(path), config, {"model_type": kind})
    assert about["kind"] == ["unknown"] and (about["unknown"] or about["notes"])
    assert checkpoint.drawings(config) == []


def test_a_rotation_that_no_layer_has_is_not_shown():
    """DeepSeek V4's class declares "main" for layers with a window alone; its default has none."""
    config = transformers.AutoConfig.for_model("deepseek_v4", num_hidden_layers=2, n_routed_experts=4)
    assert [rotation["layers"] for rotation in checkpoint.facts("here", config)["rotations"]] == ["compress"]


def turns_of(base, width, length, slower=1.0):
    return [length * base ** (-2 * k / width) / slower / (2 * math.pi) for k in range(width // 2)]


@pytest.mark.parametrize("name", ["Gemma 3 27B, full file", "Hy-MT2 7B", "Phi-3.5 mini"])
def test_frequencies_of_training_are_those_of_a_scheme_that_names_no_length_before_it(name):
    """Linear's divide, alpha's raise the base, and longrope's short factors hold up to its original length."""
    raw = RELEASED[name]
    about = checkpoint.facts(name, transformers.AutoConfig.for_model(**copy.deepcopy(raw)), raw)
    *_, rotation = sorted(about["rotations"], key=lambda rotation: rotation["layers"] == "full_attention")
    want = {
        "Gemma 3 27B, full file": lambda: turns_of(1e6, 128, 131_072, 8.0),
        "Hy-MT2 7B": lambda: turns_of(1e4 * 1000 ** (128 / 126), 128, 262_144),
        "Phi-3.5 mini": lambda: np.divide(turns_of(1e4, 96, 4096), raw["rope_scaling"]["short_factor"]),
    }[name]()
    assert rotation["turns"] == pytest.approx(list(want), rel=1e-6)
    assert any(row["unseen"] for row in rotation["longer"]) and rotation["turned"] < len(want)


def test_layers_with_a_window_turn_within_it():
    """gpt-oss: one rotation, windows of 128 in every second layer; the declared length is among the longer ones."""
    about = checkpoint.facts("here", transformers.AutoConfig.for_model(**copy.deepcopy(PUBLISHED["gpt-oss 20B"])))
    near, full = about["rotations"]
    assert near["turns"] == pytest.approx(turns_of(150_000, 64, 128)) and not near["longer"]
    assert full["turns"] == pytest.approx(turns_of(150_000, 64, 4096))
    assert {row["factor"] for row in full["longer"]} == {2, 4, 32}


def test_a_window_of_the_trained_length_bounds_every_offset():
    config = transformers.MistralConfig(max_position_embeddings=64, sliding_window=64, **FEW)
    [rotation] = checkpoint.facts("here", config)["rotations"]
    assert rotation["longer"] == [] and rotation["turns"][0] == pytest.approx(64 / (2 * math.pi))
    scaling = lg.scaling.YaRN(2.0, 64)  # slow pairs turn half as fast, so no angle is new within twice the length
    wider, whole = (Rotation("layers", RopeConfig(1e4, scaling), 8, 64, window) for window in (96, None))
    shares = [{row.scheme: row.unseen for row in rotation.stretched(8)}["its own yarn"] for rotation in (wider, whole)]
    assert shares == [0.0, 0.5]


def test_a_class_that_rotates_otherwise_in_longer_texts_has_no_share_of_new_angles():
    raw = RELEASED["Phi-3.5 MoE, whole lists"]
    about = checkpoint.facts("here", transformers.AutoConfig.for_model(**copy.deepcopy(raw)), raw)
    assert [rotation["longer"] for rotation in about["rotations"]] == [[]] and about["notes"]


def test_a_default_of_the_class_is_not_called_declared():
    raw = {"model_type": "llama", "num_hidden_layers": 2}
    about = checkpoint.facts("here", transformers.AutoConfig.for_model(**raw), raw)
    assert about["default_length"] and "declared" not in dict(checkpoint.words(about))["length"]
    about = checkpoint.facts("here", transformers.AutoConfig.for_model(**raw), raw | {"max_position_embeddings": 2048})
    assert not about["default_length"]


def test_a_scheme_that_a_rotation_cannot_have_is_left_out():
    """ntk-by-parts needs a base above 1, and a text in which a pair turns."""
    for keys in ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, {"max_position_embeddings": 1}):
        [rotation] = checkpoint.facts("here", transformers.LlamaConfig(**(keys | FEW)))["rotations"]
        assert "ntk-by-parts" not in {row["scheme"] for row in rotation["longer"]} >= {"no scaling", "linear"}


def test_a_factor_of_cos_and_sin_is_of_the_rotated_part_alone():
    """Phi-4 mini rotates three quarters of a head, gpt-oss all of it."""
    for raw, part in ((RELEASED["Phi-4 mini, whole lists"], True), (PUBLISHED["gpt-oss 20B"], False)):
        about = checkpoint.facts("here", transformers.AutoConfig.for_model(**copy.deepcopy(raw)), raw)
        assert {rotation["partial"] for rotation in about["rotations"]} == {part}
        assert ("rotated part" in dict(checkpoint.words(about))["temperature"]) is part


def test_a_vocabulary_of_layers_is_no_number_of_layers(tmp_path):
    raw = {"model_type": "gemma4_text", "vocab_size_per_layer_input": 262_144, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert checkpoint.read(str(tmp_path / "config.json")).vocab_size_per_layer_input == 262_144
