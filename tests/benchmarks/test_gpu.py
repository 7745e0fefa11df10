"""`make gpu` without a GPU: shapes, rows that outlive what fails, verdicts; every cell, interpreted."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import gpu
import gpu_laws
from gpu_shapes import Shape, flops
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


# ---- laws ---------------------------------------------------------------------------------------------------------------
def test_outcomes_are_read_off_what_pytest_prints():
    text = """
tests/a.py::test_one[x, y-causal] PASSED                       [ 10%]
tests/a.py::test_one[z] SKIPPED (it has no such (thing))       [ 20%]
[gw3] [ 30%] PASSED tests/a.py::test_two[torch.float16-padded, packed]
[gw1] [ 40%] FAILED tests/a.py::test_two[b]
tests/a.py::test_three
FAILED tests/a.py::test_two[b] - AssertionError: no
"""
    found = gpu_laws.outcomes(text)
    assert {word: len(tests) for word, tests in found.items()} == {"PASSED": 2, "SKIPPED": 1, "FAILED": 1}
    assert found["FAILED"] == {"tests/a.py::test_two[b]"}


def test_files_of_laws_are_there_and_those_that_cannot_be_imported_are_left_out(tmp_path):
    files = [each for suites in (gpu_laws.ON_CUDA, gpu_laws.INTERPRETED) for suite in suites.values() for each in suite]
    assert all((ROOT / each).exists() for each in files if each.endswith(".py"))
    (tmp_path / "a.py").write_text("import torch\nfrom hypo_thesis import given\n")
    assert gpu_laws.imports(ROOT / files[0]) and not gpu_laws.imports(tmp_path / "a.py")


@pytest.mark.slow
def test_processes_share_a_suite(tmp_path, monkeypatch):
    """Each test runs once; what fails is in the row, and a part without tests is no fault."""
    (tmp_path / "test_a.py").write_text("""
import pytest

@pytest.mark.parametrize("n", range(3))
def test_number(n):
    assert n != 2

@pytest.mark.slow
def test_slow(): ...
""")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    monkeypatch.setattr(gpu_laws, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_laws, "SHARES", {"few": 32})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    (row,) = gpu_laws.run_suites({"few": ["test_a.py", "-m", "not slow"]}, tmp_path, 60, {})
    assert row["passed"] == 2 and row["failed"] == ["test_a.py::test_number[2]"] and row["notes"] == {}
    assert len([*tmp_path.glob("laws-few-*.log")]) == 4  # one of them without tests


def test_kernels_are_compiled_ahead(tmp_path, monkeypatch, capsys):
    """In a process for each kind; one that fails, or takes too long, is named and stops nothing."""
    import gpu_cells

    code = "import sys, time; sys.exit('no register') if 't5' in sys.argv else time.sleep(60 * ('fox' in sys.argv))"
    (tmp_path / "gpu.py").write_text(code)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "gpu.py"))
    monkeypatch.setattr(gpu_cells, "ENCODINGS", ("nope", "t5", "fox"))
    results = gpu.Results(tmp_path / "gpu.json")
    gpu.compile_ahead(argparse.Namespace(device="cuda", out=tmp_path / "gpu.json"), results, 3)
    (row,) = results.rows
    assert row["notes"] == {
        **{f"t5 {d}": "no register" for d in (64, 128)},
        **{f"fox {d}": "its time was over" for d in (64, 128)},
    }
    assert "2 of 6 kinds of kernels compiled" in capsys.readouterr().out


def test_compute_sanitizer_runs_where_it_is(tmp_path, monkeypatch):
    """For races and for memory, over a call whose bias learns; what it finds breaks the row."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$@" >> calls\ncase "$2" in racecheck) echo a race; exit 9;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu_laws, "ON_CUDA", {})
    monkeypatch.setattr(gpu_laws, "ROOT", tmp_path)
    rows = {row["suite"]: row for row in gpu_laws.run_suites(gpu_laws.ON_CUDA, tmp_path, 60, {})}
    assert rows["racecheck"]["notes"] == {"pytest": "a race"} and rows["memcheck"]["notes"] == {}
    asked = (tmp_path / "calls").read_text()
    assert "--tool racecheck --error-exitcode 9" in asked and "--tool memcheck" in asked
    assert 'backend="triton"' in gpu_laws.CALL and "T5Bias" in gpu_laws.CALL and "autograd.grad" in gpu_laws.CALL


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


