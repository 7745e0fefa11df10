"""A run directory: one configuration, one writer, trials that continue, and rows that no kill changes."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch

from longitude.attention.backends import routes
from longitude.measure import from_frame, read_rows
from longitude.runs import files
from longitude.study import run_trial, runner
from longitude.study.data import Text
from tests.study.conftest import NUMBERS, TINY, assert_same_runs, printed, process, run, trial_at

pytestmark = pytest.mark.usefixtures("numbers")
TINY = replace(TINY, test_lengths=(16, 32))


def statuses(outcome: runner.Outcome) -> list[tuple[str, int, str]]:
    return [(trial.label, trial.seed, status.status) for trial, status in outcome.trials]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study that is finished; tests refuse to continue it, or read."""
    path = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("longitude.study.data.read_texts", lambda data: NUMBERS)
        outcome, notes = run(TINY, path)
    assert outcome.complete and notes[2:] == ["none seed 0 lr 0.005: done", "rope seed 0 lr 0.005: done"]
    return path


def test_a_finished_study_is_not_run_again(done, monkeypatch):
    study = json.loads((done / "study.json").read_text())
    assert study["configuration"]["encodings"] == ["none", "rope"] and study["configuration"]["steps"] == 4
    assert study["data"]["validation_documents"] == 4 and len(study["data"]["sha256"]) == 64
    assert study["versions"]["torch"] and study["machine"]["cores"] >= 1
    rows = read_rows(done / "results.parquet")
    assert list(rows["label"].unique()) == ["none", "rope"] and "train_positions" not in rows
    assert list(rows["length"][rows["method"] == "non-overlapping"]) == [16, 32, 16, 32]
    before = (done / "study.json").read_bytes()
    monkeypatch.setattr(runner, "run_trial", None)
    assert run(TINY, done)[0].complete
    assert (done / "study.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 5}, "holds a study with --steps 4, not 5; leave --out out, then another question has"),
        ({"positions": "skipped"}, "holds a study with --positions contiguous, not skipped"),
        ({}, "holds a study of another text"),
    ],
)
def test_another_configuration_is_named_and_nothing_is_touched(changes, message, done, monkeypatch):
    if not changes:
        monkeypatch.setattr("longitude.study.data.read_texts", lambda data: Text(*data, NUMBERS.documents[1:]))
    before = {path: path.read_bytes() for path in done.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ValueError, match=message):
        run(replace(TINY, **changes), done)
    assert {path: path.read_bytes() for path in done.rglob("*") if path.is_file() and path.name != ".lock"} == before


@pytest.mark.slow
def test_encodings_and_seeds_are_added_and_fresh_starts_over(done, tmp_path):
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    kept = (trial_at(tmp_path, "rope", 0).folder / "model.safetensors").stat().st_mtime_ns
    outcome, _ = run(replace(TINY, encodings=("alibi", "rope", "none"), seeds=(1, 0)), tmp_path)
    assert statuses(outcome) == [(label, seed, "done") for seed in (0, 1) for label in ("none", "rope", "alibi")]
    assert (trial_at(tmp_path, "rope", 0).folder / "model.safetensors").stat().st_mtime_ns == kept
    assert len(read_rows(tmp_path / "results.parquet").groupby(["label", "seed"])) == 6
    (tmp_path / "mine.txt").write_text("stays")
    outcome, _ = run(replace(TINY, steps=5, encodings=("rope",)), tmp_path, fresh=True)
    assert statuses(outcome) == [("rope", 0, "done")]
    assert not (trial_at(tmp_path, "none", 0).folder).exists() and (tmp_path / "mine.txt").exists()


def test_a_failed_trial_is_recorded_and_tried_again(tmp_path, monkeypatch):
    plain = run_trial.train

    def breaks(model, config, trial, *rest):
        if trial.label == "none":
            raise RuntimeError("the coffee is out\nand more")
        return plain(model, config, trial, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(run_trial, "train", breaks)
        outcome, notes = run(TINY, tmp_path)
    assert statuses(outcome) == [("none", 0, "failed"), ("rope", 0, "done")] and not outcome.complete
    assert notes[2].startswith("none seed 0 lr 0.005: failed, RuntimeError: the coffee is out; see ")
    assert "Traceback" in (trial_at(tmp_path, "none", 0).folder / "error.txt").read_text()
    assert list(read_rows(tmp_path / "results.parquet")["label"].unique()) == ["rope"]
    outcome, _ = run(TINY, tmp_path)
    assert outcome.complete and not (trial_at(tmp_path, "none", 0).folder / "error.txt").exists()


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    usage, full = files.shutil.disk_usage(tmp_path), []

    def fails(*arguments, **named):
        full.append(True)
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")  # torch's own words

    for where, name in ((torch, "save"), (run_trial, "write_rows")):
        full.clear()
        with monkeypatch.context() as patched:
            patched.setattr(where, name, fails)
            patched.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=1000 if full else 10**9))
            with pytest.raises(ValueError, match=r"no space left on the disk of .*the same command continues"):
                run(TINY, tmp_path / "run")
        assert all((path / "complete.json").exists() for path in (tmp_path / "run").glob("cells/*/trainer/check*"))
        assert not list((tmp_path / "run").glob("**/*.tmp")) + list((tmp_path / "run").glob("**/error.txt"))
    assert run(TINY, tmp_path / "run")[0].complete
    assert files.out_of_space(OSError(28, "No space left on device"), tmp_path)


