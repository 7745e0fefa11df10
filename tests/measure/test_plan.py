"""What is refused before any weights are read, in one line; and what a model needs."""

import shutil
from typing import get_args

import pytest
from transformers import T5Config, T5ForConditionalGeneration

from longitude.checkpoints.load import byte_tokenizer, config_of
from longitude.hf import set_positions
from longitude.measure import retrieval
from longitude.measure.config import PERPLEXITY, MeasureConfig, Task, with_trained
from longitude.measure.plan import outline_of, plan
from tests.measure.conftest import build, write
from tests.support import edit_config, refused


@pytest.fixture
def config():
    return MeasureConfig(lengths=(512,), tasks=("passkey",), depths=(0.5,), trials=1, device="cpu")


def test_a_base_that_only_the_models_class_knows_is_measured(checkpoints, config, tmp_path):
    """Published files are without it; `longitude check` reports it."""
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "model")
    edit_config(folder, rope_parameters=None)
    assert plan(config, (str(folder),)).subjects[0].label == "model"


def refusal(config, *models, words) -> str:
    """The one line that a plan is refused with, which has these words."""
    with refused(*words) as caught:
        plan(config, tuple(map(str, models)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": (48, 4096)}, ["text", "4097"]),
        ({"lengths": (48, 2**40), "tasks": ("passkey",)}, ["memory", "--chunk"]),
        ({"targets": 40, "methods": ("same-targets",)}, ["--targets", "32", "40", "--no-trained"]),
        ({"stride": 16, "methods": ("per-position",)}, ["--stride", "--methods", "sliding"]),
        ({"stride": 16, "methods": ("sliding",), "tasks": ("passkey",)}, ["--methods", "--tasks", "perplexity"]),
        ({"documents": 3, "tasks": ("passkey",)}, ["--documents", "perplexity", "passkey"]),
        ({"trials": 3}, ["--trials", "perplexity"]),
        ({"chat": False}, ["--no-chat", "perplexity"]),
        ({"depths": (0.3,), "tasks": ("common-words",)}, ["--depths", "passkey", "common-words"]),
    ],
)
def test_bad_options_are_one_line(checkpoints, text, changes, words):
    reads = {} if "perplexity" not in changes.get("tasks", ("perplexity",)) else {"text": str(text)}
    refusal(
        MeasureConfig(**{"lengths": (48, 64), "device": "cpu"} | reads | changes), checkpoints["llama"], words=words
    )


def test_bad_models_are_one_line(checkpoints, config, tmp_path, text):
    llama = str(checkpoints["llama"])
    assert plan(config, (f"{llama}/",)).subjects[0].model == llama  # a folder has one name
    refusal(config, words=["models", "none"])
    refusal(config, "/nowhere", words=["/nowhere"])
    refusal(config, llama, f"{llama}/", words=["models", f"{llama} {llama}"])
    bare = write(tmp_path, "llama", tokenizer=False)
    refusal(config, bare, words=["tokenizer"])
    shutil.copy(checkpoints["llama"] / "tokenizer.json", bare)
    weights = bare / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refusal(config, checkpoints["gpt_neox"], bare, words=["model.safetensors"])  # before the first is measured
    text = MeasureConfig(lengths=(48,), text=str(text), device="cpu")  # its highest byte is 195, of an umlaut
    narrow = write(tmp_path / "narrow", "llama", vocab_size=195)
    refusal(text, narrow, words=["tokenizer", "195"])
    small = T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=256)
    T5ForConditionalGeneration(small).save_pretrained(tmp_path / "t5")
    byte_tokenizer().save_pretrained(tmp_path / "t5")
    refusal(config, tmp_path / "t5", words=["t5", "causal"])


def test_a_stock_model_with_our_positions_is_measured_as_it_is(config, tmp_path):
    model = build("llama")
    set_positions(model, "alibi")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    [subject] = plan(config, (str(tmp_path),)).subjects
    assert subject.positions == "alibi" and subject.trained == 32
    outline = outline_of(str(tmp_path), config_of(tmp_path))
    names = {name: parameter.shape for name, parameter in outline.named_parameters()}
    assert names == {name: parameter.shape for name, parameter in model.named_parameters()}


def test_short_context_is_measured_too():
    found = [with_trained((48, 64), trained) for trained in ([32, None, 32], [64, 128], [])]
    assert found == [[32, 48, 64], [48, 64], [48, 64]]


def test_the_options_name_every_task():
    assert get_args(Task) == (PERPLEXITY, *retrieval.TASKS)
