"""Whatever breaks a study, and wherever: nothing finished is lost, and the same command ends with the undisturbed rows."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from longitude.cli import main
from longitude.measure import read_rows
from longitude.study import ngrams, resume, run_trial, runner, train
from longitude.study.executors import InProcess, Workers
from longitude.study.record import SCHEMA, place_of
from longitude.study.results import read_run
from longitude.study.resume import LossLog
from longitude.study.tasks import text
from tests.study.conftest import NUMBERS, TINY, assert_same_runs, dying, process, run, trial_at

pytestmark = pytest.mark.usefixtures("numbers")
ONE = replace(TINY, encodings=("none",), test_lengths=(16, 32), steps=4)
TWO = replace(ONE, encodings=("none", "rope"))
FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")
ERROR, INTERRUPT, MEMORY = RuntimeError("no reason"), KeyboardInterrupt(), MemoryError()

FAULTS: dict[str, tuple[Any, str, int | str, BaseException]] = {
    "before study.json is written": (runner, "write_json", "study.json", FULL),
    "as study.json takes its name": (os, "replace", "study.json", BROKEN),
    "after study.json is written": (runner, "record_ngrams", 1, INTERRUPT),
    "while n-grams are counted": (ngrams, "ngram_bits", 1, MEMORY),
    "before any trial begins": (runner, "_gather", 1, INTERRUPT),
    "before trial.json is written": (run_trial, "write_json", "trial.json", FULL),
    "as status.json takes its name": (os, "replace", "status.json", INTERRUPT),
    "while the model is built": (train, "build_model", 1, ERROR),
    "at the first step": (LossLog, "append", 1, INTERRUPT),
    "while a loss is logged": (LossLog, "append", 4, FULL),
    "while the weights of a checkpoint are saved": (torch, "save", 3, FULL),
    "before a checkpoint is declared complete": (train, "seal", 3, ERROR),
    "as a checkpoint is declared complete": (os, "replace", "complete.json", FULL),
    "while files go to the disk": (resume, "flush", 9, BROKEN),
    "while the trained model is moved in": (os, "replace", "model.safetensors", INTERRUPT),
    "as the trained model is complete": (os, "replace", "config.json", FULL),
    "while the model is measured": (text, "losses_by_length", 1, MEMORY),
    "as documents.parquet takes its name": (os, "replace", "documents.parquet", INTERRUPT),
    "before the rows of a trial are written": (run_trial, "write_rows", 1, FULL),
    "as gathered rows take their name": (os, "replace", "results.parquet", BROKEN),
    "before checkpoints are removed": (run_trial, "remove_checkpoints", 1, ERROR),
    "before the loss that chooses a learning rate is measured": (run_trial.TrialRun, "select", 1, ERROR),
    "before a learning rate is chosen": (runner, "_choose", 1, INTERRUPT),
    "before a trial is done": (run_trial.TrialRun, "record", 4, INTERRUPT),
    "before rows are gathered": (runner, "_gather", 2, INTERRUPT),
    "while rows are gathered": (runner, "write_rows", 2, FULL),
}
"""Where a call of a function, by its number or by the name of a path, raises."""


@pytest.fixture(scope="module")
def studies(tmp_path_factory) -> tuple[Path, Path]:
    """A study of one encoding, and one of two that nothing broke."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("longitude.study.data.read_texts", lambda data: NUMBERS)
        assert run(ONE, one)[0].complete and run(TWO, two)[0].complete
    return one, two


@pytest.fixture
def one(studies, tmp_path) -> Path:
    """A study of one encoding, to which another is added."""
    shutil.copytree(studies[0], tmp_path / "run", copy_function=shutil.copy2)
    return tmp_path / "run"


