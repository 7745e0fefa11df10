"""Loading: what is wrong with a checkpoint is one line, and nothing is loaded in its place."""

import shutil

import pytest
import torch
from transformers import T5Config, ViTConfig

from longitude.check import check
from longitude.checkpoints.load import load, open_source, require_shards
from longitude.hf import set_positions
from tests.support import edit_config, refused


def test_a_model_of_images_is_refused(tmp_path):
    ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8).save_pretrained(tmp_path)
    with refused(what=str(tmp_path), got="vit"):
        open_source(str(tmp_path))


@pytest.fixture
def llama(checkpoints, tmp_path):
    """A copy to break."""
    return shutil.copytree(checkpoints["llama"], tmp_path / "llama")


def refusal(path, **options) -> str:
    with pytest.raises(ValueError) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2", "bloom", "ours"])
def test_it_loads_what_was_saved(checkpoints, name):
    loaded = load(checkpoints[name])
    assert not loaded.model.training and loaded.path == str(checkpoints[name]) and loaded.unused == ()
    assert loaded.model.dtype == torch.float32
    text = "äöü  a\n\t\U0001f600"
    assert loaded.tokenizer(text).input_ids == list(text.encode())
    assert loaded.tokenizer.decode(list(text.encode())) == text
    assert load(checkpoints[name], dtype="float64").model.dtype == torch.float64


@pytest.mark.parametrize(
    ("spoil", "message_part"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (lambda folder: T5Config().save_pretrained(folder), "expected a causal language model"),
        (lambda folder: edit_config(folder, model_type="lama"), "'lama'"),
        (lambda folder: edit_config(folder, model_type="mine", auto_map={"AutoConfig": "code.Config"}), "my.py:build"),
        (lambda folder: (folder / "model.safetensors").unlink(), "weights as safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer cannot be loaded"),
    ],
)
def test_broken_files(spoil, message_part, llama):
    spoil(llama)
    assert message_part in refusal(llama)


def test_weights_that_are_not_whole(llama):
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    for part in (whole[:-100], whole[:50], b""):
        file.write_bytes(part)
        assert "download them again" in refusal(llama)
        with refused("safetensors", "header"):
            require_shards(llama)
    file.write_bytes(whole)
    require_shards(llama)


def test_weights_that_are_not_the_models(llama):
    edit_config(llama, num_hidden_layers=3)
    assert "lack 9 of the model's tensors" in refusal(llama) and "model.layers.2" in refusal(llama)
    edit_config(llama, num_hidden_layers=1)
    assert len(load(llama).unused) == 9
    edit_config(llama, num_hidden_layers=2, intermediate_size=32)
    assert "[16, 24] in the weights and [16, 32] by config.json" in refusal(llama)


@pytest.mark.parametrize(
    ("rope", "message_part"),
    [
        ({"rope_type": "yarm", "factor": 4.0}, "did you mean 'yarn'"),
        ({"rope_type": "yarn", "factor": "4"}, "factor to be a finite number of 1 or more, got '4'"),
        ({"rope_type": "default", "rope_theta": "10000"}, "rope_theta to be a finite number above 0, got '10000'"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}, "short_factor of 4 numbers"),
    ],
)
def test_the_config_is_to_blame_and_not_the_weights(llama, rope, message_part, capfd):
    edit_config(llama, rope_parameters={"rope_theta": 1e4} | rope)
    message = refusal(llama)
    assert "config.json: " in message and message_part in message and "weights" not in message
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_encodings_in_the_place_of_a_rotation(llama):
    model = load(llama).model
    set_positions(model, "kerple_log")
    model.save_pretrained(llama)
    loaded = load(llama)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    assert loaded.unused == ()
    assert not [result for result in check(loaded).values() if result.status == "failed"]


def test_devices_dtypes_and_files(checkpoints):
    assert "is a file" in refusal(checkpoints["llama"] / "config.json")
    with pytest.raises(ValueError, match="is a file"):
        open_source(str(checkpoints["llama"] / "config.json"))
    assert "did you mean 'bfloat16'" in refusal(checkpoints["llama"], dtype="bfloat")
    assert "device nowhere" in refusal(checkpoints["llama"], device="nowhere")
