"""Checkpoints of ours on disk: safetensors, what was saved is what is loaded, and a pickle is not read."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support import close


@pytest.mark.parametrize(
    "options", [{"encoding": "t5"}, {"encoding": "auto", "mixers": ["mamba2", "attention"]}], ids=str
)
def test_what_is_saved(options, build, ids, tmp_path):
    """Learned parameters of encodings are in it, nothing derived is, and tied weights are there once."""
    model = build(**options)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == {name for name, _ in model.named_parameters()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert all(torch.equal(weight, stored[name]) for name, weight in loaded.named_parameters())
    with torch.no_grad():
        close(loaded(ids()).logits, model(ids()).logits)


def test_a_pickle_is_not_read(build, tmp_path):
    model = build("t5")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for kind in (type(model), AutoModelForCausalLM):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            kind.from_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, use_safetensors=False)  # by choice: torch.load(weights_only=True)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
