"""What is wrong with a checkpoint is one sentence with the file, exit code 2, nothing written and the source as it was."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longitude.checkpoints.load import in_one_line, require_own_files, require_shards, size_of
from tests.extend.conftest import saved
from tests.support import edit_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return saved("llama", tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture(scope="module")
def sharded(whole, tmp_path_factory):
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("sharded") / "model"))
    (folder / WEIGHTS).unlink()
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("a text of some length, read many times. " * 400)
    return tmp_path / "text.txt"


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[3] = float("nan")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def adapter(folder: Path) -> None:
    """Of another model, beside the weights; transformers loads what it names."""
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))


def of_another(folder: Path) -> None:
    saved("gpt_neox", folder.parent / "other")
    shutil.move(folder.parent / "other" / "config.json", folder / "config.json")
    shutil.rmtree(folder.parent / "other")


def with_json(name: str, value: Any):
    return lambda folder: (folder / name).write_text(json.dumps(value))


def with_key(**keys: Any):
    return lambda folder: edit_config(folder, **keys)


def piped(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def linked(name: str, target: Path | str):
    """The file, or one more, as a link."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def deep(open_: str, close: str, depth: int):
    def spoil(folder: Path) -> None:
        rest = (folder / "config.json").read_text()[1:]
        (folder / "config.json").write_text('{"deep": ' + open_ * depth + "1" + close * depth + ", " + rest)

    return spoil


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


SECOND = "model-00002-of-00007.safetensors"
DAMAGE = {  # what is done to the folder, or to the sharded one, and words of the sentence
    "an adapter": (adapter, "an adapter (adapter_config.json)"),
    "cut in the middle": (lambda folder: halved(folder / WEIGHTS), f"{WEIGHTS}: the weights are truncated"),
    "a shard missing": (lambda folder: shard(folder).unlink(), f"{INDEX} names {SECOND}, which is not"),
    "a shard cut": (lambda folder: halved(shard(folder)), f"{SECOND}: the weights are truncated"),
    "an index that is a list": (with_json(INDEX, [1]), INDEX),
    "an index of a list": (with_json(INDEX, {"weight_map": ["a"]}), INDEX),
    "an index of files elsewhere": (with_json(INDEX, {"weight_map": {"a": "../b"}}), "'../b'"),
    "a config that is a list": (with_json("config.json", [1]), "config.json"),
    "a config that is a pipe": (piped, "config.json"),
    "more layers than there are": (with_key(num_hidden_layers=10**18), "num_hidden_layers"),
    "more experts than there are": (with_key(more={"num_experts": 10**18}), "num_experts"),
    "a number beyond every integer": (with_key(original_max_position_embeddings=10**30), "original_max_position"),
    "another architecture's config": (of_another, "the weights lack"),
    "NaN": (not_finite, "up_proj.weight has numbers that are not finite"),
    "an empty config": (lambda folder: (folder / "config.json").write_text(""), "config.json is not readable JSON"),
    "a link to a secret": (linked("notes.txt", "/etc/hostname"), "notes.txt"),
    "weights linked from elsewhere": (linked(WEIGHTS, "/etc/hostname"), WEIGHTS),
    "a folder linked from elsewhere": (linked("more", "/etc"), "more"),
    "a link to nothing": (linked("tokenizer.json", "nothing.json"), "tokenizer.json"),
    "a pipe for weights": (lambda folder: os.mkfifo(folder / "more.safetensors"), "more.safetensors"),
    "lists deeper than the parser goes": (deep("[", "]", 100_000), "config.json"),
    "dicts as deep as it goes": (deep('{"a": ', "}", 300), "config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
}


YARN = "--to 256 --method yarn --no-measure --out".split()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_sentence_and_nothing_written(damage, whole, sharded, text, tmp_path, command):
    spoil, message = DAMAGE[damage]
    source = sharded if "shard" in damage or "download" in damage else whole
    folder, out = Path(shutil.copytree(source, tmp_path / "model")), tmp_path / "out"
    spoil(folder)
    before, there = contents(folder), sorted(tmp_path.iterdir())
    measure = ("measure", folder, "--lengths", "64", "--tasks", "perplexity", "--text", text, "--out", out)
    commands = [("check", folder), measure, ("extend", folder, *YARN, out)]
    code, _, line = command(*commands[[*DAMAGE].index(damage) % 3])
    last = line.splitlines()[-1]
    assert code == 2 and message in last and str(folder) in last, line
    assert sorted(tmp_path.iterdir()) == there
    assert contents(folder) == before


def test_size_of_weights(whole, sharded, tmp_path):
    """A number of the model is 4 bytes as saved here, and what no index names is not counted."""
    numbers = sum(math.prod(tensor.shape) for tensor in require_shards(whole).values())
    shutil.copy(whole / WEIGHTS, sharded / "consolidated.safetensors")
    for folder in (whole, sharded):
        size, half = (size_of(folder, require_shards(folder), dtype) for dtype in ("auto", torch.bfloat16))
        assert 4 * numbers < size < 4 * numbers + 2**15 and size - half == 2 * numbers
    (sharded / "consolidated.safetensors").unlink()


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(12, os.strerror(12)), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_files_are_not_blamed_where_memory_ends(error):
    with pytest.raises(ValueError) as raised, in_one_line("here: copy the weights again"):
        raise error
    assert "copy" not in str(raised.value) and "memory" in str(raised.value)


def test_links_of_the_hubs_cache_are_followed(whole, tmp_path, monkeypatch, command):
    """There every file is a link to a blob beside the snapshots; links within a folder are its own."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(whole.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    (snapshot / "README.md").symlink_to("config.json")
    code, printed, _ = command("extend", snapshot, *YARN, tmp_path / "out")
    assert code == 0 and not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()], printed


def test_links_that_lead_to_themselves_are_one_sentence(tmp_path):
    (tmp_path / "config.json").symlink_to("config.json")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name in ("a", "b", "config.json"):
        with pytest.raises(ValueError, match=f"{tmp_path / name} is a link"):
            require_own_files(tmp_path)
        (tmp_path / name).unlink()
