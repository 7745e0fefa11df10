"""One trial: trained on the given order, measured, and the same however often it is killed on the way."""

import json
import math
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import longitude.models  # noqa: F401  the Auto classes know the model
from longitude.measure import losses_by_length, read_rows
from longitude.measure.rows import from_frame
from longitude.study import train
from longitude.study.data import WINDOWS, Windows
from longitude.study.plan import checked
from longitude.study.resume import LossLog, newest, seal
from longitude.study.tasks.base import of_task, sampler_of
from longitude.study.train import build_model
from tests.study.conftest import COPY, FEW_WORDS, SHAPE, TINY, OneTrial, dying

TINY = replace(TINY, steps=20, batch_size=4)  # saves at steps 5, 10, 15, 20


class Killed(BaseException):
    """What nothing catches, as nothing catches kill -9."""


@pytest.fixture(scope="module")
def unkilled(data, tmp_path_factory) -> OneTrial:
    trial = OneTrial(tmp_path_factory.mktemp("unkilled"), "rope", 1, TINY, data)
    assert trial.run().status == "done"
    return trial


def assert_same(one: OneTrial, other: OneTrial) -> None:
    assert not list((one.path / "units").glob(".*"))  # nothing unfinished is left
    for name in ("losses.jsonl", "model.safetensors", "config.json"):
        assert (one.trained / name).read_bytes() == (other.trained / name).read_bytes(), name
    assert (one.measured / "documents.parquet").read_bytes() == (other.measured / "documents.parquet").read_bytes()
    rows, others = (from_frame(read_rows(trial.measured / "results.parquet")) for trial in (one, other))
    assert [replace(row, train_seconds=None) for row in rows] == [replace(row, train_seconds=None) for row in others]
    assert one.status.selection == other.status.selection is not None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("positions", ["mixed", "randomized", "contiguous"])
def test_logged_losses_are_mean_nats_of_the_ordered_windows(positions, data, tmp_path):
    config = checked(replace(TINY, encodings=("rope",), steps=1, positions=positions))
    trial = OneTrial(tmp_path, "rope", 1, config, data)
    trial.run()
    windows = Windows(data.training, 16, 4, 1, sampler_of(config))
    batch = {name: torch.stack([windows[i][name] for i in range(4)]) for name in windows[0]}
    targets, model = batch.pop("shift_labels").flatten(), build_model(config, "rope", 1)
    first = json.loads((trial.trained / "losses.jsonl").read_text())["loss"]
    assert first == pytest.approx(F.cross_entropy(model(**batch).logits.flatten(0, 1), targets).item(), rel=1e-5)
    if positions != "contiguous":
        del batch["position_ids"]
        assert abs(first - F.cross_entropy(model(**batch).logits.flatten(0, 1), targets).item()) > 1e-4


def test_rows_are_those_of_the_saved_checkpoint(unkilled, data):
    model = AutoModelForCausalLM.from_pretrained(unkilled.trained)
    again = losses_by_length(model, data.validation, lengths=[16, 32, 48], token_bytes=1, span=48)
    rows = read_rows(unkilled.measured / "results.parquet")
    values = dict(zip(rows["length"][rows["method"] == "non-overlapping"], rows["value"]))
    found = {each.window: each.row().value for each in again if each.method == "non-overlapping"}
    assert found == pytest.approx(values, rel=1e-6)  # weights mapped from a file: products round another way
    assert set(rows["label"]) == {"rope"} and set(rows["seed"]) == {1} and set(rows["train_length"]) == {16}
    documents = pd.read_parquet(unkilled.measured / "documents.parquet")
    assert list(documents.columns) == "label seed method length document nats tokens bytes".split()
    sums = documents[documents["length"] == 48][["nats", "bytes"]].sum()
    assert sums["nats"] / sums["bytes"] / math.log(2) == pytest.approx(values[48], rel=1e-12)


