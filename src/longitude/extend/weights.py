"""A checkpoint in its new folder: its files, copied, and another config.json."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from longitude.checkpoints.load import Source, require_finite, tensors_of
from longitude.runs.files import new_folder, read_json, require_space, write_json

CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".bpe", ".vocab", ".merges")
"""Ends of files that are copied: tokenizer, generation config, chat templates, the card."""
NAMED = ("LICENSE", "NOTICE", "USE_POLICY", "README")
LEFT = ("trainer_state.json", "config.json", "pytorch_model.bin.index.json", "serve.md")
"""Files that are not valid for another checkpoint, or are written again."""


def write_checkpoint(
    source: Source,
    out: Path,
    config: Mapping[str, Any],
    tokenizer_length: int | None = None,
    check: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write the checkpoint to `out`, atomically.

    config: content of the new config.json. tokenizer_length: the new model_max_length. check: called with the folder before it
    is renamed; if it raises, nothing is left.
    """
    size = sum(path.stat().st_size for path in (*source.shards, *carried(source)))
    require_space(out.absolute().parent, size, "the checkpoint")
    with new_folder(out) as unfinished:
        copy_weights(source, unfinished)
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


def copy_weights(source: Source, folder: Path) -> None:
    """Copy weights and carried files into `folder`. ValueError for a weight with NaN or infinity."""
    if source.quantization is None:
        require_numbers(source)
    for path in (*source.shards, *carried(source)):
        shutil.copyfile(path, folder / path.name)


def require_numbers(source: Source) -> None:
    """ValueError for a weight with NaN or infinity, with the file that has it."""
    prefix = getattr(source.skeleton, "base_model_prefix", "")
    weights = {name for name, _ in source.skeleton.named_parameters()}
    for shard in source.shards:
        with safe_open(shard, framework="pt") as file:
            for name in tensors_of(shard):
                if not weights & {name, f"{prefix}.{name}"}:
                    continue  # a table of an older release may have infinity
                require_finite(name, file.get_tensor(name), shard)
