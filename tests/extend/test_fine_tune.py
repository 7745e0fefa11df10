"""Fine-tuning of extended checkpoints: what is trained on, what is written, and the same on one process and on two."""

import importlib.util
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from longitude.checkpoints.load import load
from longitude.extend.fine_tune import RANK, Windows, _require_memory, _stream, fine_tune
from longitude.positions.samplers import sampler

LENGTH = 64
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": LENGTH}


@pytest.fixture(scope="module")
def extended(save, tmp_path_factory) -> Path:
    """A random Llama, extended from 64 to 256."""
    folder = tmp_path_factory.mktemp("extended") / "model"
    return save("llama", folder, rope_parameters=YARN, max_position_embeddings=4 * LENGTH)


@pytest.fixture
def tune(extended, text, tmp_path):
    """tune(**options) -> (what it returns, the folder that it wrote)."""

    def call(**options):
        options = {"steps": 3, "batch": 2, "length": LENGTH, "learning_rate": 1e-3, "out": tmp_path / "out"} | options
        return fine_tune(extended, text, **options), options["out"]

    return call


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stream(count: int = 10) -> Tensor:
    return torch.arange(count * LENGTH + 5)


# ---- windows ---------------------------------------------------------------------------------------------------------
def test_every_window_comes_once_before_one_comes_again() -> None:
    windows = Windows(stream(), LENGTH, 25, 0, sampler("contiguous"))
    firsts = [int(windows[i]["input_ids"][0]) // LENGTH for i in range(25)]
    assert sorted(firsts[:10]) == sorted(firsts[10:20]) == list(range(10))
    assert firsts[:10] != firsts[10:20] != sorted(firsts[:10])
    assert set(windows[0]) == {"input_ids", "labels"}


def test_labels_are_the_tokens_but_the_first_which_nothing_predicts() -> None:
    item = Windows(stream(), LENGTH, 3, 0, sampler("contiguous"))[1]
    assert item["labels"][0] == -100 and torch.equal(item["labels"][1:], item["input_ids"][1:])


@pytest.mark.parametrize("name", ["skipped", "randomized"])
def test_positions_come_from_the_whole_range(name) -> None:
    """Rising, new in each window, decided by the seed and the window's number alone."""
    windows, again, other = (Windows(stream(), LENGTH, 40, seed, sampler(name, max_length=256)) for seed in (0, 0, 1))
    seen = torch.stack([windows[i]["position_ids"] for i in range(40)])
    assert (seen.diff() >= 1).all() and seen.min() >= 0 and 200 < seen.max() < 256
    assert len({tuple(row.tolist()) for row in seen}) == 40
    assert torch.equal(again[7]["position_ids"], seen[7]) and not torch.equal(other[7]["position_ids"], seen[7])


def test_a_gap_between_positions_is_no_border(extended) -> None:
    """Without a mask, transformers cuts attention where positions skip: the first token would not matter past the gap."""
    model = AutoModelForCausalLM.from_pretrained(extended).eval()
    windows = Windows(torch.arange(10 * LENGTH) % 250, LENGTH, 1, 0, sampler("skipped", max_length=256))
    batch = {name: value[None] for name, value in windows[0].items() if name != "labels"}
    assert (batch["position_ids"].diff() > 1).any()

    def last(**batch: Tensor) -> Tensor:
        with torch.no_grad():
            return model(**batch, use_cache=False).logits[0, -1]

    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 0] += 1
    assert (last(**batch) - last(**changed)).abs().max() > 1e-4
    bare, bare_changed = ({k: v for k, v in each.items() if k != "attention_mask"} for each in (batch, changed))
    moved = (last(**bare) - last(**bare_changed)).abs().max()
    assert moved < 1e-6, "the mask could go: transformers learned to read gaps"


