"""A run directory: one configuration, one writer, cells that continue, and rows that no kill changes."""

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

from longitude.measure import read_rows
from longitude.runs import files
from longitude.study import runner
from longitude.study.config import StudyConfig
from longitude.study.data import Text
from longitude.study.plan import plan

TINY = StudyConfig(
    encodings=("none", "rope"), train_length=16, test_lengths=(16, 32), steps=4, batch_size=2, layers=1, hidden=16,
    heads=2, documents=4, device="cpu",
)  # fmt: skip


@pytest.fixture(autouse=True)
def numbers(monkeypatch):
    """A text that is quick to read."""
    documents = [(str(i), " ".join(str(j * j) for j in range(i, i + 200)).encode()) for i in range(30)]
    monkeypatch.setattr("longitude.study.data.read_text", lambda data: Text(data, documents))


def run(config: StudyConfig, path: Path, **options) -> tuple[runner.Outcome, list[str]]:
    notes: list[str] = []
    return runner.study(plan(config, path), note=notes.append, **options), notes


def statuses(outcome: runner.Outcome) -> list[tuple[str, int, str]]:
    return [(cell.label, cell.seed, status.status) for cell, status in outcome.trials]


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


SAME = [
    ("rope+performer", "performer"),
    ("rope", "none", "rope:base=10000"),
    ("mamba", "none+mamba"),
    ("mamba", "mamba+mamba"),
    ("rope:base=10000+alibi", "alibi+rope"),
    ("learned+rope", "rope+learned"),
    ("attention", "attention:dropout=0.0"),
    ("path_fox", "path_fox:kernel=3"),
    ("transformer_xl+alibi+rope", "transformer_xl+rope+alibi"),
    ("alibi+mamba+attention", "mamba+alibi+attention"),
]


@pytest.mark.parametrize("labels", SAME)
def test_labels_of_one_model_are_refused(labels, tmp_path):
    with pytest.raises(ValueError, match=f"--encodings .*: it names the same model as {labels[0].replace('+', '.')}"):
        plan(replace(TINY, layers=2, encodings=labels), tmp_path / "run")


def test_labels_of_different_models_are_not(tmp_path):
    """Where queries and keys are changed, the order matters: (q + u) rotated is not q rotated + u."""
    labels = (
        "none", "rope", "rope:base=5000", "rope+alibi", "rope+fox", "alibi", "transformer_xl+rope", "rope+transformer_xl",
        "mamba", "mamba:state_size=8", "mamba+attention", "attention+mamba", "none+attention+mamba", "alibi+attention+mamba",
        "learned+mamba", "sinusoidal+mamba", "attention:dropout=0.1", "path_fox", "path_fox:kernel=4", "path+fox",
    )  # fmt: skip
    config = replace(TINY, layers=2, encodings=labels)
    assert len(plan(config, tmp_path / "run").trials) == len(labels)


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


