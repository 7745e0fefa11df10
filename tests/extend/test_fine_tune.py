"""Fine-tuning: what is trained on, what is written, and the same on one process and on two."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerState

from longitude.checkpoints.load import load
from longitude.extend.fine_tune import RANK, Windows, _stream, fine_tune
from longitude.extend.units import work_of
from longitude.positions.samplers import sampler
from tests.extend.conftest import LENGTH, files, loaded, saved, weights

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": LENGTH}


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A random Llama, extended from 64 to 256."""
    folder = tmp_path_factory.mktemp("extended") / "model"
    return saved("llama", folder, rope_parameters=YARN, max_position_embeddings=4 * LENGTH)


@pytest.fixture
def tune(extended, checkpoint, text, tmp_path):
    """tune(folder or kind, text, **options) -> (what it returns, the folder that it wrote)."""

    def call(source=extended, text=text, **options):
        source = checkpoint(source) if isinstance(source, str) else source
        options = {"steps": 3, "batch": 2, "length": LENGTH, "learning_rate": 1e-3, "out": tmp_path / "out"} | options
        return fine_tune(source, text, **options), options["out"]

    return call


# ---- windows ---------------------------------------------------------------------------------------------------------
def windows(name: str = "contiguous", count: int = 40, seed: int = 0, **options: int) -> Windows:
    return Windows(torch.arange(10 * LENGTH + 5), LENGTH, count, seed, sampler(name, **options))


