"""What is refused before any weights are read, in one line; and what a model needs."""

import json
import shutil
from typing import get_args

import pytest
from transformers import T5Config, T5ForConditionalGeneration

from longitude.checkpoints.load import byte_tokenizer, config_of
from longitude.hf import set_positions
from longitude.measure import retrieval
from longitude.measure.config import PERPLEXITY, MeasureConfig, Task, with_trained
from longitude.measure.plan import outline_of, plan

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture
def config():
    return MeasureConfig(lengths=(512,), tasks=("passkey",), depths=(0.5,), trials=1, device="cpu")


def test_a_base_that_only_the_models_class_knows_is_measured(checkpoints, config, tmp_path):
    """Published files are without it; `longitude check` tells."""
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "model")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if k != "rope_parameters"}))
    assert plan(config, (str(folder),)).subjects[0].label == "model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": ROPE | {"rope_type": "zork"}}, "unknown rope_type 'zork'"),
        ({"rope_parameters": ROPE | {"rope_theta": "x"}}, "expected base above 0, got 'x'"),
        (
            {"rope_parameters": ROPE, "rope_theta": 5e4},
            "rope_theta is 50000.0 at the top and 10000.0 in rope_parameters",
        ),
        ({"rope_parameters": ROPE, "rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json: .*rope_"),
        ({"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 0.5}}, "a factor of 1 or more, got 0.5"),
        ({"hidden_act": "zork"}, "its model cannot be built from config.json .KeyError: 'zork'.; correct it"),
    ],
)
def test_a_config_that_is_wrong_or_contradicts_itself_is_one_line(checkpoints, config, tmp_path, changes, message):
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "model")
    assert plan(config, (str(folder),)).subjects[0].label == "model"
    said = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=message) as caught:
        plan(config, (str(folder),))
    assert str(caught.value).startswith(f"{folder}: ") and "\n" not in str(caught.value)


def test_a_model_that_is_not_causal_is_one_line(config, tmp_path):
    small = T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=256)
    T5ForConditionalGeneration(small).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a t5 model is no causal language model") as caught:
        plan(config, (str(tmp_path),))
    assert len(str(caught.value)) < 300


def test_a_folder_has_one_name(checkpoints, config):
    llama = str(checkpoints["llama"])
    with pytest.raises(ValueError, match="each once"):
        plan(config, (llama, f"{llama}/"))
    assert plan(config, (f"{llama}/",)).subjects[0].model == llama


def test_a_stock_model_with_our_positions_is_measured_as_it_is(stock, config, tmp_path):
    model = stock("llama")
    set_positions(model, "alibi")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    [subject] = plan(config, (str(tmp_path),)).subjects
    assert subject.positions == "alibi" and subject.trained == 32
    outline = outline_of(str(tmp_path), config_of(tmp_path))
    names = {name: parameter.shape for name, parameter in outline.named_parameters()}
    assert names == {name: parameter.shape for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("lengths", "trained", "all_of_them"),
    [((48, 64), [32, None, 32], [32, 48, 64]), ((48, 64), [64, 128], [48, 64]), ((48, 64), [], [48, 64])],
)
def test_short_context_is_asked_too(lengths, trained, all_of_them):
    assert with_trained(lengths, trained) == all_of_them


def test_the_options_name_every_task():
    assert get_args(Task) == (PERPLEXITY, *retrieval.TASKS)
