"""Where trials run changes no row: side by side, killed in the middle, or with the process that waits for them killed."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from longitude.study import run_trial
from longitude.study.executors import InProcess, Workers, executor_of
from tests.study.conftest import NUMBERS, TINY, assert_same_runs, process, run

pytestmark = pytest.mark.usefixtures("numbers")
TINY = replace(TINY, test_lengths=(16, 32))


def killed_once(plain, flag: Path, **named):
    """`run_trial`, whose process is killed at the first report of progress unless `flag` is there."""
    if not flag.exists() and named["trial"].label == "rope":

        def die(share, words):
            if share > 0.2:
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        named["on_progress"] = die
    return plain(**named)


class Killing:
    """Workers, one of which is killed in mid-trial."""

    def __init__(self, executor, flag: Path):
        self.executor, self.flag = executor, flag

    def map(self, run, *arguments):
        return self.executor.map(partial(killed_once, run, self.flag), *arguments)


def always_killed(**named):
    os.kill(os.getpid(), signal.SIGKILL)


class AlwaysKilling(Workers):
    def map(self, run, *arguments):
        return super().map(always_killed, *arguments)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("longitude.study.data.read_text", lambda data: NUMBERS)
        assert run(TINY, path)[0].complete
    return path


@pytest.mark.slow
def test_two_workers_give_the_rows_of_one_process_though_one_is_killed(plain, tmp_path):
    outcome, notes = run(TINY, tmp_path / "two", executor=Killing(Workers(2), tmp_path / "killed"))
    assert outcome.complete and (tmp_path / "killed").exists()
    assert [note for note in notes if note.startswith("rope seed 0: its process was killed")]
    assert_same_runs(plain, tmp_path / "two")


@pytest.mark.slow
def test_a_trial_that_is_always_killed_is_failed_and_tried_again(plain, tmp_path):
    config = replace(TINY, encodings=("rope",))
    outcome, notes = run(config, tmp_path, executor=AlwaysKilling(1))
    assert [status.status for _, status in outcome.trials] == ["failed"]
    assert "its process was killed" in notes[-1] and notes[-1].count("3 times") == 1
    assert run(config, tmp_path, executor=Workers(1))[0].complete


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_process_that_waits_is_killed_and_no_worker_writes_on(plain, tmp_path):
    code = "from longitude.study.executors import Workers\n"
    code += "def on_progress(words, done, total):\n    if done > 1.2: os.kill(os.getpid(), signal.SIGKILL)\n"
    code += "runner.study(plan(config, Path(sys.argv[1])), on_progress=on_progress, executor=Workers(2))\n"
    for _ in range(2):
        killed = process(code.replace("config,", "replace(config, steps=4),"), str(tmp_path))
        _, errors = killed.communicate()
        assert killed.returncode == -signal.SIGKILL, errors
    assert run(TINY, tmp_path)[0].complete  # waits for workers that have not ended yet
    assert_same_runs(plain, tmp_path)


def test_as_many_workers_as_the_cores_hold(monkeypatch):
    monkeypatch.setattr("longitude.study.executors._cores", lambda: 8)
    assert executor_of("cpu", 2, 20) == Workers(4)
    assert executor_of("cpu", 2, 3) == Workers(3)
    assert executor_of("cpu", 16, 3) == executor_of("cpu", 1, 3, workers=1) == InProcess()
    with pytest.raises(ValueError, match="--workers must be at least 1, got 0"):
        executor_of("cpu", 1, 3, workers=0)


def test_one_gpu_for_each_worker(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert executor_of("cuda", 1, 20) == Workers(2, ("2", "5"))
    assert executor_of("cuda", 1, 20, workers=4) == Workers(4, ("2", "5"))


def test_a_trial_has_the_threads_of_the_study(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(run_trial.TrialRun, "attempt", lambda self: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    run_trial.run_trial(replace(TINY, threads=3), None, None)  # type: ignore[arg-type]
    assert seen == [3] and torch.get_num_threads() == before
