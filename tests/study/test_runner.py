"""A study in a folder: trials that continue, that several processes share, and rows that no kill changes."""

import json

import pytest

from longitude.measure import read_rows
from longitude.study import run_trial
from longitude.study.results import Run
from tests.study.conftest import SHORT, run, units_in

pytestmark = pytest.mark.usefixtures("numbers")


def statuses(found: Run) -> list[tuple[str, int, str]]:
    return [(trial.label, trial.seed, trial.status) for trial in found.trials]


def test_a_finished_study_is_not_run_again(finished, monkeypatch):
    asked = json.loads((finished / "question.json").read_text())
    assert asked["configuration"]["encodings"] == ["nope", "rope"] and asked["configuration"]["steps"] == 4
    assert asked["data"]["validation_documents"] == 4 and len(asked["data"]["sha256"]) == 64
    assert asked["versions"]["torch"] and asked["machine"]["cores"] >= 1
    rows = read_rows(finished / "results.parquet")
    assert list(rows["label"].unique()) == ["nope", "rope"] and "train_positions" not in rows
    assert list(rows["length"][rows["method"] == "non-overlapping"]) == [16, 32, 16, 32]
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("units/*/*")}
    monkeypatch.setattr(run_trial, "train", None)
    monkeypatch.setattr(run_trial.TrialRunner, "measure", None)
    assert run(SHORT, finished)[0].complete
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("units/*/*")} == before


@pytest.mark.slow
def test_a_failed_trial_is_recorded_and_tried_again(tmp_path, monkeypatch):
    plain = run_trial.train

    def breaks(model, config, trial, *rest):
        if trial.label == "nope":
            raise RuntimeError("the coffee is out\nand more")
        return plain(model, config, trial, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(run_trial, "train", breaks)
        found, notes = run(SHORT, tmp_path)
    assert statuses(found) == [("nope", 0, "failed"), ("rope", 0, "done")] and not found.complete
    assert notes[1].startswith("nope seed 0 lr 0.005: failed, RuntimeError: the coffee is out;")
    assert "Traceback" in json.loads((units_in(tmp_path, "nope")["train"] / "failure.json").read_text())["trace"]
    assert list(read_rows(tmp_path / "results.parquet")["label"].unique()) == ["rope"]
    found, _ = run(SHORT, tmp_path)
    assert found.complete and not [*tmp_path.rglob("failure.json")]
