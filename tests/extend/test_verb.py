"""The verb with the search and with fine-tuning: what they find is what is written, and nothing stays beside it."""

import json
import sys

import pytest
import torch

import longitude as lg
from longitude.checkpoints.positions import rotary_of
from longitude.checkpoints.source import open_source
from longitude.extend import search
from longitude.extend.plan import Target, plan_extension
from longitude.extend.search import SearchResult
from longitude.extend.weights import write_checkpoint
from longitude.positions.scaling import LongRoPE
from tests.extend.conftest import loaded, logits

LENGTH = 64


@pytest.fixture
def small(monkeypatch):
    """A search of few windows."""
    monkeypatch.setattr("longitude.extend.search.TOKENS", 512)


@pytest.mark.slow
def test_longrope(small, checkpoint, command, text, tmp_path) -> None:
    """Both lists of the search stand in config.json and in a JSON beside it; short texts are as they were."""
    out = tmp_path / "out"
    given = ["--to", 2 * LENGTH, "--method", "longrope", "--text", text, "--budget", 0.01]
    code, said, _ = command(checkpoint("llama"), *given, "--out", out, "--json")
    assert code == 0
    found = json.loads(said)
    assert found["search"]["loss"] <= min(found["search"]["starts"].values())
    rope = json.loads((out / "config.json").read_text())["rope_parameters"]
    saved = json.loads((out / "longrope_search.json").read_text())
    assert rope["rope_type"] == "longrope" and rope["original_max_position_embeddings"] == LENGTH
    assert all(rope[name] == saved["found"][name] for name in ("long_factor", "short_factor"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert logits(loaded(out), 2 * LENGTH).isfinite().all()
    if rope["attention_factor"] == 1:
        torch.testing.assert_close(logits(loaded(out), LENGTH), logits(loaded(checkpoint("llama")), LENGTH))
    code, _, said = command(checkpoint("llama"), "--to", 2 * LENGTH, "--method", "longrope", "--dry-run")
    assert code == 2 and "--dry-run" in said


@pytest.mark.slow
def test_search_goes_on_after_an_interruption(small, checkpoint, command, text, tmp_path, monkeypatch) -> None:
    given = ["--to", 2 * LENGTH, "--method", "longrope", "--text", text, "--budget", 0.01, "--no-measure"]
    code, *_ = command(checkpoint("llama"), *given, "--out", tmp_path / "out")
    assert code == 2  # the search needs the text

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    given.remove("--no-measure")
    monkeypatch.setattr(sys.modules["longitude.extend.extend"], "_write", interrupted)
    assert command(checkpoint("llama"), *given, "--out", tmp_path / "out")[0] == 130
    tried = tmp_path / ".out.search" / "tried.jsonl"
    before = tried.read_text()
    assert before and not (tmp_path / "out").exists()
    monkeypatch.undo()
    monkeypatch.setattr("longitude.extend.search.TOKENS", 512)
    tries = []
    loss = search._loss
    monkeypatch.setattr(search, "_loss", lambda *args: tries.append(1) or loss(*args))
    given = {"to": 2 * LENGTH, "method": "longrope", "text": str(text), "budget": 0.01}
    lg.extend.extend(checkpoint("llama"), tmp_path / "out", **given)
    assert not tries and (tmp_path / "out").is_dir() and not tried.exists()


def test_longrope_at_factor_one(checkpoint, command, tmp_path) -> None:
    source, out = checkpoint("llama"), tmp_path / "out"
    assert command(source, "--to", LENGTH, "--method", "longrope", "--out", out, "--no-measure")[0] == 0
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("nested", [False, True])
def test_longrope_is_written_as_found(nested, checkpoint, tmp_path) -> None:
    """Through a plan alone, for layer types too: transformers computes both lists."""
    kind = "gemma3" if nested else "llama"
    scheme = LongRoPE([1.0] * 8, [1.0 + k / 4 for k in range(8)], LENGTH, 4.0, 4 * LENGTH, 1.1, follow="sequence")
    source = open_source(str(checkpoint(kind)))
    result = SearchResult(scheme, 1.0, {}, [], 0)
    plan = plan_extension(source, Target(to=4 * LENGTH, method="longrope"), result, must_fit=False)
    write_checkpoint(source, tmp_path / "out", plan.changes, plan.config)
    rotary = rotary_of(loaded(tmp_path / "out"))
    prefix = "full_attention_" if nested else ""
    assert getattr(rotary, f"{prefix}attention_scaling") == 1.1 == plan.attention_factor
    names = [{"layer_type": "full_attention"} if nested else {}]
    rotary(torch.zeros(1, 4 * LENGTH, 4), torch.arange(4 * LENGTH)[None], **names[0])
    base = plan.base or 0.0
    want = base ** (-torch.arange(8) / 8) / torch.tensor(scheme.long_factor)
    torch.testing.assert_close(getattr(rotary, f"{prefix}inv_freq"), want, rtol=2e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--positions", "skipped"], ["--lora"]])
def test_fine_tune(more, checkpoint, command, text, tmp_path) -> None:
    out = tmp_path / "out"
    given = ["--to", 2 * LENGTH, "--method", "yarn", "--fine-tune", text, "--steps", 3, "--learning-rate", 0.01]
    code, said, _ = command(checkpoint("llama"), *given, *more, "--out", out, "--text", text, "--json")
    found = json.loads(said)
    assert code == 0 and len(found["tuned"]["losses"]) == 3
    rope = json.loads((out / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "yarn"
    assert (logits(loaded(out), 2 * LENGTH) - logits(loaded(checkpoint("llama")), 2 * LENGTH)).abs().max() > 1e-4
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
