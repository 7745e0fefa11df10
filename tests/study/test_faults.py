"""Whatever breaks a study, and wherever: nothing finished is lost, and the same command ends with the undisturbed rows."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from longitude.measure import read_rows
from longitude.study import run_trial, runner, train
from longitude.study.executors import Workers, in_process
from longitude.study.results import read_run
from longitude.study.resume import LossLog
from longitude.study.tasks import text
from tests.study.conftest import SHORT, assert_same_runs, dying, run, trial_of, units_in

pytestmark = pytest.mark.usefixtures("numbers")
FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")
ERROR, INTERRUPT, MEMORY = RuntimeError("no reason\nand more"), KeyboardInterrupt(), MemoryError()

FAULTS: dict[str, tuple[Any, str, int | str, BaseException]] = {
    "as question.json takes its name": (os, "replace", "question.json", BROKEN),
    "while the model is built": (train, "build_model", 1, ERROR),
    "while a loss is logged": (LossLog, "append", 4, FULL),
    "while the weights of a checkpoint are saved": (torch, "save", 3, FULL),
    "as a checkpoint is declared complete": (os, "replace", "complete.json", FULL),
    "as the training is moved in": (os, "rename", 1, INTERRUPT),
    "while the model is measured": (text, "losses_by_length", 1, MEMORY),
    "before the rows of a trial are written": (run_trial, "write_rows", 1, FULL),
    "before a learning rate is chosen": (runner, "choices", 1, INTERRUPT),
    "while rows are gathered": (runner, "write_rows", 1, FULL),
}
"""Where a call of a function, by its number or by the name of a path, raises; tests/runs has every moment of a unit."""


@pytest.fixture
def half(finished, tmp_path) -> Path:
    """The study, of which one label is finished."""
    path = shutil.copytree(finished, tmp_path / "run", copy_function=shutil.copy2)
    for folder in units_in(path, "rope").values():
        shutil.rmtree(folder)
    return path


def ending_of(path: Path) -> str:
    """What the study ends with: an error that it raises, or its last note."""
    try:
        return run(SHORT, path)[1][-1]
    except ValueError as error:
        return str(error)
    except BaseException as error:
        return repr(error)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_command_ends_with_the_rows_that_no_fault_changes(fault, finished, half, monkeypatch):
    where, name, when, error = FAULTS[fault]
    struck: list[BaseException] = []

    def strike():
        struck.append(error)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(where, name, dying(getattr(where, name), when, strike))
        words = ending_of(half)
    full = f"no space left on the disk of {half}; free some, then the same command continues where it stopped"
    failed = f"{trial_of('rope').title}: failed, {type(error).__name__}: "
    assert words in (repr(error), full if error is FULL else "") or words.startswith(failed)
    assert struck == [error] and "\n" not in words
    for path in half.rglob("failure.json"):
        assert "Traceback" in json.loads(path.read_text())["trace"]
    assert_kept(finished, half)
    assert_mended(finished, half)


def assert_mended(whole: Path, path: Path) -> None:
    """The same command ends with the rows of the undisturbed study; what was finished before stays as it was."""
    assert run(SHORT, path)[0].complete
    assert_same_runs(whole, path)
    assert_kept(whole, path)
    records = [read_run(each).study for each in (whole, path)]
    assert all(records[0][name] == records[1][name] for name in ("configuration", "data", "recipe", "ngrams", "trials"))
    assert not [left for left in path.rglob(".*") if left.name != ".lock"] + [*path.rglob("failure.json")]


def assert_kept(before: Path, after: Path) -> None:
    """The trial that was finished was neither trained nor measured again, and its rows are those of the study."""
    for folder in units_in(before, "nope").values():
        for path in folder.rglob("*.*"):
            assert (after / path.relative_to(before)).stat().st_mtime_ns == path.stat().st_mtime_ns, path


# ---- pure ----------------------------------------------------------------------------------------------------------------
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
def test_rows_depend_on_neither_seeds_nor_workers_beside_them(tmp_path):
    one, other = replace(SHORT, seeds=(0, 1)), replace(SHORT, seeds=(1, 0), encodings=("rope", "nope"))
    assert run(one, tmp_path / "one")[0].complete
    for name, executor in (("in process", in_process), ("two workers", Workers(2))):
        assert run(other, tmp_path / name, executor=executor)[0].complete
        assert_same_rows(tmp_path / "one", tmp_path / name)


def assert_same_rows(one: Path, other: Path) -> None:
    """Up to their order."""
    keys = ["label", "seed", "method", "metric", "length", "position_from"]
    tables = [read_rows(path / "results.parquet").sort_values(keys, ignore_index=True) for path in (one, other)]
    pd.testing.assert_frame_equal(*(of.drop(columns=["commit", "train_seconds"]) for of in tables), check_exact=True)
