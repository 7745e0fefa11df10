"""Wrong input: one clear line, exit code 2, nothing written; and a folder that is whole or not there."""

import json
import logging
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from longitude.extend import weights
from longitude.runs.files import new_folder

LENGTH = 64
YARN = ["--to", 4 * LENGTH, "--method", "yarn", "--no-measure"]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def refused(command, tmp_path, *arguments) -> str:
    """The line; and nothing came into being."""
    before = sorted(tmp_path.rglob("*"))
    code, said, line = command(*arguments)
    assert (code, said) == (2, "") and line.startswith("longitude: ") and line.count("\n") == 1, (code, said, line)
    assert sorted(tmp_path.rglob("*")) == before
    return line


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_theta": 5e5, "rope_parameters": ROPE}, "rope_theta is 500000.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "got both"),
        ({"rope_parameters": ROPE | {"type": "linear"}}, "type is 'linear'"),
        ({"rope_parameters": ROPE | {"factr": 2.0}}, "factr"),
        ({"rope_parameters": ROPE | {"rope_type": "yarrn"}}, "yarrn"),
        ({"rotary_emb_base": 500_000}, "rotary_emb_base is 500000"),
        ({"rope_parameters": None, "rotary_emb_base": 500_000}, "transformers reads"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}, "0.25"),
        ({"model_type": "lama"}, "llama"),
    ],
)
def test_contradictory_keys(keys, words, save, command, tmp_path) -> None:
    source = save("llama", tmp_path / "model", **keys)
    assert words in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")


