"""A run directory: one configuration, one writer, trials that continue, and rows that no kill changes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from longitude.measure import Row, from_frame, read_rows, to_frame
from longitude.runs import files
from longitude.study import runner
from longitude.study.data import Text
from tests.study.conftest import TINY, conclusion, run

pytestmark = pytest.mark.usefixtures("numbers")
TINY = replace(TINY, test_lengths=(16, 32))


def statuses(outcome: runner.Outcome) -> list[tuple[str, int, str]]:
    return [(trial.label, trial.seed, status.status) for trial, status in outcome.trials]


def test_a_study_its_directory_and_its_end(tmp_path, monkeypatch):
    outcome, notes = run(TINY, tmp_path / "run")
    assert outcome.complete and notes[1:] == ["none seed 0: done", "rope seed 0: done"]
    study = json.loads((tmp_path / "run" / "study.json").read_text())
    assert study["configuration"]["encodings"] == ["none", "rope"] and study["configuration"]["steps"] == 4
    assert study["data"]["validation_documents"] == 4 and len(study["data"]["sha256"]) == 64
    assert study["versions"]["torch"] and study["machine"]["cores"] >= 1
    rows = read_rows(tmp_path / "run" / "results.parquet")
    assert list(rows["label"].unique()) == ["none", "rope"]
    assert list(rows["length"][rows["method"] == "non-overlapping"]) == [16, 32, 16, 32]

    monkeypatch.setattr(runner, "run_trial", None)  # nothing is run again
    before = (tmp_path / "run" / "study.json").read_bytes()
    assert run(TINY, tmp_path / "run")[0].complete
    assert (tmp_path / "run" / "study.json").read_bytes() == before


@pytest.mark.slow
def test_more_encodings_and_seeds_are_added(tmp_path):
    run(TINY, tmp_path)
    kept = (tmp_path / "cells" / "rope-0" / "model.safetensors").stat().st_mtime_ns
    outcome, _ = run(replace(TINY, encodings=("alibi", "rope", "none"), seeds=(1, 0)), tmp_path)
    expected = [(label, seed, "done") for seed in (0, 1) for label in ("none", "rope", "alibi")]
    assert statuses(outcome) == expected
    assert (tmp_path / "cells" / "rope-0" / "model.safetensors").stat().st_mtime_ns == kept
    assert len(read_rows(tmp_path / "results.parquet").groupby(["label", "seed"])) == 6
    with pytest.raises(ValueError, match="--encodings none rope alibi, not rope; --fresh starts over"):
        run(replace(TINY, encodings=("rope",)), tmp_path)


@pytest.mark.slow
def test_another_configuration_is_named(tmp_path, monkeypatch):
    run(TINY, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ValueError, match="holds a study with --steps 4, not 5; --fresh starts over, another --out"):
        run(replace(TINY, steps=5), tmp_path)
    with pytest.raises(ValueError, match="--test-lengths 16 32, not 16 48"):
        run(replace(TINY, test_lengths=(16, 48)), tmp_path)
    with monkeypatch.context() as patched:
        changed = [(str(i), b"other text " * 50) for i in range(30)]
        patched.setattr("longitude.study.data.read_text", lambda data: Text(data, changed))
        with pytest.raises(ValueError, match="holds a study of another text"):
            run(TINY, tmp_path)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
    (tmp_path / "mine.txt").write_text("stays")
    outcome, _ = run(replace(TINY, steps=5, encodings=("rope",)), tmp_path, fresh=True)
    assert statuses(outcome) == [("rope", 0, "done")]
    assert not (tmp_path / "cells" / "none-0").exists() and (tmp_path / "mine.txt").exists()


def test_a_failed_trial_is_recorded_and_tried_again(tmp_path, monkeypatch):
    plain = runner.train

    def breaks(model, config, trial, *rest):
        if trial.label == "none":
            raise RuntimeError("the coffee is out\nand more")
        return plain(model, config, trial, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(runner, "train", breaks)
        outcome, notes = run(TINY, tmp_path)
    assert statuses(outcome) == [("none", 0, "failed"), ("rope", 0, "done")] and not outcome.complete
    assert notes[1].startswith("none seed 0: failed, RuntimeError: the coffee is out; see ")
    assert "Traceback" in (tmp_path / "cells" / "none-0" / "error.txt").read_text()
    assert list(read_rows(tmp_path / "results.parquet")["label"].unique()) == ["rope"]
    outcome, _ = run(TINY, tmp_path)
    assert outcome.complete and not (tmp_path / "cells" / "none-0" / "error.txt").exists()


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    usage, full = files.shutil.disk_usage(tmp_path), []

    def fails(*arguments, **named):
        full.append(True)
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")  # torch's own words

    for where, name in ((torch, "save"), (runner, "write_rows")):
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
    model = json.loads((tmp_path / "cells" / "learned-0" / "config.json").read_text())
    assert model["encoding"]["max_length"] == model["max_position_embeddings"] == 32
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert {row.train_positions for row in rows} == {"randomized(max_length=32)"}
    assert {(row.label, row.length) for row in rows} >= {("learned", 32), ("rope", 32)}  # a table as long as the range
    assert "; training windows had randomized positions out of 32;" in conclusion(tmp_path)
    with pytest.raises(ValueError, match="holds a study with --positions randomized, not skipped"):
        run(replace(config, positions="skipped"), tmp_path)
    with pytest.raises(ValueError, match="holds a study with --position-range 32, not 20"):
        run(replace(config, position_range=20), tmp_path)


def test_a_contiguous_study_is_what_it_was(tmp_path):
    config = replace(TINY, encodings=("learned",), steps=2)
    run(config, tmp_path)
    assert "train_positions" not in read_rows(tmp_path / "results.parquet")
    assert json.loads((tmp_path / "cells" / "learned-0" / "config.json").read_text())["max_position_embeddings"] == 16
    study = json.loads((tmp_path / "study.json").read_text())
    for name in ("positions", "position_range"):  # as the first release wrote it
        del study["configuration"][name]
    (tmp_path / "study.json").write_text(json.dumps(study))
    assert "positions out of" not in conclusion(tmp_path)
    assert run(config, tmp_path)[0].complete
    with pytest.raises(ValueError, match="holds a study with --positions contiguous, not skipped"):
        run(replace(config, positions="skipped"), tmp_path)


def test_rows_gain_the_column_only_where_it_says_something():
    plain, sampled = Row(task="text", metric="perplexity"), Row(task="text", metric="x", train_positions="skipped")
    assert "train_positions" not in to_frame([plain, plain])
    assert list(to_frame([plain, sampled]).columns) == [*to_frame([plain]).columns, "train_positions"]
    assert from_frame(to_frame([plain, sampled])) == [plain, sampled]


# ---- other processes ---------------------------------------------------------------------------------------------------

STUDY = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
import longitude.study.data
from longitude.study import runner
from longitude.study.plan import plan
from tests.study.conftest import NUMBERS, TINY, dying
longitude.study.data.read_text = lambda name: NUMBERS
config = replace(TINY, test_lengths=(16, 32), steps=20)

def killed_at(where, name, when):
    setattr(where, name, dying(getattr(where, name), when, lambda: os.kill(os.getpid(), signal.SIGKILL)))
"""
RUN = "runner.study(plan(config, Path(sys.argv[1])))\n"


