"""--convert-layout: a permutation, there and back to the bit, and the same logits under the other rotation."""

import json

import pytest
import torch
from safetensors.torch import save_file

from longitude.checkpoints.source import open_source
from longitude.extend.convert import changes_of, compare
from tests.extend.conftest import config, files, weights


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "gpt_neox", "gemma3_text", "mistral", "phi3", "cohere"])
def test_parity_and_back(kind, checkpoint, write) -> None:
    source = checkpoint(kind)
    out, printed = write(source, "--convert-layout", "interleaved", "--json")
    found = json.loads(printed)["parity"]
    assert found["error"] < 1e-4 and found["wrong_rotation"] > 0.1
    assert found["transformers"] == ("interleaved" if kind == "cohere" else "half")
    back, printed = write(out, "--convert-layout", "half", out="back")
    assert "for transformers" in printed or kind == "cohere"
    before, between, after = map(weights, (source, out, back))
    changed = [name for name in before if not torch.equal(before[name], between[name])]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert changed and all(any(part in name for part in ("q_", "k_", "qkv", "query_key_value")) for name in changed)
    assert config(out) == config(source)


def test_parity_fails_on_a_wrong_conversion(checkpoint) -> None:
    """Keys left as they were: the check must not pass."""
    source = open_source(str(checkpoint("llama")))
    changes = changes_of(source, "interleaved")
    halved = {name: change for name, change in changes.items() if "q_proj" in name}
    with pytest.raises(ValueError, match="other logits"):
        compare(source, halved, "interleaved")


def test_of_sharded_weights_only_what_changes_is_rewritten(save, write) -> None:
    source, names = save(), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    whole = weights(source)
    (source / "model.safetensors").unlink()
    place = {name: names["self_attn" in name] for name in whole}
    for file in names:
        tensors = {name: tensor for name, tensor in whole.items() if place[name] == file}
        save_file(tensors, source / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": place}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    out, _ = write(source, "--convert-layout", "interleaved")
    before, after = files(source), files(out)
    assert after.keys() == before.keys() and {name for name in before if after[name] != before[name]} == {names[1]}
