"""Models with other positions: learned tables are stretched, ALiBi is measured, all others are refused."""

import json

import pytest
import torch

from longitude.checkpoints.positions import table_of
from longitude.positions.absolute import Learned
from tests.extend.conftest import LENGTH, config, loaded, weights

OFFSETS = {"gpt2": 0, "opt": 2, "bert": 0, "roberta": 2}


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("length", [LENGTH + 1, 3 * LENGTH])
def test_learned_table(kind, length, checkpoint, write) -> None:
    """Linear along positions, ends where they were; the rows for no position stay; the model reads every position."""
    source, offset = checkpoint(kind), OFFSETS[kind]
    out, _ = write(source, "--to", length, "--method", "linear", "--no-measure")
    (name, old), after = table_of(loaded(source)), loaded(out)
    new = after.get_submodule(name)
    assert new.num_embeddings == offset + length
    assert torch.equal(new.weight[:offset], old.weight[:offset])
    assert torch.equal(new.weight[[offset, -1]], old.weight[[offset, -1]])
    rows = old.weight[offset:].double()
    place = torch.arange(length, dtype=torch.float64) * (LENGTH - 1) / (length - 1)
    below = place.floor().long().clamp(max=LENGTH - 2)
    want = torch.lerp(rows[below], rows[below + 1], (place - below)[:, None])
    torch.testing.assert_close(new.weight[offset:].double(), want, atol=1e-6, rtol=0)
    encoding = Learned(LENGTH, 64, row_offset=offset, beyond="interpolate", length=length)
    encoding.table = old.weight
    assert torch.equal(new.weight[offset:], encoding.codes(torch.arange(length)))
    with torch.inference_mode():
        assert after(input_ids=torch.randint(3, 250, (1, length))).logits.isfinite().all()
    key = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    assert config(out)[key] == length + (2 if kind == "roberta" else 0)
    before, written = weights(source), weights(out)
    assert sum(not torch.equal(before[each], written[each]) for each in before) == 1


def test_an_index_counts_the_bytes_of_the_new_rows(save, write) -> None:
    source, name = save("gpt2"), "model.safetensors.index.json"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights(source), "model.safetensors")}
    (source / name).write_text(json.dumps(index))
    out, _ = write(source, "--to", 2 * LENGTH, "--method", "linear", "--no-measure")
    assert json.loads((out / name).read_text())["metadata"]["total_size"] == 1 + LENGTH * 64 * 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_alibi_needs_none_and_is_measured(kind, checkpoint, command, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("longitude.extend.cost.TOKENS", 512)
    out = tmp_path / "out"
    given = ["--to", 2 * LENGTH, "--method", "yarn", "--out", out, "--text", text, "--json"]
    code, printed, _ = command(checkpoint(kind), *given)
    found = json.loads(printed)
    assert code == 0 and not out.exists() and found["out"] is None and found["difference"] == []
    assert [cost["length"] for cost in found["cost"]] == [LENGTH, 2 * LENGTH]
    assert "ALiBi" in found["notes"][0]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("gptj", ["--method", "yarn"], "formula"),
        ("mamba", ["--method", "yarn"], "neither"),
        ("gpt2", ["--method", "yarn"], "no frequencies to scale; expected --method linear"),
        ("gpt2", ["--method", "linear", "--original", 32], "the table has 64 positions"),
        ("gpt2", ["--method", "linear", "--factor", 3], "no other factor"),
        ("bloom", ["--method", "yarn", "--fine-tune", "stdlib", "--steps", 1], "there is no new checkpoint to train"),
    ],
)
def test_what_cannot_be_extended(kind, options, words, checkpoint, refused) -> None:
    assert words in refused(checkpoint(kind), "--to", 128, *options, "--no-measure")