def process(code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", STUDY + code, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_one_writer_per_directory(tmp_path):
    holder = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX); f.write('7'); f.flush(); "
    holder += "print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(tmp_path / ".lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="is being written by process 7; wait for it, or choose another --out"):
            run(TINY, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        other.kill()
    assert run(TINY, tmp_path)[0].complete  # a lock dies with its process


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_with_kill_9_repeatedly_the_rows_are_the_same(tmp_path):
    kills = [
        "import longitude.study.resume as c; killed_at(c.LossLog, 'append', 8)\n",  # in mid-training
        "import torch; killed_at(torch, 'save', 2)\n",  # in mid-save
        "killed_at(os, 'fsync', 22)\n",  # while the files of a save go to the disk
        "import longitude.study.runner as c; killed_at(c, 'write_rows', 1)\n",  # before rows
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_random_moments_the_rows_are_the_same(tmp_path):
    whole = process(RUN, str(tmp_path / "whole"))
    begun = time.monotonic()
    assert whole.communicate() and whole.returncode == 0
    seconds = time.monotonic() - begun
    for share in (0.6, 0.75, 0.9):
        killed = process(RUN, str(tmp_path / "killed"))
        time.sleep(share * seconds)
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
    last = process(RUN, str(tmp_path / "killed"))
    assert last.communicate() and last.returncode == 0
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")


def assert_same_runs(one: Path, other: Path) -> None:
    rows = [read_rows(path / "results.parquet").drop(columns="commit") for path in (one, other)]
    pd.testing.assert_frame_equal(*rows, check_exact=True)
    for name in ("losses.jsonl", "documents.parquet", "model.safetensors"):
        for trial in ("none-0", "rope-0"):
            assert (one / "cells" / trial / name).read_bytes() == (other / "cells" / trial / name).read_bytes()