def test_key_twice(save, command, tmp_path) -> None:
    source = save("llama", tmp_path / "model")
    path = source / "config.json"
    path.write_text(path.read_text().replace("{", '{"vocab_size": 258,', 1))
    assert "'vocab_size' is in it twice" in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", LENGTH // 2, "--method", "yarn"], "factor below one"),
        (["--to", 4 * LENGTH, "--method", "yarn", "--factor", 0.5], "shorten the context"),
        (["--to", 0, "--method", "yarn"], "--to"),
        (["--to", 10**12, "--method", "yarn"], "whole numbers"),
        (["--to", 2**24, "--method", "yarn"], "GiB"),
        (["--to", 4 * LENGTH, "--method", "yarm"], "did you mean 'yarn'"),
        (["--to", 4 * LENGTH], "--method"),
        (["--method", "yarn"], "--to"),
        ([], "--to"),
        (["--to", 4 * LENGTH, "--method", "base"], "--base"),
        (["--to", LENGTH, "--method", "base", "--base", 5e5], "--base"),
        (["--to", 4 * LENGTH, "--method", "yarn", "--base", 5e5], "--base"),
        (["--to", 4 * LENGTH, "--method", "yarn", "--convert-layout", "half"], "both"),
        (["--convert-layout", "whole"], "half"),
        (["--to", 4 * LENGTH, "--method", "base", "--base", 500], "below the base"),
        (["--to", 4 * LENGTH, "--method", "yarn", "--text", "/nowhere"], "/nowhere"),
        (["--to", 4 * LENGTH, "--method", "yarn", "--original", 1], "--original"),
        ([*YARN, "--fine-tune", "stdlib"], "--steps"),
        ([*YARN, "--steps", 3], "--fine-tune"),
        ([*YARN, "--lora"], "--fine-tune"),
        ([*YARN, "--fine-tune", "stdlib", "--steps", 3, "--positions", "skiped"], "skipped"),
        ([*YARN, "--fine-tune", "stdlib", "--steps", 3, "--batch", 0], "--batch"),
    ],
)
def test_wrong_options(arguments, words, checkpoint, command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("longitude.extend.plan.total_memory", lambda: 2**29)
    assert words in refused(command, tmp_path, checkpoint("llama"), *arguments, "--out", tmp_path / "out")


def test_longer_than_memory_for_another_machine(checkpoint, command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("longitude.extend.plan.total_memory", lambda: 1)
    assert command(checkpoint("llama"), *YARN, "--out", tmp_path / "out")[0] == 0


def test_a_table_longer_than_memory(checkpoint, command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("longitude.extend.plan.total_memory", lambda: 2**29)
    given = ["--to", 2**22, "--method", "linear", "--no-measure", "--out", tmp_path / "out"]
    assert "the table alone" in refused(command, tmp_path, checkpoint("gpt2"), *given)


def test_missing_tokenizer(save, command, text, tmp_path) -> None:
    """Only the measured cost needs one; what there is goes along."""
    source = save("llama", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    (source / "special_tokens_map.json").write_text("{}")
    measured = ["--to", 4 * LENGTH, "--method", "yarn", "--text", text]
    line = refused(command, tmp_path, source, *measured, "--out", tmp_path / "out")
    assert "tokenizer" in line and "--no-measure" in line
    assert command(source, *YARN, "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "special_tokens_map.json").exists()


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_truncated_weights(cut, save, command, tmp_path) -> None:
    source = save("llama", tmp_path / "model")
    path = source / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    assert "truncated" in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")


def test_unreadable_weights(checkpoint, command, tmp_path, monkeypatch) -> None:
    """By their permissions, which is another thing than truncated."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: real(path, mode) and ".safetensors" not in str(path))
    line = refused(command, tmp_path, checkpoint("llama"), *YARN, "--out", tmp_path / "out")
    assert "permission" in line and "truncated" not in line


def test_another_configuration_than_the_weights(save, command, tmp_path) -> None:
    for keys, words in (
        ({"num_hidden_layers": 3}, "lack 9 of the model's tensors, such as model.layers.2.input_layernorm.weight"),
        ({"intermediate_size": 95}, "model.layers.0.mlp.down_proj.weight is [64, 96] in the weights and [64, 95] by"),
    ):
        source = save("llama", tmp_path / "model", **keys)
        assert words in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")


def test_a_missing_tensor(save, command, tmp_path) -> None:
    """Unless it is tied to another, or transformers may know it by a name of the file."""
    source = save("llama", tmp_path / "model")
    path = source / "model.safetensors"
    weights = load_file(path)
    head = weights.pop("lm_head.weight")
    save_file(weights, path, metadata={"format": "pt"})
    assert "lack 1 of" in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")
    save_file(weights | {"another.weight": head}, path, metadata={"format": "pt"})
    assert command(source, *YARN, "--out", tmp_path / "renamed")[0] == 0
    save_file(weights, path, metadata={"format": "pt"})
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    assert command(source, *YARN, "--out", tmp_path / "tied")[0] == 0


def test_a_model_saved_without_its_head(checkpoint, command, tmp_path) -> None:
    """Its tensors are called h.0..., without the prefix of the model with the head, which is tied."""
    source = tmp_path / "model"
    AutoModel.from_pretrained(checkpoint("gpt2")).save_pretrained(source)
    given = ["--to", 2 * LENGTH, "--method", "linear", "--no-measure", "--out", tmp_path / "out"]
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(said | {"n_layer": 3}))
    assert "such as transformer.h.2." in refused(command, tmp_path, source, *given)
    (source / "config.json").write_text(json.dumps(said))
    assert command(source, *given)[0] == 0


def test_what_only_measuring_finds_is_found_before_writing(save, command, text, tmp_path) -> None:
    source = save("llama", tmp_path / "model")
    given = ["--to", 4 * LENGTH, "--method", "yarn", "--out", tmp_path / "out", "--text"]
    (tmp_path / "short.txt").write_text("short")
    assert "--no-measure" in refused(command, tmp_path, source, *given, tmp_path / "short.txt")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert "not finite at 64 tokens" in refused(command, tmp_path, source, *given, text)


def test_transformers_says_nothing_beside_our_line(save, command, text, tmp_path, caplog) -> None:
    """It logs on a handler of its own, which writes to standard error as it was at its import."""
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        for rope in (ROPE | {"rope_type": "yarn", "factor": 0.5}, ROPE | {"rope_type": "linear", "factr": 2.0}):
            source = save("llama", tmp_path / "model", rope_parameters=rope)
            given = ["--to", 4 * LENGTH, "--method", "yarn", "--text", text, "--out", tmp_path / "out"]
            refused(command, tmp_path, source, *given)
            assert [record.getMessage() for record in caplog.records] == []
    finally:
        library.removeHandler(caplog.handler)


def test_no_model(command, tmp_path) -> None:
    assert "expected MODEL" in refused(command, tmp_path, "", *YARN, "--out", tmp_path / "out")


def test_lost_shard(save, command, tmp_path) -> None:
    source = save("llama", tmp_path / "model")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002" in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")


def test_no_weights_no_model_no_config(save, command, tmp_path) -> None:
    source = save("llama", tmp_path / "model")
    (source / "model.safetensors").unlink()
    assert "no weights" in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")
    (source / "config.json").unlink()
    assert "config.json" in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")
    assert "no such folder" in refused(command, tmp_path, tmp_path / "none", *YARN, "--out", tmp_path / "out")


def test_pickle(save, command, tmp_path) -> None:
    """Refused; with the user's word, written as safetensors with the same tensors."""
    source, out = save("llama", tmp_path / "model"), tmp_path / "out"
    weights = load_file(source / "model.safetensors")
    torch.save(weights, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    assert "--allow-pickle" in refused(command, tmp_path, source, *YARN, "--out", out)
    assert command(source, *YARN, "--allow-pickle", "--out", out)[0] == 0
    assert not list(out.glob("*.bin"))
    written = load_file(out / "model.safetensors")
    assert written.keys() == weights.keys() and all(torch.equal(written[name], weights[name]) for name in weights)
    said = json.loads((out / "config.json").read_text())
    assert said["max_position_embeddings"] == 4 * LENGTH


# ---- the folder ------------------------------------------------------------------------------------------------------
def test_out_is_never_written_over(checkpoint, save, command, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert "exists already" in refused(command, tmp_path, checkpoint("llama"), *YARN, "--out", out)
    out.rmdir()
    out.symlink_to(tmp_path / "nowhere")
    assert "exists already" in refused(command, tmp_path, checkpoint("llama"), *YARN, "--out", out)
    out.unlink()
    source = save("llama", tmp_path / "model")
    assert "own folder" in refused(command, tmp_path, source, *YARN, "--out", source / "longer")
    assert "exists already" in refused(command, tmp_path, source, *YARN, "--out", source)
    assert "--out" in refused(command, tmp_path, source, *YARN)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device", "file"), ValueError("no")])
def test_nothing_half_written(error, checkpoint, command, tmp_path, monkeypatch) -> None:
    write = weights.write_weights

    def interrupted(*arguments):
        write(*arguments)
        raise error

    monkeypatch.setattr(weights, "write_weights", interrupted)
    code, _, line = command(checkpoint("llama"), *YARN, "--out", tmp_path / "deep" / "out")
    assert code == (130 if error is KeyboardInterrupt else 2) and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed(checkpoint, command, tmp_path) -> None:
    left = tmp_path / ".out.unfinished"
    left.mkdir()
    (left / "half.safetensors").write_bytes(b"0")
    assert command(checkpoint("llama"), *YARN, "--out", tmp_path / "out")[0] == 0
    assert not left.exists() and not (tmp_path / "out" / "half.safetensors").exists()


def test_one_writer(tmp_path) -> None:
    with new_folder(tmp_path / "out"), pytest.raises(ValueError, match="another process"), new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").is_dir()
