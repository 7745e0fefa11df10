"""Models that know positions in other ways: learned tables are stretched, ALiBi is measured, all others are told."""

import json

import pytest
import torch
from safetensors.torch import load_file

from longitude.checkpoints.positions import table_of
from longitude.positions.absolute import Learned
from tests.extend.conftest import loaded

LENGTH = 64
OFFSETS = {"gpt2": 0, "opt": 2, "bert": 0, "roberta": 2}


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("length", [LENGTH + 1, 3 * LENGTH])
def test_learned_table(kind, length, checkpoint, command, tmp_path) -> None:
    """Linear along positions, ends where they were; the rows that stand for no position stay; the model reads every position."""
    source, out = checkpoint(kind), tmp_path / "out"
    code, said, error = command(source, "--to", length, "--method", "linear", "--out", out, "--no-measure")
    assert (code, error) == (0, "")
    before, after = loaded(source), loaded(out)
    name, old = table_of(before)
    new = after.get_submodule(name)
    offset = OFFSETS[kind]
    assert new.num_embeddings == offset + length
    assert torch.equal(new.weight[:offset], old.weight[:offset])
    rows = old.weight[offset:].double()
    place = torch.arange(length, dtype=torch.float64) * (LENGTH - 1) / (length - 1)
    below = place.floor().long().clamp(max=LENGTH - 2)
    want = torch.lerp(rows[below], rows[below + 1], (place - below)[:, None])
    torch.testing.assert_close(new.weight[offset:].double(), want, atol=1e-6, rtol=0)
    assert torch.equal(new.weight[[offset, -1]], old.weight[[offset, -1]])
    with torch.inference_mode():
        assert after(input_ids=torch.randint(3, 250, (1, length))).logits.isfinite().all()
    said = json.loads((out / "config.json").read_text())
    key = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    assert said[key] == length + (2 if kind == "roberta" else 0)
    others = load_file(source / "model.safetensors")
    same = [k for k, v in load_file(out / "model.safetensors").items() if k in others and torch.equal(others[k], v)]
    assert len(same) == len(others) - 1


def test_learned_table_is_the_encoding_interpolated(checkpoint, command, tmp_path) -> None:
    out = tmp_path / "out"
    command(checkpoint("opt"), "--to", 150, "--method", "linear", "--out", out, "--no-measure")
    (_, old), (_, new) = (table_of(loaded(folder)) for folder in (checkpoint("opt"), out))
    encoding = Learned(LENGTH, 64, row_offset=2, beyond="interpolate", length=150)
    encoding.table = old.weight
    assert torch.equal(new.weight[2:], encoding.codes(torch.arange(150)))


@pytest.mark.parametrize("kind", OFFSETS)
def test_learned_table_at_factor_one(kind, checkpoint, command, tmp_path) -> None:
    source, out = checkpoint(kind), tmp_path / "out"
    code, *_ = command(source, "--to", LENGTH, "--method", "linear", "--out", out, "--no-measure")
    assert code == 0
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}


def test_learned_table_takes_linear_only(checkpoint, command, tmp_path) -> None:
    given = ["--to", 128, "--method", "yarn", "--out", tmp_path / "out", "--no-measure"]
    code, _, said = command(checkpoint("gpt2"), *given)
    assert code == 2 and "no frequencies" in said and "linear" in said


@pytest.mark.slow
def test_cost_of_a_table(checkpoint, command, text, tmp_path) -> None:
    given = ["--to", 128, "--method", "linear", "--out", tmp_path / "out", "--text", text, "--json"]
    code, said, _ = command(checkpoint("gpt2"), *given)
    cost = json.loads(said)["cost"][0]
    assert code == 0 and cost["length"] == LENGTH and cost["extended"]["value"] != cost["original"]["value"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_alibi_needs_none_and_is_measured(kind, checkpoint, command, text, tmp_path) -> None:
    out = tmp_path / "out"
    given = ["--to", 2 * LENGTH, "--method", "yarn", "--out", out, "--text", text, "--json"]
    code, said, _ = command(checkpoint(kind), *given)
    found = json.loads(said)
    assert code == 0 and not out.exists() and found["out"] is None and found["difference"] == []
    assert [cost["length"] for cost in found["cost"]] == [LENGTH, 2 * LENGTH]
    assert "ALiBi" in found["notes"][0]


@pytest.mark.parametrize(("kind", "word"), [("gptj", "formula"), ("mamba", "neither")])
def test_models_with_nothing_to_extend(kind, word, checkpoint, command, tmp_path) -> None:
    code, _, said = command(checkpoint(kind), "--to", 128, "--method", "yarn", "--out", tmp_path / "out")
    assert code == 2 and word in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "falcon", "cohere"])
def test_more_rotary_models(kind, checkpoint, command, tmp_path) -> None:
    out = tmp_path / "out"
    code, _, said = command(checkpoint(kind), "--to", 256, "--method", "yarn", "--out", out, "--no-measure")
    assert (code, said) == (0, "")
    assert loaded(out).config.max_position_embeddings == 256


def test_a_class_that_reads_yarn_as_something_else(checkpoint, command, tmp_path) -> None:
    """Phi-3's makes longrope of every yarn; found out before anything is written."""
    given = ["--to", 256, "--out", tmp_path / "out", "--no-measure", "--method"]
    code, _, said = command(checkpoint("phi3"), *given, "yarn")
    assert code == 2 and "Phi3RotaryEmbedding" in said and not list(tmp_path.iterdir())
    assert command(checkpoint("phi3"), *given, "ntk")[0] == 0
