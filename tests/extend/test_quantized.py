"""Quantized weights: a method of config.json alone copies them unread and says so; whatever needs them refuses."""

import pytest
import torch

from longitude.extend import extend
from tests.extend.conftest import LENGTH, config, saved, weights

KINDS = ["gptq", "awq", "fp8", "mxfp4", "bitsandbytes"]
TO = 4 * LENGTH


@pytest.fixture
def quantized(tmp_path):
    def make(method="gptq", kind="llama"):
        return saved(kind, tmp_path / "model", quantization_config={"quant_method": method, "bits": 4})

    return make


@pytest.mark.parametrize("quantization", KINDS)
def test_weights_are_copied_unread_and_it_is_said(quantization, quantized, tmp_path):
    folder, out = quantized(quantization), tmp_path / "out"
    found = extend(folder, out, to=TO, method="yarn")
    assert found.written and found.costs == []
    [note] = [note for note in found.plan.notes if "quantized" in note]
    assert f"({quantization}): they are copied unread, and nothing is measured" in note
    before, after = weights(folder), weights(out)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert config(out)["quantization_config"] == config(folder)["quantization_config"]
    assert config(out)["rope_parameters"]["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("llama", {"method": "longrope"}, "--method longrope searches with them"),
        ("llama", {"method": "longrope2"}, "--method longrope2 searches with them"),
        ("llama", {"method": "yarn", "train": lambda a, b: None}, "--fine-tune trains them"),
        ("gpt2", {"method": "linear"}, "wpe.weight would change"),
    ],
)
def test_what_needs_them_refuses(kind, options, words, quantized, tmp_path):
    folder, out = quantized(kind=kind), tmp_path / "out"
    with pytest.raises(ValueError, match="quantized") as error:
        extend(folder, out, to=TO, **options)
    assert words in str(error.value) and not out.exists()