# ---- sampled positions -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_records_its_sampler_everywhere(tmp_path):
    config = replace(TINY, positions="randomized", encodings=("rope", "learned"))
    outcome, _ = run(config, tmp_path)
    assert outcome.complete and [status.reason for _, status in outcome.trials] == [None, None]
    study = json.loads((tmp_path / "study.json").read_text())
    assert (study["configuration"]["positions"], study["configuration"]["position_range"]) == ("randomized", 32)
    model = json.loads((trial_at(tmp_path, "learned", 0).folder / "config.json").read_text())
    assert model["encoding"]["max_length"] == model["max_position_embeddings"] == 32
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert {row.train_positions for row in rows} == {"randomized(max_length=32)"}
    assert {(row.label, row.length) for row in rows} >= {("learned", 32), ("rope", 32)}  # a table as long as the range
    assert "randomized positions out of 32" in printed(tmp_path)
    with pytest.raises(ValueError, match="holds a study with --position-range 32, not 20"):
        run(replace(config, position_range=20), tmp_path)


# ---- other processes ---------------------------------------------------------------------------------------------------

RUN = "runner.study(plan(config, Path(sys.argv[1])))\n"


def test_one_writer_per_directory(tmp_path):
    with (
        files.locked(tmp_path),
        pytest.raises(ValueError, match=f"is being written by process {os.getpid()}; wait for it"),
    ):
        run(TINY, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_with_kill_9_repeatedly_the_rows_are_the_same(tmp_path):
    kills = [
        "import longitude.study.resume as c; killed_at(c.LossLog, 'append', 8)\n",  # in mid-training
        "import torch; killed_at(torch, 'save', 2)\n",  # in mid-save
        "killed_at(os, 'fsync', 22)\n",  # while the files of a save go to the disk
        "import longitude.study.run_trial as c; killed_at(c, 'write_rows', 1)\n",  # before rows
        "killed_at(os, 'replace', 12)\n",
        "killed_at(runner, '_gather', 2)\n",
    ]
    for kill in kills:
        killed = process(kill + RUN, str(tmp_path / "killed"))
        _, errors = killed.communicate()
        assert killed.returncode == -signal.SIGKILL, (kill, errors)
    for run_name in ("killed", "whole"):
        last = process(RUN, str(tmp_path / run_name))
        _, errors = last.communicate()
        assert last.returncode == 0, errors
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")


# ---- routes ------------------------------------------------------------------------------------------------------------
def test_a_trial_repeats_the_routes_that_it_was_begun_with(tmp_path, data, monkeypatch):
    """Those of today where it begins; its own, even none, where it continues; and it says so where our loop is off.

    Where it is off nothing is forgotten: a later machine repeats what the trial was begun with.
    """
    begun = {"forward float32": {"64": 32}}
    trial, here, used, notes = trial_at(tmp_path, "rope", 0), begun, [], []
    monkeypatch.setattr(routes, "is_on", lambda: True)
    monkeypatch.setattr(routes, "routes_of", lambda *machine: here)

    def killed(trial_run):
        trial_run.record_own()
        used.append(routes.routes())
        return trial.status

    monkeypatch.setattr(run_trial.TrialRun, "run", killed)

    def attempt(recorded=begun):
        run_trial.run_trial(TINY, trial, data, note=notes.append)
        assert json.loads((trial.folder / "trial.json").read_text())["routes"] == recorded

    attempt()
    here = {}
    attempt()
    assert used == [begun] * 2 and notes == [] and routes.routes() == {}
    monkeypatch.setattr(routes, "is_on", lambda: False)
    attempt()
    assert used[-1] == {} and "was begun with our loop for attention, which is off here" in notes[0]
    monkeypatch.setattr(routes, "is_on", lambda: True)
    attempt()
    assert used[-1] == begun
    older = json.loads((trial.folder / "trial.json").read_text())
    (trial.folder / "trial.json").write_text(json.dumps({name: x for name, x in older.items() if name != "routes"}))
    here = {"forward float32": {"64": 64}}
    attempt(recorded={})
    assert used[-1] == {} and routes.routes() == here
