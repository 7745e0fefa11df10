"""`make gpu` without a GPU: shapes, rows that outlive what fails, verdicts; every cell, interpreted."""

import json
import os
import subprocess
import sys

import pytest
import torch

import gpu
from gpu_cells import Shape, flops


@pytest.mark.parametrize("mask", [{}, {"window": 7}, {"document": 12}])
def test_pairs_are_those_of_the_mask(mask):
    """Counted one by one; 4 head_dim operations for each, as papers count them."""
    shape, token = Shape(40, 64, tokens=40, **mask), torch.arange(40)
    offset = token[:, None] - token
    allowed = (offset >= 0) & (offset < mask.get("window", 40))
    if "document" in mask:
        allowed &= token[:, None] // 12 == token // 12
    assert shape.pairs == int(allowed.sum()) and shape.share == shape.pairs / 820
    assert flops(shape, False) == 4 * 64 * 32 * shape.pairs


class Broken:
    key, target, about = "a | 1", "FoX, forward", {"part": "a"}

    def measure(self):
        raise RuntimeError("no register is left\nand more")


class Whole(Broken):
    key = "a | 2"

    def measure(self):
        return {"ms": {"flash": 1.0, "triton": 2.0}, "score": 0.5, "notes": {}}


def test_a_cell_that_fails_leaves_a_row_and_the_next_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "cells", lambda part, device: iter([Broken(), Whole()]))
    for _ in range(2):  # nothing is measured twice
        assert gpu.measure("a", "cpu", gpu.Results(tmp_path / "gpu.json"), 60) == 0
    kept = gpu.Results(tmp_path / "gpu.json").rows
    assert [row["notes"] for row in kept] == [{"cell": "RuntimeError: no register is left"}, {}]
    assert capsys.readouterr().out.count("no register is left") == 1
    assert gpu.measure("a", "cpu", late := gpu.Results(tmp_path / "late.json"), -1) == 0
    assert {row["notes"]["cell"] for row in late.rows} == {"no time was left"}


def test_verdicts_are_of_the_worst_row():
    memory, fox = "memory at 8192, of a dense bias", "FoX, forward"
    scores = [(memory, 0.01, "small"), (memory, 0.03, "large")]
    scores += [(fox, 0.9, "fast"), (fox, 0.86, "slow"), (fox, None, "no")]
    judged = gpu.verdicts([{"target": target, "score": score, "key": key} for target, score, key in scores])
    by_name = {each["target"]: each for each in judged}
    assert (by_name[memory]["kept"], by_name[memory]["worst"]) == (False, "large")
    assert (by_name[fox]["kept"], by_name[fox]["worst"], by_name[fox]["unmeasured"]) == (True, "slow", 1)
    assert by_name["FIRE, forward"]["kept"] is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_cell_runs_interpreted(tmp_path):
    pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
    parts = "--parts checks attention rotation decode".split()
    environment = {**os.environ, "OUT": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, gpu.__file__, "--interpret", *parts]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"determinism", "memory", "attention", "rotation", "decode"}
    assert all(row["score"] == 1 for row in rows if row["part"] == "determinism")
    assert all(row["score"] > 0 and not row["notes"] for row in rows if row["part"] == "attention")
