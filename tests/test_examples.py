"""The examples and notebooks run, and what they make is what plain transformers loads."""

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import nbformat
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from make_notebooks import EXAMPLES, cells_of, names
from tests.extend.conftest import saved

EXAMPLE = EXAMPLES / "train_tiny_checkpoint.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mamba", "rwkv", "gpt_neox", "bloom", "gpt2"])
def test_a_tiny_checkpoint_is_trained(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On a library of three short files."""
    library = tmp_path / "library"
    (library / "tests").mkdir(parents=True)
    for i in range(3):
        code = f"def add{i}(a, b):\n    return a + b  # naïve\n\n" * 40
        (library / f"module{i}.py").write_text(code, encoding="utf-8")
    (library / "tests" / "test_it.py").write_text("never read")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    out = tmp_path / "out"
    size = ["--length", "64", "--layers", "2" if kind == "rwkv" else "1", "--width", "32", "--steps", "30"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--model", kind, "--out", str(out), *size])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    bits = float(capsys.readouterr().out.rsplit("bits per byte", 1)[0].split()[-1])
    assert 0.1 < bits < 6  # nothing learned is log2(258) = 8.0
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.endswith((".bin", ".pt")) for name in names)
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    text = "def add1(a, b):\n    return ünïcode\t→"
    tokens = tokenizer(text, return_tensors="pt")
    assert tokens["input_ids"].shape[1] == len(text.encode())
    assert tokenizer.decode(tokens["input_ids"][0]) == text
    assert model.config.use_cache and json.loads((out / "config.json").read_text())["model_type"] == kind
    made = model.generate(**tokens, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert made.shape[1] == tokens["input_ids"].shape[1] + 5
    assert torch.isfinite(model(**tokens).logits).all()


# ---- a course of skills -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_course_says_what_can_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every label is the token it stands at; what a copy is learned of was said before."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))  # as for who runs it: the folder is no package
    skills: Any = importlib.import_module("skills")
    text = "def add(a, b):\n    return a + b + 271828\n" * 200
    words = skills.tokenizer_of([text], 512)
    course = skills.Course(words, torch.tensor(words(text)["input_ids"]), 512, 10, seed=3)
    for exercise in (course.copy, course.pairs, course.chain, course.question):
        row = exercise(400, Random(1))
        learned = [i for i, label in enumerate(row.labels) if label != skills.NOT_LEARNED]
        assert len(row.ids) == len(row.labels) and learned
        assert all(row.labels[i] == row.ids[i] for i in learned)
    assert len(words.tokenize("271828")) == 3  # however often it was read
    copy = course.copy(0, Random(2))
    half = len(copy.ids) // 2
    assert copy.ids[half:] == copy.ids[:half] and copy.labels[half + 1 :] == copy.ids[1:half]
    assert {*copy.labels[: half + 1]} == {skills.NOT_LEARNED}


# ---- a training loop of one's own ---------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5", "nope"])
def test_a_training_loop_of_ones_own(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EXAMPLE.with_name("own_training_loop.py")
    assert "transformers" not in loop.read_text().partition("import argparse")[2]
    monkeypatch.setattr(sys, "argv", [str(loop), "--encoding", encoding, "--steps", "60"])
    found = runpy.run_path(str(loop))["main"]()
    chance = 1 / 8
    assert found.keys() == {24, 96} and 0 <= found[96] <= 1
    assert found[24] > (0.9 if encoding in ("rope", "t5") else 1.5 * chance)


# ---- a real checkpoint, whole --------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_checkpoint_goes_the_whole_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    saved("llama", tmp_path / "model")
    (tmp_path / "notes.txt").write_text("".join(f"Day {n}: wind {n * n % 97}.\n" for n in range(2000)))
    sizes = ["--to", "256", "--lengths", "512", "--trials", "1", "--window", "64", "--minutes", "9"]
    script = EXAMPLE.with_name("real_checkpoint.py")
    monkeypatch.setattr(sys, "argv", [str(script), "model", "notes.txt", *sizes, "--out", "real.json"])
    main = runpy.run_path(str(script))["main"]
    main()
    found, printed = json.loads((tmp_path / "real.json").read_text()), capsys.readouterr().out
    steps = ["check", "methods", "extend", "retrieval", "training"]
    assert [name for name in found if name in steps] == steps
    assert all(found[name]["processor_seconds"] > 0 and found[name]["command"] in printed for name in steps)
    assert {each["model"] for each in found["answers"]} == {"model", "extended"}
    assert len(found["training"]["result"]["tuned"]["losses"]) == 20
    monkeypatch.setattr("subprocess.run", None)
    main()
    assert json.loads((tmp_path / "real.json").read_text()) == found and capsys.readouterr().out == printed


# ---- notebooks -----------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", names())
def test_a_notebook_runs_from_the_top(name: str, tmp_path: Path):
    """Every assertion in it holds, and nothing warns. In a process of its own: what starts kernels has warnings of its own."""
    script = EXAMPLES.parent / "docs" / "make_notebooks.py"
    done = subprocess.run([sys.executable, script, name, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    stored, again = (nbformat.read(folder / f"{name}.ipynb", as_version=4) for folder in (EXAMPLES, tmp_path))
    assert [cell.source for cell in again.cells] == [cell.source for cell in stored.cells]
    kinds = [[[*output.get("data", {})] for output in cell.outputs] for cell in cells_of(again)]
    assert kinds == [[[*output.get("data", {})] for output in cell.outputs] for cell in cells_of(stored)]
