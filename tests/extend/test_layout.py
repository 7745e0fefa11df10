"""--convert-layout: a permutation, there and back to the bit, and the same logits under the other rotation."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longitude.checkpoints.source import open_source
from longitude.extend.convert import compare, layout_changes

KINDS = ["llama", "qwen2", "qwen3", "neox", "phi3", "gemma3", "cohere", "mistral"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_parity_and_back(kind, checkpoint, command, tmp_path) -> None:
    source, out, back = checkpoint(kind), tmp_path / "out", tmp_path / "back"
    code, said, _ = command(source, "--convert-layout", "interleaved", "--out", out, "--json")
    found = json.loads(said)["parity"]
    assert code == 0 and found["error"] < 1e-4 and found["wrong_rotation"] > 0.1
    assert found["transformers"] == ("interleaved" if kind == "cohere" else "half")
    assert command(out, "--convert-layout", "half", "--out", back)[0] == 0
    before, between, after = (load_file(folder / "model.safetensors") for folder in (source, out, back))
    changed = [name for name in before if not torch.equal(before[name], between[name])]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert changed and all(any(part in name for part in ("q_", "k_", "qkv", "query_key_value")) for name in changed)
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_values_stay(checkpoint, command, tmp_path) -> None:
    """In fused weights too: GPT-NeoX has queries, keys and values head by head, Phi-3 one after the other."""
    for kind, values in (("neox", lambda w: w.unflatten(0, (4, 3, 16))[:, 2]), ("phi3", lambda w: w[(4 + 2) * 16 :])):
        out = tmp_path / kind
        command(checkpoint(kind), "--convert-layout", "interleaved", "--out", out)
        before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint(kind), out))
        fused = [name for name in before if ("qkv" in name or "query_key_value" in name) and "weight" in name]
        assert len(fused) == 2
        for name in fused:
            assert torch.equal(values(before[name]), values(after[name]))
            assert not torch.equal(before[name], after[name])


def test_repair_of_interleaved_weights_in_a_half_model(checkpoint, save, command, tmp_path) -> None:
    """Weights in the wrong layout, brought into the right one, are the original model again."""
    source = checkpoint("llama")
    command(source, "--convert-layout", "interleaved", "--out", tmp_path / "broken")
    _, said, _ = command(tmp_path / "broken", "--convert-layout", "half", "--out", tmp_path / "right")
    assert "for transformers" in said
    one, other = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "right"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_parity_check_fails_on_a_wrong_conversion(checkpoint) -> None:
    """Keys left as they were: the check must not pass."""
    source = open_source(str(checkpoint("llama")))
    changes = layout_changes(source, "interleaved")
    halved = {name: change for name, change in changes.items() if "q_proj" in name}
    with pytest.raises(ValueError, match="other logits"):
        compare(source, halved, "interleaved")


def test_models_without_a_layout(checkpoint, save, command, tmp_path) -> None:
    for kind in ("gpt2", "bloom", "falcon"):
        code, _, error = command(checkpoint(kind), "--convert-layout", "half", "--out", tmp_path / "out")
        assert code == 2 and "--convert-layout" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sharded_weights_only_rewrite_what_changes(save, command, tmp_path) -> None:
    source, out = save("llama", tmp_path / "model"), tmp_path / "out"
    whole = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for name, tensor in whole.items():
        parts[f"model-0000{1 + ('self_attn' in name)}-of-00002.safetensors"][name] = tensor
    for file, tensors in parts.items():
        save_file(tensors, source / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file in parts for name in parts[file]}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert command(source, "--convert-layout", "interleaved", "--out", out)[0] == 0
    one, two = sorted(parts)
    assert (out / one).read_bytes() == (source / one).read_bytes()
    assert (out / two).read_bytes() != (source / two).read_bytes()
    assert (out / "model.safetensors.index.json").read_bytes() == (source / "model.safetensors.index.json").read_bytes()
