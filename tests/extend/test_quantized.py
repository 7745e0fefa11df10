"""Quantized weights: a method of config.json alone copies them unread and says so; whatever needs them refuses."""

import pytest
import torch
from safetensors.torch import save_file

from longitude.extend import extend
from tests.extend.conftest import LENGTH, config, saved, weights
from tests.support import edit_config, refused

TO = 4 * LENGTH
SCALES = torch.ones(2, dtype=torch.float16)


def in_words(name, weight):
    """GPTQ: eight weights in an int32, under other names."""
    packed_words = torch.zeros(weight.shape[1] // 8, len(weight), dtype=torch.int32)
    return {
        f"{name}.qweight": packed_words,
        f"{name}.qzeros": packed_words[:1].clone(),
        f"{name}.scales": SCALES.clone(),
    }


def in_bytes(name, weight):
    """FP8: the same names and shapes, and scales."""
    return {f"{name}.weight": weight.to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": SCALES.clone()}


def in_nibbles(name, weight):
    """bitsandbytes, 4 bits: the same name, another shape, and a state beneath it."""
    state = {
        f"{name}.weight.{part}": SCALES.clone() for part in ("absmax", "quant_map", "quant_state.bitsandbytes__nf4")
    }
    return {f"{name}.weight": torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)} | state


KINDS = {"gptq": in_words, "fp8": in_bytes, "bitsandbytes": in_nibbles}


def packed(folder, method):
    """The files of a checkpoint with the weights inside its layers quantized."""
    tensors = {}
    for name, weight in weights(folder).items():
        inside = weight.ndim == 2 and any(f".{stack}." in name for stack in ("layers", "h"))
        tensors |= KINDS[method](name.removesuffix(".weight"), weight) if inside else {name: weight}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})


@pytest.fixture
def quantized(tmp_path):
    def make(method="gptq"):
        folder = saved("llama", tmp_path / "model")
        packed(folder, method)
        return folder

    return make


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", KINDS)
def test_weights_are_copied_unread_and_it_is_said(method, quantized, tmp_path):
    folder, out = quantized(method), tmp_path / "out"
    extension = extend(folder, out, to=TO, method="yarn")
    [note] = (note for note in extension.plan.notes if method in note)
    assert extension.costs == [] and "nothing is measured" in note and f"longitude check {out}" in note
    assert (folder / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert config(out)["quantization_config"] == config(folder)["quantization_config"]
    assert config(out)["rope_parameters"]["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "longrope"}, "--method longrope searches with them"),
        ({"method": "yarn", "train": {"text": "stdlib", "steps": 1}}, "--fine-tune trains them"),
    ],
)
def test_what_needs_them_refuses(options, message, quantized, tmp_path):
    folder, out = quantized(), tmp_path / "out"
    with pytest.raises(ValueError, match="quantized") as error:
        extend(folder, out, to=TO, **options)
    assert message in str(error.value) and not out.exists()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", KINDS)
def test_layers_too_many_and_too_few_are_named(method, quantized, tmp_path):
    folder = quantized(method)
    for layers in (1, 3):
        edit_config(folder, num_hidden_layers=layers)
        with refused(f"{layers} layers", got="2 in the files"):
            extend(folder, tmp_path / "out", to=TO, method="yarn")
