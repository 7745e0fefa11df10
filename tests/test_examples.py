"""The examples run, and what they make is what plain transformers loads."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_tiny_checkpoint.py"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """run("--model", "llama", ...) -> what the example leaves behind, trained on a library of three short files."""
    library = tmp_path / "library"
    (library / "tests").mkdir(parents=True)
    for i in range(3):
        (library / f"module{i}.py").write_text(
            f"def add{i}(a, b):\n    return a + b  # naïve\n\n" * 40, encoding="utf-8"
        )
    (library / "tests" / "test_it.py").write_text("never read")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})

    def example(*options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options])
        return runpy.run_path(str(EXAMPLE), run_name="__main__")

    return example


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["llama", "mamba", "rwkv", "gpt_neox", "bloom", "gpt2"])
def test_a_tiny_checkpoint_is_trained(kind: str, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    size = ["--length", "64", "--layers", "1", "--width", "32", "--steps", "30"]
    run("--model", kind, "--out", str(out), *size)
    bits = float(capsys.readouterr().out.rsplit("bits per byte", 1)[0].split()[-1])
    assert 0.1 < bits < 5  # nothing learned is log2(258) = 8.0
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


@pytest.mark.parametrize(
    ("out", "more", "words"), [("", (), "does not exist"), ("out", ("--width", "33"), "multiple of 32")]
)
def test_wrong_use(
    out: str, more: tuple, words: str, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        run("--out", str(tmp_path / out), *more)
    assert refused.value.code == 2 and words in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- a training loop of one's own ---------------------------------------------------------------------------------------------
@pytest.mark.one_in(4)
@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5", "none"])
def test_a_training_loop_of_ones_own(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch alone it learns, and what it finds at the longer length is a share."""
    loop = EXAMPLE.with_name("own_training_loop.py")
    assert "transformers" not in loop.read_text().partition("import argparse")[2]
    monkeypatch.setattr(sys, "argv", [str(loop), "--encoding", encoding, "--steps", "60"])
    found = runpy.run_path(str(loop))["main"]()
    chance = 1 / 8
    assert found.keys() == {24, 96} and 0 <= found[96] <= 1
    assert found[24] > (0.9 if encoding in ("rope", "t5") else 1.5 * chance)
