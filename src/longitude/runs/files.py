"""Files that are whole or not there, and one writer per directory."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK = ".lock"
FULL = 2**20
"""With fewer bytes free, a disk is full."""


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; on leaving it is flushed to disk and renamed over `path`, or removed on error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        flush(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """What a killed process left beside the files of this folder. Only for the one writer."""
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_json(path: Path, value: Any) -> None:
    with atomic(path) as beside:
        beside.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The value, or None where there is no such file. ValueError when it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}); start over with --fresh") from None


def flush(path: Path) -> None:
    """Onto the disk, not only to the system."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Held as long as this process writes into `directory`; it dies with the process. ValueError when another holds it."""
    path = directory / LOCK
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            writer = file.read().strip() or "?"
            raise ValueError(
                f"{directory} is being written by process {writer}; wait for it, or choose another --out"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def out_of_space(error: BaseException | None, directory: Path) -> bool:
    """Whether an error comes from a full disk. Libraries wrap the system's error, torch in words of its own."""
    if directory.exists() and shutil.disk_usage(directory).free < FULL:
        return True
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def require_space(directory: Path, needed: int, what: str) -> None:
    """ValueError unless the disk of `directory` (or of its nearest existing parent) has the `needed` bytes of `what`."""
    while not directory.exists():
        directory = directory.absolute().parent
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ValueError(
            f"{what} needs about {needed / 1e6:.0f} MB of disk, {directory} has {free / 1e6:.0f} MB free; "
            f"free some or choose another --out"
        )
