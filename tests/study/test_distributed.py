"""One model trained by several processes: each step is that of one process."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from longitude.measure import read_rows
from longitude.study import train
from longitude.study.data import Windows
from longitude.study.execution import Execution
from longitude.study.executors import InProcess
from longitude.study.resume import LossLog
from longitude.study.train import Steps, build_model
from longitude.study.trial import Trial
from tests.study.conftest import TINY


@pytest.fixture
def two_processes(monkeypatch):
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_what_a_launcher_cannot_start_is_refused(two_processes, monkeypatch):
    assert Execution().of(TINY, 4) == Execution(workers=1).of(TINY, 4) == InProcess()
    with pytest.raises(ValueError, match="--workers 2 trains models side by side, and under torchrun"):
        Execution(workers=2).of(TINY, 4)
    with pytest.raises(ValueError, match="--executor ray trains models side by side, and under torchrun"):
        Execution(executor="ray").of(TINY, 4)
    with pytest.raises(ValueError, match=r"--batch-size 5 .* expected a multiple of their number 2"):
        Execution().of(replace(TINY, batch_size=5), 4)
    with pytest.raises(ValueError, match="--device mps: torch trains in one process there"):
        Execution().of(replace(TINY, device="mps"), 4)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="--use_fsdp: a study trains by DDP"):
        Execution().of(TINY, 4)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_step_of_all_processes_has_the_windows_of_one(processes, data):
    """accelerate deals batches of the smaller size in turn."""
    windows = Windows(data.training, 16, count=24, seed=1)
    whole = list(DataLoader(windows, batch_size=8))
    shares = [
        list(prepare_data_loader(DataLoader(windows, 8 // processes), num_processes=processes, process_index=i))
        for i in range(processes)
    ]
    assert [len(share) for share in shares] == [3] * processes
    for step, batch in enumerate(whole):
        dealt = torch.cat([share[step]["input_ids"] for share in shares])
        assert torch.equal(dealt, batch["input_ids"])


def test_a_loss_over_the_targets_of_all_processes_is_weighted_so(two_processes):
    """The mean over processes of what they keep is the loss of the whole step, whether or not their targets are as many."""
    steps = Steps(torch.nn.Linear(1, 1), None, None, None, None)  # type: ignore[arg-type]
    for named, kept in (({}, 3.0), ({"num_items_in_batch": torch.tensor(9)}, 6.0)):
        steps.keep_loss(None, (), named, SimpleNamespace(loss=torch.tensor(3.0)))
        assert steps.loss == kept


def test_a_process_has_its_share_of_a_step(two_processes, data, tmp_path, monkeypatch):
    class Made(Exception):
        pass

    def make(**options):
        raise Made(options)

    monkeypatch.setattr(train, "TrainingArguments", make)
    with pytest.raises(Made) as made:
        train.optimize(build_model(TINY, "rope", 0), TINY, Trial(tmp_path, "rope", 0, 1e-3, 4), data, None)
    [options] = made.value.args
    assert TINY.batch_size == 2 and options["per_device_train_batch_size"] == 1
    assert options["log_level_replica"] == "error" and options["ddp_static_graph"]


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_is_sealed_by_the_first_process_when_all_have_written(first, tmp_path, monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(train, "wait_for_others", lambda: done.append("waited"))
    monkeypatch.setattr(train, "seal", lambda path: done.append(path.name))
    log = LossLog(tmp_path / "losses.jsonl") if first else None
    steps = Steps(torch.nn.Linear(1, 1), tmp_path, log, lambda step: step, lambda step, loss: done.append("logged"))
    steps.loss = torch.tensor(2.0)
    state = SimpleNamespace(global_step=3)
    steps.on_step_end(None, state, None)
    steps.on_save(None, state, None)
    assert done == (["logged", "waited", "checkpoint-3"] if first else ["waited"])


# ---- for real ----------------------------------------------------------------------------------------------------------
SHAPE = "--layers 1 --hidden 16 --heads 2 --device cpu --seeds 0 --batch-size 4 --documents 4"
FAILING = """
import os
import longitude as lg

class Failing(lg.ALiBi):
    steps = 0

    def train(self, mode=True):  # Trainer's first act in each step
        self.steps += mode
        return super().train(mode)

    def terms(self, context):
        if self.training and self.steps > 3 and os.environ.get("RANK") in self.ranks:
            raise RuntimeError("out of luck")
        return super().terms(context)

