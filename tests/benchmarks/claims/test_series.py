"""`python -m claims --run`: an ordinary study for each preset that the claims read, then the verdicts."""

import math

import pytest

from claims import series
from claims.__main__ import main
from claims.evidence import KEPT, Evidence, Measured
from claims.series import joined
from longitude.cli.shared import FAILURES, WRONG_USE
from longitude.study import results
from longitude.study.results import read_run
from tests.study.conftest import write_run


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


def test_parts_of_a_study_are_joined(tmp_path):
    """By hand: seeds 3 and 4 of one label join seeds 0 to 2 of two; another run of seed 4 takes its place."""
    sizes = {"train_length": 256, "test_lengths": (256, 512), "documents": 5}
    bits = {"a": {"alibi": (2.5, 2.5), "rope": (2.6, 3.0)}, "b": {"alibi": (2.4, 2.4)}, "c": {"alibi": (2.0, 2.0)}}
    seeds = {"a": (0, 1, 2), "b": (3, 4), "c": (4,)}
    runs = {name: read_run(write_run(tmp_path / name, bits[name], seeds=seeds[name], **sizes)) for name in bits}
    first = results.keep(runs["a"], tmp_path / "kept")
    for name in "bc":
        results.keep(joined(read_run(first), runs[name]), first)
    run = read_run(first)
    alibi, rope = (run.sums(label, 512, "non-overlapping", ("nats", "bytes")) for label in ("alibi", "rope"))
    assert (alibi.seeds, rope.seeds, run.config.seeds) == ((0, 1, 2, 3, 4), (0, 1, 2), (0, 1, 2, 3, 4))
    assert alibi.of.sum(1) / alibi.over.sum(1) / math.log(2) == pytest.approx([2.5] * 3 + [2.4, 2.0], abs=0.2)
    assert [part["trials"] for part in run.study["joined"]] == [[["alibi", 3], ["alibi", 4]], [["alibi", 4]]]
    evidence = Evidence(tmp_path)
    evidence.expected = lambda study: run.config
    assert [evidence.missing(Measured("kept", label, 512)) for label in ("alibi", "rope")] == ["", "3 of 5 seeds"]
    for other in ({"steps": 30}, {"documents": 6}, {"test_lengths": (256, 512, 1024)}):
        values = {"alibi": (2.5,) * len(other.get("test_lengths", "ab"))}
        stranger = read_run(write_run(tmp_path / next(iter(other)), values, seeds=(5,), **sizes | other))
        with pytest.raises(ValueError, match="expected as in"):
            joined(run, stranger)