def test_a_cell_without_its_package_is_skipped(tmp_path, monkeypatch):
    """It says which, and is not broken."""
    cell = Whole()
    cell.measure = lambda: importlib.import_module("no_such_package.of_it")
    monkeypatch.setattr(gpu, "cells", lambda part, device: iter([cell]))
    results = gpu.Results(tmp_path / "gpu.json")
    gpu.measure("a", "cpu", results, 60)
    assert results.rows[0]["notes"] == {"skipped": "it needs the package no_such_package, which is not here"}


def test_a_process_that_dies_goes_on_behind_the_cell(tmp_path, monkeypatch):
    """The row of a cell is there before it ends."""
    died = Whole()
    died.measure = lambda: os._exit(7)
    died.key = "a | 0"
    monkeypatch.setattr(gpu, "cells", lambda part, device: iter([died, Whole()]))
    if (child := os.fork()) == 0:
        gpu.measure("a", "cpu", gpu.Results(tmp_path / "gpu.json"), 60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gpu.measure("a", "cpu", gpu.Results(tmp_path / "gpu.json"), 60)
    assert [row["notes"] for row in gpu.Results(tmp_path / "gpu.json").rows] == [
        {"cell": "it began, and did not end"},
        {},
    ]


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


def test_targets_are_those_of_cells():
    """No cell names a target that is not judged, and none that is judged has no cell."""
    import gpu_cells

    machine = gpu_cells.Machine("cuda")
    cells = [
        *gpu_cells.checks(machine),
        *gpu_cells.attention_cells(machine),
        *gpu_cells.rotation_cells(machine),
    ]
    cells += gpu_cells.decoding_cells(machine)
    assert {cell.target for cell in cells} - {None} == gpu.TARGETS.keys()
    assert len({cell.key for cell in cells}) == len(cells)
    shapes = {(cell.about["length"], cell.about["head_dim"]) for cell in gpu_cells.attention_cells(machine)}
    assert shapes == {(length, d) for length in (1024, 2048, 4096, 8192, 16384) for d in (64, 128)}


# ---- the command -------------------------------------------------------------------------------------------------------
NEEDED = set(
    "torch functorch torchgen triton jaxtyping wadler_lindig pytest _pytest py pluggy iniconfig packaging pygments numpy sympy "
    "mpmath networkx jinja2 markupsafe filelock fsspec typing_extensions setuptools".split()
)
"""Packages of a Python that has torch, triton, jaxtyping and pytest, with what these need."""


def alone(folder, triton):
    """PYTHONPATH of a Python that has these and no others."""
    links = folder / "packages"
    links.mkdir()
    for each in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if re.split(r"-\d|\.", each.name)[0] in NEEDED:
            (links / each.name).symlink_to(each)
    code = f"""
import os, sys
asked = os.environ["PYTHONPATH"].split(os.pathsep)
sys.path[:] = [each for each in sys.path if each in asked or not each.endswith(("site-packages", "src"))]
sys.path.append({str(links)!r})
"""  # without packages, and without what is installed from its source
    (folder / "sitecustomize.py").write_text(code)
    elsewhere = Path(triton.__file__).parents[1]
    return os.pathsep.join(
        [str(folder), *([] if elsewhere.samefile(sysconfig.get_paths()["purelib"]) else [str(elsewhere)])]
    )


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
    assert "no number means anything" in done.stdout and (tmp_path / "gpu.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)  # it has the nine minutes of the command
def test_it_needs_torch_triton_jaxtyping_and_pytest_alone(tmp_path):
    triton = pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
    done, found = ran(tmp_path, "--parts", "laws", "checks", "decode", PYTHONPATH=alone(tmp_path, triton))
    rows = {row["key"]: row for row in found["rows"]}
    assert rows["laws | triton"]["passed"] > 20 and not rows["laws | triton"]["failed"], done.stdout + done.stderr
    assert rows["laws | rotation"]["passed"] and not rows["laws | rotation"]["failed"]
    assert rows["decode | 1"]["notes"] == {"skipped": "it needs the package transformers, which is not here"}
    assert "no chart: altair is not here" in done.stdout and ", 0 broken" in done.stdout
