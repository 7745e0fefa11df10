"""A study in a folder: trials that continue, that several processes share, and rows that no kill changes."""

import json
import signal
from dataclasses import replace

import pytest

from longitude.measure import read_rows
from longitude.measure.rows import from_frame
from longitude.study import run_trial
from longitude.study.results import Run
from tests.study.conftest import NUMBERS, TINY, assert_same_runs, printed, process, run, units_in

pytestmark = pytest.mark.usefixtures("numbers")
TINY = replace(TINY, test_lengths=(16, 32))


def statuses(found: Run) -> list[tuple[str, int, str]]:
    return [(trial.label, trial.seed, trial.status) for trial in found.trials]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study that is finished, to read."""
    path = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("longitude.study.data.read_texts", lambda data: NUMBERS)
        found, notes = run(TINY, path)
    assert found.complete
    assert all(
        words.startswith(f"{label} seed 0 lr 0.005: done")
        for label, words in zip(("nope", "rope"), notes[-2:], strict=True)
    )
    return path


def test_a_finished_study_is_not_run_again(done, monkeypatch):
    asked = json.loads((done / "question.json").read_text())
    assert asked["configuration"]["encodings"] == ["nope", "rope"] and asked["configuration"]["steps"] == 4
    assert asked["data"]["validation_documents"] == 4 and len(asked["data"]["sha256"]) == 64
    assert asked["versions"]["torch"] and asked["machine"]["cores"] >= 1
    rows = read_rows(done / "results.parquet")
    assert list(rows["label"].unique()) == ["nope", "rope"] and "train_positions" not in rows
    assert list(rows["length"][rows["method"] == "non-overlapping"]) == [16, 32, 16, 32]
    before = {path: path.stat().st_mtime_ns for path in done.rglob("units/*/*")}
    monkeypatch.setattr(run_trial, "train", None)
    monkeypatch.setattr(run_trial.TrialRunner, "measure", None)
    assert run(TINY, done)[0].complete
    assert {path: path.stat().st_mtime_ns for path in done.rglob("units/*/*")} == before


@pytest.mark.slow
def test_a_failed_trial_is_recorded_and_tried_again(tmp_path, monkeypatch):
    plain = run_trial.train

    def breaks(model, config, trial, *rest):
        if trial.label == "nope":
            raise RuntimeError("the coffee is out\nand more")
        return plain(model, config, trial, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(run_trial, "train", breaks)
        found, notes = run(TINY, tmp_path)
    assert statuses(found) == [("nope", 0, "failed"), ("rope", 0, "done")] and not found.complete
    assert notes[2].startswith("nope seed 0 lr 0.005: failed, RuntimeError: the coffee is out;")
    assert "Traceback" in json.loads((units_in(tmp_path, "nope")["train"] / "failure.json").read_text())["trace"]
    assert list(read_rows(tmp_path / "results.parquet")["label"].unique()) == ["rope"]
    found, _ = run(TINY, tmp_path)
    assert found.complete and not [*tmp_path.rglob("failure.json")]


# ---- sampled positions -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_records_its_sampler_everywhere(tmp_path):
    config = replace(TINY, positions="randomized", encodings=("rope", "learned"))
    found, _ = run(config, tmp_path)
    assert found.complete and [trial.reason for trial in found.trials] == [None, None]
    study = json.loads((tmp_path / "question.json").read_text())
    assert (study["configuration"]["positions"], study["configuration"]["position_range"]) == ("randomized", 32)
    model = json.loads((units_in(tmp_path, "learned")["train"] / "config.json").read_text())
    assert model["encoding"]["max_length"] == model["max_position_embeddings"] == 32
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert {row.train_positions for row in rows} == {"randomized(max_length=32)"}
    assert {(row.label, row.length) for row in rows} >= {("learned", 32), ("rope", 32)}  # a table as long as the range
    assert "randomized positions out of 32" in printed(tmp_path)


# ---- other processes ---------------------------------------------------------------------------------------------------

RUN = "runner.study(plan(config, Path(sys.argv[1])))\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_with_kill_9_repeatedly_the_rows_are_the_same(tmp_path):
    kills = [
        "import longitude.study.train as c; killed_at(c.LossLog, 'append', 8)\n",  # in mid-training
        "import torch; killed_at(torch, 'save', 2)\n",  # in mid-save
        "killed_at(os, 'fsync', 22)\n",  # while the files of a save go to the disk
        "import longitude.study.run_trial as c; killed_at(c, 'write_rows', 1)\n",  # before rows
        "killed_at(os, 'replace', 12)\n",
        "killed_at(os, 'rename', 1)\n",  # as a unit is moved in
        "killed_at(runner, 'write_rows', 1)\n",
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
