"""A checkpoint in its new folder: files copied where they do not change, written again where a tensor does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from longitude.checkpoints.layout import Change
from longitude.checkpoints.load import INDEX, differences, load, not_finite, shapes_of
from longitude.checkpoints.source import Source, require_same
from longitude.runs.files import atomic, new_folder, read_json, require_space, write_json
from longitude.runs.quiet import quiet

CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".bpe", ".vocab", ".merges")
"""Ends of files that are copied: tokenizer, generation config, chat templates, the card."""
NAMED = ("LICENSE", "NOTICE", "USE_POLICY", "README")
LEFT = ("trainer_state.json", "config.json", "pytorch_model.bin.index.json", "serve.md")
"""Files that are not valid for another checkpoint, or are written again."""


def write_checkpoint(
    source: Source,
    out: Path,
    changes: Mapping[str, Change],
    config: Mapping[str, Any] | None = None,
    tokenizer_length: int | None = None,
    search: Mapping[str, Any] | None = None,
    check: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write the checkpoint to `out`, atomically.

    config: content of the new config.json, None: unchanged. tokenizer_length: the new model_max_length. search: content of
    longrope_search.json. check: called with the folder before it is renamed; if it raises, nothing is left.
    """
    weights = source.shards or [x for x in source.folder.iterdir() if x.suffix in (".bin", ".pt", ".pth", ".ckpt")]
    size = sum(path.stat().st_size for path in (*weights, *carried(source)))
    require_space(out.absolute().parent, size, "the checkpoint")
    with new_folder(out) as unfinished:
        write_weights(source, unfinished, changes)
        shutil.copyfile(source.folder / "config.json", unfinished / "config.json")
        if search is not None:
            write_json(unfinished / "longrope_search.json", search)
        if config is not None:
            write_json(unfinished / "config.json", config, allow_nan=True)
        if tokenizer_length is not None:
            path = unfinished / "tokenizer_config.json"
            write_json(path, read_json(path) | {"model_max_length": tokenizer_length}, allow_nan=True)
        check(unfinished)


def carried(source: Source) -> list[Path]:
    """The files besides weights and config.json that are copied, in the order of their names."""
    return [
        path
        for path in sorted(source.folder.iterdir())
        if path.is_file() and not path.name.startswith(".") and path.name not in LEFT
        and (path.suffix in CARRIED or path.stem in NAMED)
    ]  # fmt: skip


def left_out(source: Source) -> list[str]:
    """Names in the source's folder that are not copied."""
    copied = {*carried(source), *source.shards, source.folder / "config.json"}
    return sorted(path.name for path in source.folder.iterdir() if path not in copied and not path.name.startswith("."))


def write_weights(source: Source, folder: Path, changes: Mapping[str, Change]) -> None:
    """Write weights as safetensors, and copy the carried files, into `folder`; changes: tensor name -> its change."""
    if source.pickled:
        checkpoint = load(source.folder, allow_pickle=True, tokenizer=False)
        require_same(source.name, checkpoint.model, checkpoint.unused, checkpoint.untied)
        if lost := differences(checkpoint.model, checkpoint.unused)[1]:
            raise ValueError(
                f"{source.name}: {lost[0]}, and they would be lost; save its pickled weights as safetensors first"
            )
        with quiet():
            checkpoint.model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        del checkpoint
    missing, growth = set(changes), 0
    if source.quantization is None:
        require_numbers(source)
    for shard in source.shards or list(folder.glob("*.safetensors")):
        changed = {name: changes[name] for name in shapes_of(shard) if name in changes}
        missing -= changed.keys()
        if changed:
            growth += rewrite(shard, folder / shard.name, changed)
        elif not source.pickled:
            shutil.copyfile(shard, folder / shard.name)
    if missing:
        raise ValueError(f"{source.name}: expected a tensor {min(missing)} in its weights, got none of that name")
    for path in carried(source):
        shutil.copyfile(path, folder / path.name)
    index = folder / INDEX
    if growth and index.is_file():
        entries = read_json(index)
        if "total_size" in (entries.get("metadata") or {}):
            entries["metadata"]["total_size"] += growth
            write_json(index, entries)


def require_numbers(source: Source) -> None:
    """ValueError for a weight with NaN or infinity, with the file that has it."""
    prefix = getattr(source.skeleton, "base_model_prefix", "")
    weights = {name for name, _ in source.skeleton.named_parameters()}
    for shard in source.shards:
        with safe_open(shard, framework="pt") as file:
            for name in shapes_of(shard):
                if not weights & {name, f"{prefix}.{name}"}:
                    continue  # a table of an older release may have infinity
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not bool(tensor.isfinite().all()):
                    raise not_finite(shard, name)


def rewrite(origin: Path, target: Path, changes: Mapping[str, Change]) -> int:
    """Write a safetensors file with some tensors changed and the same metadata; returns the bytes that it grew by."""
    with safe_open(origin, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    growth = 0
    for name, change in changes.items():
        before = tensors[name]
        tensors[name] = change(before).contiguous()
        growth += (tensors[name].numel() - before.numel()) * before.element_size()
    with atomic(target) as unfinished:
        save_file(tensors, unfinished, metadata=metadata)
    return growth
