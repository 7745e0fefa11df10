"""A new folder that is whole or not there: made beside, flushed to disk, then renamed. Nothing is ever written over."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; on leaving it is flushed to disk and renamed to `out`, on an error or Ctrl-C it
    is removed. What a killed process left there is removed first. ValueError when another process writes the same.
    """
    missing = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.unfinished")
    beside.mkdir(exist_ok=True)
    held = os.open(beside, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it dies with its process
        except BlockingIOError:
            raise ValueError(
                f"{out} is being written by another process; wait for it, or choose another --out"
            ) from None
        try:
            empty(beside)
            yield beside
            flush(beside)
            if out.exists():
                raise ValueError(f"--out {out} came into being meanwhile, and nothing is written over; name another")
            os.rename(beside, out)
            flush_folder(out.parent)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            for folder in missing:  # of our own making, and empty
                shutil.rmtree(folder, ignore_errors=True) if not any(folder.iterdir()) else None
            raise
    finally:
        os.close(held)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def flush(folder: Path) -> None:
    """Every file of a folder, and the folder, onto the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The value, keys in their order. ValueError when it is no JSON or says a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"it says {twice!r} twice; remove the wrong one")
        return found

    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def first_process() -> bool:
    """Whether this is the process that writes: the only one, or the first of those that accelerate launch started."""
    return int(os.environ.get("RANK", "0")) == 0
