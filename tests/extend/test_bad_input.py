"""Wrong input: one clear line, exit code 2, nothing written; and a folder that is whole or not there."""

import json

import pytest
import torch
from safetensors.torch import save_file

from longitude.extend import weights as writing
from tests.extend.conftest import LENGTH, PLAIN, weights
from tests.support import edit_config

TO = ["--to", 4 * LENGTH, "--method"]
YARN = [*TO, "yarn", "--no-measure"]
TUNE = [*YARN, "--fine-tune", "stdlib"]
ALL = [*TO, "all"]
OTHER = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0, "original_max_position_embeddings": LENGTH}


def keys(**changes):
    return lambda folder: edit_config(folder, **changes)


def index(**weight_map: str):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (keys(rope_theta=5e5, rope_parameters=PLAIN), "rope_theta is 500000.0"),
        (keys(rope_parameters=None), "rope_theta"),  # a base that only transformers knows
        (keys(rope_parameters=PLAIN | {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),  # read if scaled alone
        (keys(num_hidden_layers=3), "lack 9 of the model's tensors, such as model.layers.2.input_layernorm.weight"),
        (keys(num_hidden_layers=1), "model.layers.1.input_layernorm"),
        (keys(tie_word_embeddings=True), "another lm_head.weight"),
        (keys(intermediate_size=95), "layers.0.mlp.down_proj.weight is [64, 96] in the weights and [64, 95] by config"),
        (index(another="model.safetensors"), "the tensor another, which no file has"),
    ],
)
def test_broken_files(spoil, message, save, refused) -> None:
    source = save()
    spoil(source)
    assert message in refused(source, *YARN)


REFUSED = {  # of a kind: arguments, and a part of the reason
    "llama": [
        (["--to", LENGTH, "--method", "yarn"], f"--to: expected more than {LENGTH}"),
        (["--to", LENGTH // 2, "--method", "yarn"], f"--to: expected more than {LENGTH}"),
        ([*TO, "yarn", "--factor", 2], "--factor: expected 4 or more"),
        (["--to", 2**24, "--method", "yarn"], "keys and values of one sequence"),
        (TO[:2], "--method"),
        ([], "--to"),
        ([*TO, "base"], "--base"),
        ([*TO, "yarn", "--base", 5e5], "the new base of --method base"),
        ([*TO, "base", "--base", 500], "below the base"),
        ([*TO, "yarn", "--text", "/nowhere"], "/nowhere"),
        ([*YARN, "--steps", 3], "--fine-tune"),
        ([*TO, "yarn", "--budget", 3], "--budget"),
        ([*YARN, "--seed", 3], "--seed"),
        ([*YARN, "--cost-minutes", 3], "--no-measure"),
        (TUNE, "--steps"),
        ([*TO, "drope", "--no-measure", "--factor", 2], "--factor is no option of --method drope"),
        (["--to", LENGTH, "--method", "all"], f"--to beyond {LENGTH}"),
        ([*ALL, "--fine-tune", "stdlib", "--steps", 3], "--fine-tune"),
        ([*ALL, "--no-measure"], "--no-measure"),
        ([*ALL, "--out", "longer"], "--out"),
        ([*ALL, "--text", "/nowhere"], "/nowhere"),
        ([*ALL, "--cost-minutes", 1e-9], "--cost-minutes"),
    ],
    "phi3": [(YARN, "phi3")],  # it makes longrope of every yarn
    "gptj": [(YARN, "formula")],
    "mamba": [(YARN, "neither")],
    "gpt2": [(YARN, "no frequencies"), (ALL, "rotary positions")],
    "bloom": [(YARN, "ALiBi")],
    "mpt": [(YARN, "ALiBi")],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "arguments", "message"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_what_is_refused(kind, arguments, message, checkpoint, refused, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("longitude.extend.plan.total_memory", lambda: 2**29)
    monkeypatch.setattr("longitude.extend.short_contexts.flops_per_second", lambda *_, **__: 1e9)
    monkeypatch.chdir(tmp_path)
    assert message in refused(checkpoint(kind), *arguments, out=None if "all" in arguments else tmp_path / "out")


def test_memory(checkpoint, write, monkeypatch) -> None:
    """Keys and values may be another machine's."""
    monkeypatch.setattr("longitude.extend.plan.total_memory", lambda: 1)
    write(checkpoint("llama"), *YARN)


def test_a_missing_tensor(save, refused, write) -> None:
    """Unless it is tied to another. One of a name that nothing knows takes no place."""
    source = save()
    others = weights(source)
    head = others.pop("lm_head.weight")
    for more in ({}, {"another.weight": head}):
        save_file(others | more, source / "model.safetensors", metadata={"format": "pt"})
        assert "lack 1 of" in refused(source, *YARN)
    save_file(others, source / "model.safetensors", metadata={"format": "pt"})
    edit_config(source, tie_word_embeddings=True)
    write(source, *YARN, out="tied")


def test_a_tensor_that_nothing_reads(save, write) -> None:
    """It is copied and named."""
    source = save()
    tensors = weights(source) | {"score.weight": torch.ones(2, 64)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    folder, printed = write(source, *YARN)
    assert "score.weight" in printed and torch.equal(weights(folder)["score.weight"], tensors["score.weight"])


def test_what_only_measuring_finds_is_found_before_writing(save, refused, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("longitude.extend.short_contexts.TOKENS", 512)
    source = save()
    (tmp_path / "short.txt").write_text("short")
    assert "--no-measure" in refused(source, *TO, "yarn", "--text", tmp_path / "short.txt")
    spoiled = weights(source)
    spoiled["model.norm.weight"][:] = 3e38  # finite, and what is computed with it is not
    save_file(spoiled, source / "model.safetensors", metadata={"format": "pt"})
    assert "not finite at 64 tokens" in refused(source, *TO, "yarn", "--text", text)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({"rope_parameters": PLAIN, "rope_scaling": None}, "expected 1"),
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


# ---- the folder ------------------------------------------------------------------------------------------------------
def test_out_is_never_written_over(save, refused, tmp_path) -> None:
    source, out = save(), tmp_path / "out"
    out.mkdir()
    assert "exists already" in refused(source, *YARN)
    source.with_name("file").touch()
    out.rmdir()
    out.symlink_to(tmp_path / "nowhere")
    assert "exists already" in refused(source, *YARN)
    assert "exists already" in refused(source, *YARN, out=source)
    assert "own folder" in refused(source, *YARN, out=source / "longer")
    assert "not a directory" in refused(source, *YARN, out=source.with_name("file") / "out")
    assert "expected MODEL" in refused("", *YARN, out=tmp_path / "new")
