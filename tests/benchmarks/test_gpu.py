"""`make gpu` without a GPU: shapes, rows that outlive what fails, verdicts; every cell, interpreted."""

import json
import os
import subprocess
import sys

import pytest
import torch

import gpu
from gpu_cells import Shape, flops
from tests.docs.test_snippets import ROOT


# ---- shapes, and the page ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mask", [{}, {"window": 7}, {"document": 12}])
def test_pairs_are_those_of_the_mask(mask):
    """Counted one by one; 4 head_dim operations for each, as papers count them."""
    shape = Shape(40, 64, tokens=40, **mask)
    token = torch.arange(40)
    offset = token[:, None] - token
    allowed = (offset >= 0) & (offset < mask.get("window", 40))
    if "document" in mask:
        allowed &= token[:, None] // 12 == token // 12
    assert shape.pairs == int(allowed.sum()) and shape.share == shape.pairs / 820
    assert flops(shape, False) == 4 * 64 * 32 * shape.pairs


# ---- rows and verdicts -------------------------------------------------------------------------------------------------
class Broken:
    key, target = "a | 1", "FoX, forward"
    about = {"part": "a", "n": 1}

    def measure(self):
        raise RuntimeError("no register is left\nand more")


class Whole(Broken):
    key = "a | 2"

    def measure(self):
        return {"ms": {"flash": 1.0, "triton": 2.0}, "score": 0.5, "notes": {}}


def test_a_cell_that_fails_leaves_a_row_and_the_next_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "cells", lambda part, device: iter([Broken(), Whole()]))
    results = gpu.Results(tmp_path / "gpu.json")
    assert gpu.measure("a", "cpu", results, 60) == 0
    kept = gpu.Results(tmp_path / "gpu.json").rows
    assert [row["notes"] for row in kept] == [{"cell": "RuntimeError: no register is left"}, {}]
    assert "[cell: RuntimeError: no register is left]" in capsys.readouterr().out
    assert gpu.measure("a", "cpu", results, 60) == 0 and capsys.readouterr().out == ""  # nothing is measured twice
    assert gpu.measure("a", "cpu", gpu.Results(tmp_path / "late.json"), -1) == 0
    assert {row["notes"]["cell"] for row in gpu.Results(tmp_path / "late.json").rows} == {"no time was left"}


def row(target, score, key="x"):
    return {
        "part": "attention",
        "key": key,
        "target": target,
        "score": score,
        "notes": {} if score else {"cell": "why"},
    }


def test_verdicts_are_of_the_worst_row():
    memory, fox = "memory at 8192, of a dense bias", "FoX, forward"
    rows = [row(memory, 0.01), row(memory, 0.03, "large"), row(fox, 0.9), row(fox, 0.86, "slow"), row(fox, None)]
    found = {each["target"]: each for each in gpu.verdicts(rows)}
    assert (found[memory]["kept"], found[memory]["worst"]) == (False, "large")
    assert (found[fox]["kept"], found[fox]["worst"], found[fox]["unmeasured"]) == (True, "slow", 1)
    assert found["FIRE, forward"]["kept"] is None and found["FIRE, forward"]["worst"] == "no row"
    shown = gpu.table([found[memory], found[fox]])
    assert shown.endswith(f"missed or not measured: {memory}") and "MISSED" in shown and "1/2" not in shown


# ---- the command -------------------------------------------------------------------------------------------------------
def ran(folder, *arguments, **environment):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--interpret", *arguments]
    given = {**os.environ, "OUT": str(folder), "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=given, cwd=folder)
    return done, json.loads((folder / "gpu.json").read_text())


@pytest.mark.slow
def test_every_cell_runs_interpreted(tmp_path):
    pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
    done, found = ran(tmp_path, "--parts", "checks", "attention", "rotation", "decode")
    assert done.returncode == 0, done.stdout + done.stderr
    measured = {row["key"]: row for row in found["rows"]}
    assert {row["part"] for row in found["rows"]} == {
        "determinism",
        "memory",
        "attention",
        "rotation",
        "decode",
    }
    assert all(row["score"] == 1 for row in found["rows"] if row["part"] == "determinism")
    for key, row in measured.items():
        if row["part"] == "attention":
            assert {"flash"} < row["ms"].keys() and row["notes"] == {} and row["score"] > 0, key
    assert "no number means anything" in done.stdout