def ending_of(path: Path) -> str:
    """What the study ends with: an error that it raises, or its last note."""
    try:
        return run(TWO, path)[1][-1]
    except ValueError as error:
        return str(error)
    except BaseException as error:
        return repr(error)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_command_ends_with_the_rows_that_no_fault_changes(fault, studies, one, monkeypatch):
    where, name, when, error = FAULTS[fault]
    struck: list[BaseException] = []

    def strike():
        struck.append(error)
        raise error

    study = json.loads((one / "study.json").read_text())
    del study["ngrams"]
    (one / "study.json").write_text(json.dumps(study))
    with monkeypatch.context() as patched:
        patched.setattr(where, name, dying(getattr(where, name), when, strike))
        words = ending_of(one)
    full = f"no space left on the disk of {one}; free some, then the same command continues where it stopped"
    failed = f"{trial_at(one, 'rope', 0).title}: failed, {type(error).__name__}: "
    assert words in (repr(error), full if error is FULL else "") or words.startswith(failed)
    assert struck == [error]
    assert_kept(studies[0], one)
    assert_mended(studies[1], one, studies[0])


REMEDY = "move {folder} away, and the same `longitude study` trains this one again"
CUT: dict[str, str | None] = {
    "results.parquet": None,
    "rope/results.parquet": None,
    "rope/documents.parquet": None,
    "rope/trainer/trainer_state.json": None,
    "rope/losses.jsonl": f"losses.jsonl ends at step [0-3] of 4; {REMEDY}",
    "rope/status.json": f"status.json is not readable JSON .*; {REMEDY}",
    "rope/trial.json": f"trial.json is not readable JSON .*; {REMEDY}",
    "rope/model.safetensors": f"{{folder}} holds no whole model .*; {REMEDY}",
    "rope/config.json": f"{{folder}} holds no whole model .*; {REMEDY}",
    "study.json": "study.json is not readable JSON .*; restore it from a copy, or name another --out",
}
"""Files of a study that is done: None where the same command makes them again, else how they are refused."""


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kept", [0.5, 0])
@pytest.mark.parametrize("name", CUT)
def test_a_file_that_a_power_cut_left_short_is_made_again_or_refused_with_what_to_do(name, kept, studies, tmp_path):
    path = shutil.copytree(studies[1], tmp_path / "run", copy_function=shutil.copy2)
    trial = trial_at(path, "rope", 0)
    file = trial.folder / name.removeprefix("rope/") if name.startswith("rope/") else path / name
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole))])
    if "whole model" in (CUT[name] or ""):  # nothing reads it before it is to be measured again
        (trial.folder / "documents.parquet").unlink()
    if (message := CUT[name]) is not None:
        with pytest.raises(ValueError, match=message.format(folder=re.escape(str(trial.folder)))):
            run_and_read(path)
        assert_kept(studies[1], path)
        if name == "study.json":
            file.write_bytes(whole)
        else:
            trial.folder.rename(tmp_path / "away")
    assert_mended(studies[1], path, studies[1])
    assert not read_run(path).undone


def run_and_read(path: Path) -> None:
    """As the command line does; a trial that failed raises its reason."""
    for _, status in run(TWO, path)[0].trials:
        if status.status == "failed":
            raise ValueError(status.reason)
    read_run(path)


def assert_mended(whole: Path, path: Path, before: Path) -> None:
    """The same command ends with the rows of the undisturbed study; what was finished before stays as it was."""
    assert run(TWO, path)[0].complete
    assert_same_runs(whole, path)
    assert_kept(before, path)
    records = [json.loads((each / "study.json").read_text()) for each in (whole, path)]
    assert all(records[0][name] == records[1][name] for name in ("configuration", "data", "recipe", "ngrams"))
    assert not [left for left in path.rglob(".*") if left.name not in (".lock", ".workers")]


def assert_kept(before: Path, after: Path) -> None:
    """The trial that was finished was neither trained nor measured again, and its rows are those of the study."""
    folders = [trial_at(path, "none", 0).folder for path in (before, after)]
    for path in folders[0].rglob("*.*"):
        assert (folders[1] / path.relative_to(folders[0])).stat().st_mtime_ns == path.stat().st_mtime_ns, path
    rows = [read_rows(path / "results.parquet").query("label == 'none'") for path in (before, after)]
    pd.testing.assert_frame_equal(*rows)


