"""What is refused before any weights are read, in one line; and what a model needs."""

import json
import shutil
from typing import get_args

import pytest
from transformers import GPT2Config, T5Config, T5ForConditionalGeneration

from longitude.checkpoints.load import byte_tokenizer, config_of
from longitude.hf import set_positions
from longitude.measure import plan as module, retrieval
from longitude.measure.config import PERPLEXITY, MeasureConfig, Task, with_trained
from longitude.measure.plan import costs, outline_of, plan
from longitude.models import LongitudeConfig
from longitude.runs.costs import H100
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


def refusal(config, *models, words) -> None:
    """The one line that a plan is refused with has these words."""
    with refused(*words) as caught:
        plan(config, tuple(map(str, models)))
    assert "\n" not in str(caught.value)


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
    options = {"lengths": (48, 64), "device": "cpu"} | changes
    options |= {"text": str(text)} if "perplexity" in changes.get("tasks", ("perplexity",)) else {}
    refusal(MeasureConfig(**options), checkpoints["llama"], words=words)


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


# ---- `longitude measure --plan`: a Llama 3 8B at 131,072 tokens, planned from its config.json ---------------------------
LLAMA3 = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096}
LLAMA3 |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA3 |= {"max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
MATRICES = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096


@pytest.fixture
def llama3(tmp_path, monkeypatch):
    """A folder with a config.json and nothing else, on a machine of 10^12 FLOP/s."""
    monkeypatch.setattr(module, "flops_per_second", lambda *_: 1e12)
    (tmp_path / "llama3").mkdir()
    (tmp_path / "llama3" / "config.json").write_text(json.dumps(LLAMA3))
    return str(tmp_path / "llama3")


@pytest.mark.slow
def test_8b_at_128k(llama3) -> None:
    options = {"lengths": (8192, 131072), "documents": 2, "methods": ("non-overlapping",)}
    short, long = costs(MeasureConfig(**options), (llama3,))
    for cost, length in ((short, 8192), (long, 131072)):
        window = 2 * MATRICES * length + 32 * 4 * 4096 * length * (length + 1) / 2
        assert cost.tokens == 2 * 131072
        assert cost.flops == pytest.approx(2 * 131072 / length * window, rel=1e-3)
        assert cost.seconds == pytest.approx(cost.flops / 1e12) and cost.h100_seconds == cost.flops / H100
    assert long.memory.weights == pytest.approx(16.06e9, rel=1e-3)
    assert long.memory.cache == 2 * 2 * 32 * 8 * 128 * 131072  # keys and values, two bytes each


SHAPE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


LEARNED = LongitudeConfig(**SHAPE, encoding={"name": "learned", "max_length": 16})


@pytest.mark.parametrize("other", [LEARNED, GPT2Config(**SHAPE, n_positions=16, bos_token_id=1, eos_token_id=2)])
def test_no_window_is_timed_beyond_a_table_of_positions(other, tmp_path) -> None:
    """Longer windows are not measured either."""
    other.save_pretrained(tmp_path)
    for cost in costs(MeasureConfig(lengths=(16, 64), documents=1), (str(tmp_path),)):
        assert cost.reason == "" and cost.seconds
