"""Wrong input: one clear line, exit code 2, nothing written; and a folder that is whole or not there."""

import json
import os

import pytest
import torch

from longitude.extend import run as running, weights
from longitude.extend.write import new_folder

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
        ({"rope_parameters": ROPE | {"type": "linear"}}, "type 'linear'"),
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
    assert "'vocab_size' twice" in refused(command, tmp_path, source, *YARN, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", LENGTH // 2, "--method", "yarn"], "factor below one"),
        (["--to", 4 * LENGTH, "--method", "yarn", "--factor", 0.5], "below one"),
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
        (["--to", 4 * LENGTH, "--method", "yarn", "--text", "/nowhere"], "/nowhere"),
        (["--to", 4 * LENGTH, "--method", "yarn", "--original", 1], "--original"),
    ],
)
def test_wrong_options(arguments, words, checkpoint, command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 2**17)  # a machine of 512 MiB
    assert words in refused(command, tmp_path, checkpoint("llama"), *arguments, "--out", tmp_path / "out")


def test_longer_than_memory_for_another_machine(checkpoint, command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    assert command(checkpoint("llama"), *YARN, "--out", tmp_path / "out")[0] == 0


def test_a_table_longer_than_memory(checkpoint, command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 2**17)
    line = refused(
        command,
        tmp_path,
        checkpoint("gpt2"),
        "--to",
        2**22,
        "--method",
        "linear",
        "--no-measure",
        "--out",
        tmp_path / "out",
    )
    assert "the table alone" in line


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
    from safetensors.torch import load_file

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

    monkeypatch.setattr(running, "write_weights", interrupted)
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