def test_every_window_comes_once_before_one_comes_again() -> None:
    items = [windows()[i] for i in range(25)]
    firsts = [int(item["input_ids"][0]) // LENGTH for item in items]
    assert sorted(firsts[:10]) == sorted(firsts[10:20]) == list(range(10))
    assert firsts[:10] != firsts[10:20] != sorted(firsts[:10])
    for item in items:
        assert item.keys() == {"input_ids", "labels"}
        assert item["labels"][0] == -100 and torch.equal(item["labels"][1:], item["input_ids"][1:])


@pytest.mark.parametrize("name", ["skipped", "randomized"])
def test_positions_come_from_the_whole_range(name) -> None:
    """Rising, new in each window, decided by the seed and the window's number alone."""
    rows, again, other = (windows(name, seed=seed, max_length=256) for seed in (0, 0, 1))
    seen = torch.stack([rows[i]["position_ids"] for i in range(40)])
    assert (seen.diff() >= 1).all() and seen.min() >= 0 and 200 < seen.max() < 256
    assert len({tuple(row.tolist()) for row in seen}) == 40
    assert torch.equal(again[7]["position_ids"], seen[7]) and not torch.equal(other[7]["position_ids"], seen[7])


def test_a_gap_between_positions_is_no_border(extended) -> None:
    """Without a mask, transformers cuts attention where positions skip: the first token would not matter past the gap."""
    model = loaded(extended)
    batch = {
        name: value[None] % 250 for name, value in windows("skipped", max_length=256)[0].items() if name != "labels"
    }
    assert (batch["position_ids"].diff() > 1).any()

    def effect_of_the_first_token(batch: dict[str, Tensor]) -> float:
        ids = batch["input_ids"].clone()
        ids[0, 0] += 1
        with torch.no_grad():
            before, after = (model(**batch | {"input_ids": x}, use_cache=False) for x in (batch["input_ids"], ids))
        return float((before.logits[0, -1] - after.logits[0, -1]).abs().max())

    assert effect_of_the_first_token(batch) > 1e-4
    del batch["attention_mask"]
    assert effect_of_the_first_token(batch) < 1e-6, "the mask could go: transformers learned to read gaps"


# ---- training --------------------------------------------------------------------------------------------------------
def test_it_learns_and_writes_weights_next_to_the_same_files(tune, extended) -> None:
    before, calls = files(extended), []
    tuned, out = tune(steps=12, on_progress=lambda *values: calls.append(values))
    assert tuned.losses[-1] < 0.9 * tuned.losses[0] and tuned.tokens == 12 * 2 * LENGTH
    assert calls == [(f"training, perplexity {math.exp(x):.4g}", i, 12) for i, x in enumerate(tuned.losses, 1)]
    after, old, new = files(out), weights(extended), weights(out)
    assert files(extended) == before and after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}
    kinds, wanted = ({name: (x.shape, x.dtype) for name, x in values.items()} for values in (new, old))
    assert kinds == wanted and all((old[name] != new[name]).any() for name in old)
    assert tuned.parameters == sum(values.numel() for values in old.values())
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_loss_is_that_of_plain_transformers(gradient_checkpointing, tune, extended, text) -> None:
    """The first step's, by hand: mean over the tokens that are predicted."""
    tuned, _ = tune(steps=1, positions="skipped", seed=4, gradient_checkpointing=gradient_checkpointing)
    checkpoint = load(extended)
    rows = Windows(_stream(checkpoint.tokenizer, text, LENGTH), LENGTH, 2, 4, sampler("skipped", max_length=256))
    batch = {name: torch.stack([rows[i][name] for i in range(2)]) for name in rows[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        logits_of_model = checkpoint.model(**batch).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits_of_model, labels[:, 1:].flatten())
    assert tuned.losses == pytest.approx([float(loss)], rel=1e-5)


def test_the_dtype_stays(save, tune) -> None:
    source = save()
    AutoModelForCausalLM.from_pretrained(source).to(torch.bfloat16).save_pretrained(source)
    _, out = tune(source, steps=1, learning_rate=1e-2)
    old, new = weights(source), weights(out)
    assert {weight.dtype for weight in new.values()} == {torch.bfloat16}
    assert any((old[name] != new[name]).any() for name in old)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_of_text_and_images_learns_text_alone(lora, tune, checkpoint) -> None:
    _, out = tune("qwen2_5_vl", steps=1, lora=lora)
    old, new = weights(checkpoint("qwen2_5_vl")), weights(out)
    changed = {name for name in old if (old[name] != new[name]).any()}
    assert changed and old.keys() == new.keys() and not any("visual" in name for name in changed)


@pytest.mark.slow
def test_lora_is_merged_into_the_weights(tune, extended) -> None:
    tuned, out = tune(lora=True, steps=12, learning_rate=1e-2)
    old, new = weights(extended), weights(out)
    assert old.keys() == new.keys(), "plain transformers loads it"
    changed = {name for name in old if (old[name] != new[name]).any()}
    linear = {name for name in old if name.endswith("_proj.weight")}
    assert changed == linear and len(linear) == 2 * 7
    for name in linear:
        assert torch.linalg.matrix_rank((new[name] - old[name]).double(), rtol=1e-4) <= RANK
    assert tuned.parameters == sum(RANK * sum(old[name].shape) for name in linear)
    assert tuned.losses[-1] < tuned.losses[0]


# ---- what a kill leaves ----------------------------------------------------------------------------------------------
class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_training_continues(tune, tmp_path, monkeypatch) -> None:
    """In the middle of its third save: the second is whole, and with it the training ends as one that nothing stopped."""
    monkeypatch.setattr(sys.modules[fine_tune.__module__], "FEWEST", 1)
    options = {"steps": 4, "positions": "skipped"}
    want, whole = tune(out=tmp_path / "whole", **options)
    save = TrainerState.save_to_json

    def interrupted(self, path):
        if self.global_step == 3:
            raise Interrupted
        save(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(TrainerState, "save_to_json", interrupted)
        with pytest.raises(Interrupted):
            tune(**options)
    assert not (tmp_path / "out").exists()
    steps = []
    tuned, out = tune(**options, on_progress=lambda what, done, total: steps.append(done))
    assert steps == [3, 4], "steps that were saved are not trained again"
    assert tuned.losses == pytest.approx(want.losses, rel=1e-6) and len(tuned.losses) == 4
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(out)[name], tensor, rtol=1e-6, atol=1e-7)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_training_saves_through_no_link(tune, tmp_path, monkeypatch) -> None:
    """What another user put in the place of a saved state is neither read nor written nor deleted."""
    monkeypatch.setattr(sys.modules[fine_tune.__module__], "FEWEST", 1)
    monkeypatch.setattr(TrainerState, "save_to_json", lambda *_: (_ for _ in ()).throw(Interrupted))
    with pytest.raises(Interrupted):
        tune(steps=2)
    [state] = work_of(tmp_path / "out").glob("training-*")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "trainer_state.json").write_text("{}")
    (state / "checkpoint-9").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="checkpoint-9"):
        tune(steps=2)
    assert files(elsewhere) == {"trainer_state.json": b"{}"}


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 257}, "windows of 2 to 256 tokens, got 257"),
        ({"text": "short.txt"}, r"short\.txt: expected at least one window of 64 tokens, got 10"),
        ({"source": "bloom", "positions": "skipped"}, "a bloom model takes no positions"),
        ({"out": Path("text")}, "text exists already, and nothing is written over"),
        ({"lora": True}, r"pip install 'longitude\[peft\]'"),
    ],
)
def test_wrong_use(options, message, tune, text, tmp_path, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find(name, *more))
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        tune(**options)
    assert sorted(tmp_path.iterdir()) == before


def test_a_loss_that_is_no_number(save, tune, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save())
    torch.nn.init.constant_(model.lm_head.weight, 3e38)  # finite, and its products are not
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="the loss of step 1 is nan, and nothing is written"):
        tune(tmp_path / "model")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