def test_directories_that_are_not_ours_stay_untouched(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds other files and no study"):
        run(TINY, tmp_path)
    with pytest.raises(ValueError, match="there is a file of this name"):
        run(TINY, tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encodings": ("rop",)}, "unknown encoding 'rop': did you mean 'rope'.*longitude list"),
        ({"encodings": ("rope:bas=3",)}, "unknown option of 'rope' 'bas': did you mean 'base'"),
        ({"encodings": ("rope:rotary_dim=3",)}, "--encodings rope:rotary_dim=3: .*even rotary_dim"),
        ({"encodings": ("rope:",)}, "after the colon"),
        ({"encodings": ("rope:base",)}, "option=value"),
        ({"encodings": ("rope", "rope")}, "named once, got rope twice"),
        ({"encodings": ()}, "at least one encoding"),
        ({"encodings": ("all", "rope")}, "either all or a list"),
        ({"test_lengths": (32, 16)}, "must ascend without repeats, got 32 16"),
        ({"test_lengths": (16, 16)}, "must ascend without repeats"),
        ({"test_lengths": (0, 16)}, "must be positive numbers of bytes, got 0 16"),
        ({"test_lengths": ()}, "got none"),
        ({"heads": 3}, "--heads must divide --hidden, got 3 heads for a width of 16"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"train_length": 1}, "--train-length must be at least 2, got 1"),
        ({"seeds": (-1,)}, "--seeds must be numbers from 0"),
        ({"seeds": (0, 0)}, "named once, got 0 twice"),
        ({"learning_rate": 0.0}, "--learning-rate must be above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate must be above 0"),
        ({"methods": ("slidng",)}, "did you mean 'sliding'"),
        ({"stride": 4}, "--stride is of sliding windows"),
        ({"stride": 17, "methods": ("sliding",)}, "1 to the shortest test length 16, got 17"),
        ({"device": "tpu"}, "--device tpu: this machine has none"),
        ({"test_lengths": (16, 10_000)}, "bytes long and must be at least 80000"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_written(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(replace(TINY, **change), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_variants_and_compositions(tmp_path):
    labels = ("rope:base=500000", "rope:layout=half,base=5e5", "rope+fox")
    outcome, _ = run(replace(TINY, encodings=labels, steps=2), tmp_path)
    assert outcome.complete and [cell.label for cell, _ in outcome.trials] == list(labels)
    names = {path.name for path in (tmp_path / "cells").iterdir()}
    assert names == {"rope_base=500000-0", "rope_layout=half,base=5e5-0", "rope+fox-0"}
    saved = json.loads((tmp_path / "cells" / "rope_base=500000-0" / "config.json").read_text())
    assert saved["encoding"]["base"] == 500_000
    rows = read_rows(tmp_path / "results.parquet")
    assert list(rows.groupby("label", sort=False)["encoding"].first()) == ["rope", "rope", "rope+fox"]


def test_a_failed_cell_is_recorded_and_tried_again(tmp_path, monkeypatch):
    plain = runner.train

    def breaks(model, config, cell, *rest):
        if cell.label == "none":
            raise RuntimeError("the coffee is out\nand more")
        return plain(model, config, cell, *rest)

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
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"needs about 17 MB of disk, .* has 0 MB free"):
        plan(TINY, tmp_path / "elsewhere" / "run")
    assert not (tmp_path / "elsewhere").exists()


# ---- other processes ---------------------------------------------------------------------------------------------------

STUDY = """
import sys, os, signal
from pathlib import Path
from longitude.study import data, runner
from longitude.study.plan import plan
from longitude.study.config import StudyConfig
from longitude.study.data import Text
documents = [(str(i), " ".join(str(j * j) for j in range(i, i + 200)).encode()) for i in range(30)]
data.read_text = lambda name: Text(name, documents)
config = StudyConfig(encodings=("none", "rope"), train_length=16, test_lengths=(16, 32), steps=20, batch_size=2,
                     layers=1, hidden=16, heads=2, documents=4, device="cpu")

def killed_at(where, name, when):
    plain, calls = getattr(where, name), []
    def dies(*arguments, **named):
        calls.append(1)
        if len(calls) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **named)
    setattr(where, name, dies)
"""
RUN = "runner.study(plan(config, Path(sys.argv[1])))\n"


def process(code: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", STUDY + code, *arguments], stderr=subprocess.PIPE, text=True)


def test_one_writer_per_directory(tmp_path):
    holder = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX); f.write('7'); f.flush(); "
    holder += "print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="is being written by process 7; wait for it, or choose another --out"):
            run(TINY, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        other.kill()
    assert run(TINY, tmp_path)[0].complete  # a lock dies with its process


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_with_kill_9_again_and_again_the_rows_are_the_same(tmp_path):
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
        for cell in ("none-0", "rope-0"):
            assert (one / "cells" / cell / name).read_bytes() == (other / "cells" / cell / name).read_bytes()
