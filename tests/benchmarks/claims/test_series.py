"""`python -m claims --run`: an ordinary study for each preset that the claims read, then the verdicts."""

import pytest

from claims import series
from claims.__main__ import main
from claims.evidence import KEPT
from longitude.cli.shared import FAILURES, WRONG_USE


class Runs(list):
    """Command lines in place of studies; those that contain `fails` end with an error."""

    fails = "no study"

    def __call__(self, line):
        self.append(line)
        return type("Ended", (), {"returncode": int(any(self.fails in part for part in line))})


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.setattr(series.subprocess, "run", runs := Runs())
    return runs


def test_a_study_comes_after_the_one_whose_models_it_trains_on(runs, tmp_path):
    main([str(tmp_path), "--plan", "--only", "staged-training", "--workers", "2"])
    folders = [line[line.index("--out") + 1].rpartition("/")[2] for line in runs]
    assert folders[:2] == ["staged-short", "staged"] and "staged-long" in folders
    assert all(line[-3:] == ["--workers", "2", "--plan"] for line in runs)


def test_a_study_that_failed_leaves_the_verdicts_of_the_others(runs, tmp_path, capsys):
    runs.fails = "tables"
    assert main([str(tmp_path), "--run", "--only", "1a", "tables-fail"]) == FAILURES
    assert "not run" in capsys.readouterr().out and len(runs) == 2


def test_committed_results_are_not_run_into(runs, capsys):
    assert main([str(KEPT), "--run"]) == WRONG_USE and not runs
    with pytest.raises(SystemExit):
        main(["--workers", "2"])
    assert "--workers" in capsys.readouterr().err