# ---- training --------------------------------------------------------------------------------------------------------
def test_it_learns_and_writes_weights_beside_the_same_files(tune, extended) -> None:
    before = files(extended)
    tuned, out = tune(steps=12)
    assert tuned.losses[-1] < 0.9 * tuned.losses[0] and len(tuned.losses) == 12
    assert tuned.tokens == 12 * 2 * LENGTH
    assert files(extended) == before
    after = files(out)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}
    old, new = load_file(extended / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: (each.shape, each.dtype) for name, each in old.items()} == {
        name: (each.shape, each.dtype) for name, each in new.items()
    }
    assert all((old[name] != new[name]).any() for name in old)
    assert tuned.parameters == sum(each.numel() for each in old.values())
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_the_loss_is_that_of_plain_transformers(tune, extended, text) -> None:
    """The first step's, by hand: mean over the tokens that are predicted."""
    tuned, _ = tune(steps=1, positions="skipped", seed=4)
    checkpoint = load(extended)
    tokens = _stream(checkpoint.tokenizer, text, LENGTH)
    windows = Windows(tokens, LENGTH, 2, 4, sampler("skipped", max_length=256))
    batch = {name: torch.stack([windows[i][name] for i in range(2)]) for name in windows[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        found = checkpoint.model(**batch).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(found, labels[:, 1:].flatten())
    assert tuned.losses == pytest.approx([float(loss)], rel=1e-5)


@pytest.mark.slow
def test_the_seed_decides(tune, tmp_path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tune(seed=seed, positions="randomized", out=tmp_path / name)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_progress_is_called_at_every_step(tune) -> None:
    calls = []
    training, _ = tune(on_progress=lambda *each: calls.append(each))
    perplexities = [f"training, perplexity {math.exp(loss):.4g}" for loss in training.losses]
    assert calls == [(what, i + 1, 3) for i, what in enumerate(perplexities)]


@pytest.mark.slow
def test_windows_are_as_long_as_the_configuration_says(tune, tmp_path) -> None:
    assert tune(length=None, steps=1, out=tmp_path / "a")[0].tokens == 2 * 4 * LENGTH
    assert tune(length=None, steps=1, positions="skipped", out=tmp_path / "b")[0].tokens == 2 * LENGTH


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(tune, tmp_path) -> None:
    plain, _ = tune(out=tmp_path / "a")
    saving, _ = tune(out=tmp_path / "b", gradient_checkpointing=True)
    assert saving.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.slow
def test_the_dtype_stays(save, text, tmp_path) -> None:
    source = save("llama", tmp_path / "source")
    AutoModelForCausalLM.from_pretrained(source).to(torch.bfloat16).save_pretrained(source)
    fine_tune(source, text, steps=1, length=LENGTH, learning_rate=1e-2, out=tmp_path / "out")
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {each.dtype for each in new.values()} == {torch.bfloat16}
    assert any((old[name] != new[name]).any() for name in old)


def test_lora_is_merged_into_the_weights(tune, extended) -> None:
    tuned, out = tune(lora=True, steps=12, learning_rate=1e-2)
    old, new = load_file(extended / "model.safetensors"), load_file(out / "model.safetensors")
    assert old.keys() == new.keys(), "plain transformers loads it"
    changed = {name for name in old if (old[name] != new[name]).any()}
    linear = {name for name in old if name.endswith("_proj.weight")}
    assert changed == linear and len(linear) == 2 * 7
    for name in linear:
        assert torch.linalg.matrix_rank((new[name] - old[name]).double(), rtol=1e-4) <= RANK
    assert tuned.parameters == sum(RANK * sum(old[name].shape) for name in linear)
    assert tuned.losses[-1] < tuned.losses[0]


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_lora_without_peft(tune, monkeypatch, tmp_path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find(name, *more))
    with pytest.raises(ValueError, match=r"pip install 'longitude\[peft\]'"):
        tune(lora=True)
    assert not (tmp_path / "out").exists()


def test_wrong_use_is_told(tune, save, text, tmp_path) -> None:
    with pytest.raises(ValueError, match="expected steps to be an int of 1 or more, got 0"):
        tune(steps=0)
    with pytest.raises(ValueError, match="windows of 2 to 256 tokens, got 257"):
        tune(length=257)
    with pytest.raises(ValueError, match="unknown sampler 'skiped': did you mean 'skipped'"):
        tune(positions="skiped")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ValueError, match=r"short\.txt: expected at least one window of 64 tokens, got 10"):
        fine_tune(save("llama", tmp_path / "a"), short, steps=1, out=tmp_path / "out")
    bloom = save("bloom", tmp_path / "b")
    with pytest.raises(ValueError, match="a bloom model takes no positions"):
        fine_tune(bloom, text, steps=1, positions="skipped", out=tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out exists already, and nothing is written over"):
        tune()


def test_a_loss_that_is_no_number_stops_it(save, text, tmp_path) -> None:
    source = save("llama", tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    model.save_pretrained(source)
    with pytest.raises(ValueError, match="the loss of step 1 is nan, and nothing is written"):
        fine_tune(source, text, steps=2, length=LENGTH, out=tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_more_memory_than_there_is(extended) -> None:
    checkpoint = load(extended, tokenizer=False)
    with pytest.raises(ValueError, match=r"takes about .* GiB, .* --positions skipped"):
        _require_memory(checkpoint.model, checkpoint.config, 10**7, 256, False)


# ---- processes -------------------------------------------------------------------------------------------------------
TUNING = """
    import json, sys
    from pathlib import Path
    from longitude.extend.fine_tune import fine_tune
    from longitude.runs.files import is_first_process

    source, text, out, batch = sys.argv[1:]
    options = {"steps": 3, "length": 64, "learning_rate": 1e-3, "positions": "skipped"}
    tuned = fine_tune(Path(source), text, batch=int(batch), out=Path(out), **options)
    assert (Path(out) / "config.json").exists()
    if is_first_process():
        print(json.dumps(tuned.losses))
"""


@pytest.mark.slow
def test_accelerate_launch_on_two_processes_is_one_of_double_batch(extended, text, tmp_path) -> None:
    """accelerate starts several processes under the option for GPUs alone; without one they compute on processors."""
    script = tmp_path / "tune.py"
    script.write_text(textwrap.dedent(TUNING))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", "0"]
    ways = {"two": (["--multi_gpu", "--num_processes", "2"], 2), "one": (["--cpu", "--num_processes", "1"], 4)}
    losses = {}
    for name, (options, batch) in ways.items():
        given = [str(script), str(extended), str(text), str(tmp_path / name), str(batch)]
        done = subprocess.run([*launch, *options, *given], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        losses[name] = json.loads(done.stdout)
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, weights in one.items():
        torch.testing.assert_close(two[name], weights, rtol=0, atol=1e-5)
