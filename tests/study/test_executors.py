"""Where trials run changes no row: side by side, killed in the middle, or with the process that waits for them killed."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from longitude.study.config import StudyConfig
from longitude.study.executors import Workers, executor_of, in_process
from longitude.study.run_trial import TrialRunner
from tests.study.conftest import SHORT, OneTrial, run, trial_of
from tests.support import refused

pytestmark = pytest.mark.usefixtures("numbers")


class AlwaysKilled:
    def run(self, *arguments):
        os.kill(os.getpid(), signal.SIGKILL)


class AlwaysKilling(Workers):
    def __call__(self, runner, *arguments):
        return super().__call__(AlwaysKilled(), *arguments)


@pytest.mark.slow
def test_a_trial_that_is_always_killed_is_failed_and_tried_again(tmp_path):
    config = replace(SHORT, encodings=("rope",))
    outcome, notes = run(config, tmp_path, executor=AlwaysKilling(1))
    assert [trial.status for trial in outcome.trials] == ["failed"]
    assert "its process was killed" in notes[-1] and notes[-1].count("3 times") == 1
    assert run(config, tmp_path, executor=Workers(1))[0].complete


def on(device: str, threads: int) -> StudyConfig:
    return replace(SHORT, device=device, threads=threads)


def test_as_many_workers_as_the_cores_hold(monkeypatch):
    monkeypatch.setattr("longitude.study.executors.cores", lambda: 8)
    assert executor_of(on("cpu", 2), 20) == Workers(4)
    assert executor_of(on("cpu", 2), 3) == Workers(3)
    assert executor_of(on("cpu", 16), 3) == executor_of(on("cpu", 1), 3, workers=1) == in_process
    with refused("--workers", "0"):
        executor_of(on("cpu", 1), 3, workers=0)


def test_one_gpu_for_each_worker(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert executor_of(on("cuda", 1), 20) == Workers(2, ("2", "5"))
    assert executor_of(on("cuda", 1), 20, workers=4) == Workers(4, ("2", "5"))


def test_a_trial_has_the_threads_of_the_study(tmp_path, data, monkeypatch):
    seen, diverged = [], trial_of("rope", 0, SHORT).status("diverged", 0)
    monkeypatch.setattr(TrialRunner, "made", lambda *_: (seen.append(torch.get_num_threads()) or diverged, tmp_path))
    before = torch.get_num_threads()
    OneTrial(tmp_path, "rope", 0, replace(SHORT, threads=3), data).run()
    assert seen == [3] and torch.get_num_threads() == before