def test_initial_weights_follow_the_seed_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    one, again, other = (build_model(TINY, "rope", seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


# ---- killed ------------------------------------------------------------------------------------------------------------
def die() -> None:
    raise Killed


def killed(patched, trial: OneTrial) -> None:
    """Run a trial until it is killed before its first save. tests/study/test_faults.py has other moments."""
    with patched.context() as patches:
        patches.setattr(LossLog, "append", dying(LossLog.append, 4, die))
        with pytest.raises(Killed):
            trial.run()
    assert trial.status.status in ("not run", "running", "trained")


TEXT, WORDS = replace(TINY, steps=8, encodings=("rope",)), replace(COPY, encodings=("rope",))
SUMS = FEW_WORDS | {"train_length": 2, "test_lengths": (2, 20)}
PLACES = of_task("addition-reversed", encodings=("abacus:max_start=16",), **SUMS, **SHAPE)
KINDS = [*product((TEXT, WORDS), ("contiguous", "randomized", "skipped")), (TEXT, "mixed"), (PLACES, "contiguous")]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("config", "positions"), KINDS)
def test_a_killed_trial_of_every_kind(config, positions, data, tmp_path, monkeypatch):
    """What training draws, such as random starts of places, comes from a generator that checkpoints hold."""
    config = checked(replace(config, positions=positions))
    whole, trial = (OneTrial(tmp_path / name, config.encodings[0], 1, config, data) for name in ("whole", "killed"))
    notes = []
    whole.run()
    killed(monkeypatch, trial)
    status = trial.run(notes.append)
    assert (status.status, status.reason, notes) == ("done", None, [f"{trial.title}: continues from step 2"])
    assert_same(whole, trial)
    assert {*read_rows(trial.measured / "results.parquet")["length"]} == {*config.test_lengths}


@pytest.mark.slow
def test_a_long_training_saves_by_time(unkilled, data, tmp_path, monkeypatch):
    trial, notes = OneTrial(tmp_path, "rope", 1, TINY, data), []
    monkeypatch.setattr(train, "SECONDS", 0)
    killed(monkeypatch, trial)  # of those by steps
    assert trial.run(notes.append).status == "done" and notes == [f"{trial.title}: continues from step 3"]
    assert_same(trial, unkilled)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "complete.json"])
def test_a_checkpoint_is_as_it_was_saved_or_refused(file, tmp_path):
    """The loaders of torch and safetensors take a changed byte: most are another number."""
    for step in (5, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"weight": torch.arange(100.0)}, folder / "model.safetensors")
        torch.save({"moments": torch.arange(100.0)}, folder / "optimizer.pt")
        seal(folder)
    (tmp_path / "checkpoint-²").mkdir()  # a digit, but no number
    assert newest(tmp_path, logged=20) == (tmp_path / "checkpoint-10", [])
    damaged = bytearray((tmp_path / "checkpoint-10" / file).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "checkpoint-10" / file).write_bytes(damaged)
    found, [message] = newest(tmp_path, logged=20)
    assert found == tmp_path / "checkpoint-5" and "checkpoint-10" in message
    assert newest(tmp_path, logged=4)[0] is None and not found.exists()  # its losses are not all there


# ---- what is not a number, and what does not exist -----------------------------------------------------------------------
def test_a_loss_that_is_not_finite_ends_the_trial_as_diverged(data, tmp_path, monkeypatch):
    plain, count = train.Steps.keep_loss, iter(range(100))

    def poisoned(self, *arguments):
        plain(self, *arguments)
        self.loss *= math.nan if next(count) == 6 else 1

    monkeypatch.setattr(train.Steps, "keep_loss", poisoned)
    trial = OneTrial(tmp_path, "rope", 1, TINY, data)
    status = trial.run()
    assert (status.status, status.step, status.reason) == ("diverged", 7, "the loss was not finite at step 7")
    assert trial.status == status
    assert len((trial.trained / "losses.jsonl").read_text().splitlines()) == 6
    assert not (trial.measured / "results.parquet").exists()


def test_lengths_beyond_a_table_are_missing_and_named(data, tmp_path):
    config = replace(TINY, steps=2)
    trial = OneTrial(tmp_path, "learned", 0, config, data)
    status = trial.run()
    assert status.status == "done" and "no positions from 16 on" in status.reason
    assert set(read_rows(trial.measured / "results.parquet")["length"]) == {16}
    documents = pd.read_parquet(trial.measured / "documents.parquet").query("method == 'non-overlapping'")
    assert set(documents["tokens"]) == {WINDOWS * 48}  # the targets of all other trials


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("label", "used"), [("hierarchical:window=16", False), ("rope+window:size=64", True)])
def test_what_training_never_used_is_named(label, used, data, tmp_path):
    """And of a far part with parameters of its own, that they had no gradient."""
    config = replace(TINY, steps=4)
    trial = OneTrial(tmp_path, label, 0, config, data)
    status = trial.run()
    assert status.status == "done" and (status.untrained is None) == used
    if status.untrained is not None:
        words = "never used its far part, which begins beyond 16 positions, in training at 16"
        assert status.untrained.startswith(words)
        assert "had no gradient in training for model.layers.0.mixer.gate_" in status.untrained