# ---- pure ----------------------------------------------------------------------------------------------------------------
def test_a_study_is_a_function_of_its_configuration_and_seeds(studies, tmp_path):
    """Another folder, another order of encodings, another time."""
    assert run(replace(TWO, encodings=("rope", "none")), tmp_path / "again")[0].complete
    assert_same_rows(studies[1], tmp_path / "again")


@pytest.mark.slow
def test_rows_depend_on_neither_seeds_nor_workers_beside_them(tmp_path):
    one, other = replace(TWO, seeds=(0, 1)), replace(TWO, seeds=(1, 0), encodings=("rope", "none"))
    assert run(one, tmp_path / "one")[0].complete
    for name, executor in (("in process", InProcess()), ("two workers", Workers(2))):
        assert run(other, tmp_path / name, executor=executor)[0].complete
        assert_same_rows(tmp_path / "one", tmp_path / name)


def assert_same_rows(one: Path, other: Path) -> None:
    """Up to their order."""
    tables = [read_rows(path / "results.parquet").drop(columns=["commit", "train_seconds"]) for path in (one, other)]
    keys = ["label", "seed", "method", "metric", "length", "position_from"]
    tables = [table.sort_values(keys, ignore_index=True) for table in tables]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_clocks_that_run_backwards_and_files_of_the_future_change_nothing(studies, one, monkeypatch):
    for path in one.rglob("*"):
        os.utime(path, (2**32, 2**32))
    clock = itertools.count(2e9, -3600)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    monkeypatch.setattr(runner, "_now", lambda: datetime.fromtimestamp(time.time(), UTC).isoformat())
    assert run(TWO, one)[0].complete
    assert_same_runs(studies[1], one)
    status = trial_at(one, "rope", 0).status
    assert status.training_seconds > 0 and status.measuring_seconds > 0


# ---- killed --------------------------------------------------------------------------------------------------------------
KILLS = {
    "training": "import longitude.study.resume as c; killed_at(c.LossLog, 'append', 3)\n",
    "measuring": "from longitude.study.tasks import text; killed_at(text, 'losses_by_length', 1)\n",
    "gathering": "killed_at(runner, 'write_rows', 2)\n",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kill", KILLS)
def test_killed_with_kill_9_nothing_finished_is_lost(kill, studies, one):
    study = "runner.study(plan(replace(config, steps=4), Path(sys.argv[1])))\n"
    killed = process(KILLS[kill] + study, str(one))
    _, errors = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, errors
    assert_kept(studies[0], one)
    assert_mended(studies[1], one, studies[0])


# ---- the command line ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["report.html", "by-length.svg", "training.png"])
def test_a_report_that_breaks_is_written_by_the_same_command(name, studies, tmp_path, monkeypatch, capsys):
    path = shutil.copytree(studies[1], tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dying(os.replace, name, lambda: raise_(FULL)))
        assert main(["report", str(path)]) == 2
    assert "longitude: No space left on device" in capsys.readouterr().err
    assert not (path / "report.html").exists() and not list(path.rglob("*.tmp"))
    assert main(["report", str(path)]) == 0
    assert (path / "report.html").exists() and not list(path.rglob(".*.tmp"))


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "study.json",
            {"configuration": 3},
            "study.json lacks configuration; restore it from a copy, or name another --out",
        ),
        ("study.json", {"data": []}, "study.json lacks data; restore it from a copy"),
        (
            "study.json",
            {"schema": SCHEMA + 1},
            f"has schema {SCHEMA + 1}, of another release.*, or name another",
        ),
        ("status.json", {"later": 1}, f"status.json is not of this release .*'later'.*; {REMEDY}"),
    ],
)
def test_records_of_other_releases_are_refused_with_the_reason(file, change, message, studies, tmp_path):
    path = shutil.copytree(studies[1], tmp_path / "run")
    folder = trial_at(path, "rope", 0).folder
    record = (path if file == "study.json" else folder) / file
    record.write_text(json.dumps(json.loads(record.read_text()) | change))
    before = record.read_bytes()
    for call in (run_and_read, read_run, *([partial(place_of, TWO, TWO)] if file == "study.json" else [])):
        with pytest.raises(ValueError, match=message.format(folder=re.escape(str(folder)))):
            call(path)
    assert record.read_bytes() == before
