"""Rotary tables recorded without weights are those that layers of a real model multiply with; a wrong file never stays."""

import sys
from collections import defaultdict

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longitude.extend import weights as writing
from longitude.extend.convert import ROTATION
from tests.extend.conftest import LENGTH, loaded
from tests.extend.recorded import NotShown, recorded
from tests.support import edit_config

OTHER = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0, "original_max_position_embeddings": LENGTH}
YARN = ["--to", 4 * LENGTH, "--method", "yarn", "--no-measure"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "kind", ["gemma3_text", "llama", "smollm3", "cohere2", "qwen3", "gpt_neox", "ministral3", "phi3"]
)
def test_layers_and_tables_are_those_of_a_real_pass(kind, checkpoint, monkeypatch) -> None:
    """The function that rotates is watched, with weights, in every layer; a layer that does not call it rotates nothing."""
    found = recorded(AutoModelForCausalLM, AutoConfig.from_pretrained(checkpoint(kind)))
    model = loaded(checkpoint(kind))
    file, seen, inside = sys.modules[type(model).__module__], defaultdict(list), []
    rotate = getattr(file, ROTATION)

    def watched(q, k, cos, sin, *more, **named):
        width = cos.shape[-1] // 2
        pairs = slice(0, None, 2) if torch.equal(cos[..., 0::2], cos[..., 1::2]) else slice(0, width)
        seen[inside[-1]].append(torch.atan2(sin[0, 1, pairs].double(), cos[0, 1, pairs].double()))
        return rotate(q, k, cos, sin, *more, **named)

    monkeypatch.setattr(file, ROTATION, watched)
    for number, layer in enumerate(model.base_model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: inside.append(number))
    with torch.no_grad():
        model(input_ids=torch.randint(3, 200, (1, 5)))
    assert [*found.calls] == sorted(seen)
    for layer, calls in found.calls.items():
        [call], [real] = calls, seen[layer]
        torch.testing.assert_close(call.at(5).inverse, real, rtol=1e-6, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize(
    ("kind", "windowed"), [("gemma3_text", {0: 24}), ("llama4_text", {0: 24, 1: 24, 2: 24}), ("llama", {})]
)
def test_windows_are_those_of_masks(kind, windowed, checkpoint) -> None:
    assert recorded(AutoModelForCausalLM, AutoConfig.from_pretrained(checkpoint(kind))).windows == windowed


def test_frequencies_that_follow_the_length_are_those_of_each_length(save) -> None:
    """In whichever order they are asked for: a module that keeps the longest is made anew each time."""
    source = save(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    call = recorded(AutoModelForCausalLM, AutoConfig.from_pretrained(source)).calls[0][0]
    far, near = call.at(4 * LENGTH), call.at(LENGTH)
    assert torch.equal(call.at(4 * LENGTH).inverse, far.inverse) and float(near.inverse[-1] / far.inverse[-1]) > 2


def test_a_class_that_does_not_run_is_not_shown(checkpoint, monkeypatch) -> None:
    config = AutoConfig.from_pretrained(checkpoint("llama"))
    file = sys.modules[type(loaded(checkpoint("llama"))).__module__]
    monkeypatch.setattr(file.LlamaAttention, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(NotShown, match="division"):
        recorded(AutoModelForCausalLM, config)


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": None}, "expected 1"),
        ({"rope_parameters": OTHER, "rope_scaling": None}, " pair "),
        ({"intermediate_size": 95}, "95"),
    ],
)
def test_a_file_that_is_not_as_meant_does_not_stay(keys, number, checkpoint, command, tmp_path, monkeypatch) -> None:
    """What is written is read again by the family's own class: here something spoils it on the way."""
    write = writing.write_json

    def spoiled(path, value, **options):
        write(path, value, **options)
        if path.name == "config.json":
            edit_config(path.parent, **keys)

    monkeypatch.setattr(writing, "write_json", spoiled)
    code, _, line = command(checkpoint("llama"), *YARN, "--out", tmp_path / "out")
    assert code == 2 and number in line and line.count("\n") == 1 and not list(tmp_path.iterdir())
