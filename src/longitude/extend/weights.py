"""The files of a checkpoint in their new place: copied where they do not change, written again where a tensor does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from longitude.checkpoints.load import load, shapes_of
from longitude.checkpoints.quiet import quiet
from longitude.checkpoints.source import INDEX, Source
from longitude.runs.files import read_json, write_json

Change = Callable[[Tensor], Tensor]

CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".bpe", ".vocab", ".merges")
"""Ends of files that go along: tokenizer, generation config, chat templates, the card."""
NAMED = ("LICENSE", "NOTICE", "USE_POLICY", "README")
LEFT = ("trainer_state.json", "config.json", "pytorch_model.bin.index.json")


def carried(source: Source) -> list[Path]:
    """The files besides weights and config.json that go along, in the order of their names."""
    found = [
        path
        for path in sorted(source.folder.iterdir())
        if path.is_file() and not path.name.startswith(".") and path.name not in LEFT
        and (path.suffix in CARRIED or path.stem in NAMED)
    ]  # fmt: skip
    if source.pickled:
        return [path for path in found if not path.name.endswith(".index.json")]
    return found


def left_out(source: Source) -> list[str]:
    """Names in the source's folder that do not go along."""
    along = {*carried(source), *source.shards, source.folder / "config.json"}
    return sorted(path.name for path in source.folder.iterdir() if path not in along and not path.name.startswith("."))


def size_of(source: Source) -> int:
    """Bytes of the files, for the disk."""
    weights = source.shards or [
        path for path in source.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
    ]
    return sum(path.stat().st_size for path in (*weights, *carried(source)))


def write_weights(source: Source, folder: Path, changes: Mapping[str, Change]) -> None:
    """Weights into `folder`, as safetensors; changes: tensor name -> what becomes of it."""
    if source.pickled:
        model = load(source.folder, allow_pickle=True, tokenizer=False).model
        with quiet():
            model.save_pretrained(folder)
        (folder / "config.json").unlink()
        (folder / "generation_config.json").unlink(missing_ok=True)
        del model
    else:
        for shard in source.shards:
            if not changes.keys() & shapes_of(shard).keys():
                shutil.copyfile(shard, folder / shard.name)
    grown, met = 0, set()
    for shard in [path.name for path in source.shards] or [path.name for path in folder.glob("*.safetensors")]:
        origin = folder / shard if source.pickled else source.folder / shard
        if touched := changes.keys() & shapes_of(origin).keys():
            grown += rewrite(origin, folder / shard, {name: changes[name] for name in touched})
            met |= touched
    if missing := sorted(changes.keys() - met):
        raise ValueError(f"{source.name}: expected a tensor {missing[0]} in its weights, got none of that name")
    for path in carried(source):
        shutil.copyfile(path, folder / path.name)
    index = folder / INDEX
    if grown and index.is_file():
        said = read_json(index)
        if "total_size" in said.get("metadata", {}):
            said["metadata"]["total_size"] += grown
            write_json(index, said, allow_nan=True)


def rewrite(origin: Path, target: Path, changes: Mapping[str, Change]) -> int:
    """A safetensors file with some tensors changed, its metadata as before. -> bytes that it grew by."""
    with safe_open(origin, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    grown = 0
    for name, change in changes.items():
        before = tensors[name]
        tensors[name] = change(before).contiguous()
        grown += (tensors[name].numel() - before.numel()) * before.element_size()
    beside = target.with_suffix(".tmp")
    save_file(tensors, beside, metadata=metadata)
    beside.replace(target)
    return grown


def tokenizer_limit(source: Source, original: int, length: int) -> tuple[int, int] | None:
    """model_max_length of the tokenizer, where it is the original length or more and would cut longer texts off.
    -> (before, after).
    """
    path = source.folder / "tokenizer_config.json"
    before = read_json(path).get("model_max_length") if path.is_file() else None
    if not isinstance(before, int) or not original <= before < length:
        return None
    return before, length