@lg.register("all_fail")
class AllFail(Failing):
    ranks = ("0", "1")

@lg.register("one_fails")
class OneFails(Failing):
    ranks = ("1",)
"""


class Study:
    """`longitude study` on a machine's command line, by one process or more."""

    def __init__(self, folder: Path, *options: str):
        self.folder, self.options = folder, [*SHAPE.split(), *options]
        (folder / "text.txt").write_text(" ".join(str(i * i) for i in range(2000)))

    def begin(self, out: str, processes: int = 1, *more: str) -> subprocess.Popen:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(launcher if processes > 1 else []), "-m", "longitude", "study", *self.options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # without it, torchrun says that it sets it
        place = {"cwd": self.folder, "env": environment, "text": True}
        return subprocess.Popen([*command, "--out", out, *more], **place, stdout=PIPE, stderr=PIPE)

    def run(self, *arguments: Any) -> tuple[int, str]:
        """Its exit code and what it printed."""
        study = self.begin(*arguments)
        _, printed = study.communicate(timeout=400)
        return study.returncode, printed

    def losses(self, out: str) -> dict[str, list[float]]:
        paths = sorted((self.folder / out / "cells").glob("*/losses.jsonl"))
        return {
            path.parent.name: [json.loads(line)["loss"] for line in path.read_text().splitlines()] for path in paths
        }


def assert_same_losses(two: dict[str, list[float]], one: dict[str, list[float]]) -> None:
    """Sums of float32 are in another order, and no two tokens change places: ten thousand times more would be seen."""
    assert two.keys() == one.keys()
    for name, losses in one.items():
        assert two[name] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_give_the_losses_of_one(tmp_path):
    """Examples of this task have from one to five targets, so two halves of a step seldom have as many."""
    study = Study(
        tmp_path, *"--task reverse --encodings rope t5 --train-length 4 --test-lengths 4 6 --steps 24".split()
    )
    assert study.run("one", 1, "--workers", "1")[0] == 0
    code, printed = study.run("two", 2)
    assert code == 0, printed
    assert [line.split()[0] for line in printed.splitlines() if line.endswith(": done")] == ["rope", "t5"]
    assert "Warn" not in printed and "[rank" not in printed
    assert_same_losses(study.losses("two"), study.losses("one"))
    rows = [read_rows(tmp_path / out / "results.parquet") for out in ("two", "one")]
    assert len(rows[0]) == len(rows[1]) > 0
    assert json.loads((tmp_path / "two" / "study.json").read_text())["machine"]["processes"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_processes_continue_and_one_process_adds_to_them(tmp_path):
    lengths = "--data text.txt --train-length 16 --test-lengths 16 32"
    study = Study(tmp_path, *lengths.split(), *"--encodings rope --steps 200".split())
    assert study.run("one", 1, "--workers", "1")[0] == 0
    launcher = study.begin("two", 2)
    while not list(tmp_path.glob("two/cells/*/trainer/checkpoint-50/complete.json")):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    launcher.kill()
    launcher.communicate()  # until its processes end, too
    code, printed = study.run("two", 2)
    assert code == 0, printed
    assert re.search("rope seed 0.*: continues from step (50|100|150)\n", printed) and "Warn" not in printed
    assert_same_losses(study.losses("two"), study.losses("one"))
    code, printed = study.run("two", 1, "--encodings", "rope", "alibi")
    assert code == 0 and len(study.losses("two")) == 2, printed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_error_of_all_fails_the_trial_and_one_of_one_process_ends_all(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    lengths = "--data text.txt --train-length 16 --test-lengths 16 --steps 6"
    study = Study(tmp_path, *lengths.split(), *"--plugin failing.py --encodings all_fail rope one_fails".split())
    code, printed = study.run("run", 2)
    assert code == 1 and "Warn" not in printed
    assert re.search("all_fail seed 0.*: failed, RuntimeError: out of luck; see", printed)
    assert re.search("rope seed 0.*: done", printed)
    [line] = [line for line in printed.splitlines() if line.startswith("longitude:")]
    assert line.startswith("longitude: process 2 of 2 failed, and not all others: RuntimeError: out of luck; the same")
