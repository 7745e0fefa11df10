"""Write files and folders whole or not at all, with one writer per directory; recognize full disks."""

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where only commands that write a run directory fail
    fcntl = None

LOCK = ".lock"
SYSTEM = re.compile(r"\(os error (\d+)\)")
"""Message of Rust libraries such as safetensors for an error of the operating system."""
COMPLETE = "complete.json"
"""Written last into a checkpoint of a training: the checksums of its other files."""
FULL = 2**20
"""With fewer bytes free, a disk is full."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which system errors name `path`, including those reported by libraries in other forms."""
    try:
        yield
    except ValueError:
        raise
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        if (number := SYSTEM.search(str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path next to `path` to write to; on leaving it is flushed and renamed to `path`, or removed on error."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            yield unfinished
            flush(unfinished)
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder next to `out` to write into; on leaving it is flushed and renamed to `out`, or removed on error.

    What a killed process left there is removed first. ValueError when another process writes the same, or when `out` exists.
    """
    made = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.unfinished")
    unfinished.mkdir(exist_ok=True)
    with held(unfinished, out):
        try:
            empty(unfinished)
            with naming(out):
                yield unfinished
            place(unfinished, out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            for folder in made:
                if not any(folder.iterdir()):
                    folder.rmdir()
            raise


def place(folder: Path, out: Path) -> None:
    """Flush a folder to the disk, then rename it to `out`. ValueError if `out` exists."""
    for path in (*folder.rglob("*"), folder):
        flush(path)
    if out.exists():
        raise ValueError(f"--out {out} was created meanwhile, and is not overwritten; choose another --out")
    os.rename(folder, out)
    flush(out.parent)


def checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file except COMPLETE. torch.load ignores those of its zip files, and safetensors has none."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != COMPLETE:
            number = 0
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    number = zlib.crc32(block, number)
            found[path.relative_to(folder).as_posix()] = number
    return found


def is_as_sealed(folder: Path) -> bool:
    """Whether a folder's files match the checksums in its COMPLETE."""
    try:
        return read_json(folder / COMPLETE) == checksums(folder)
    except ValueError:  # no JSON any more
        return False


def lock(descriptor: int, shared: bool = False) -> None:
    """Lock an open file or folder until it is closed, or its process ends. Shared: wait for an exclusive lock to end.

    Raises:
        BlockingIOError: Another process has locked it, unless `shared`.
        ValueError: The system has no such locks.
    """
    if fcntl is None:
        raise ValueError(
            "expected a system with POSIX locks for a command that writes a directory, got Windows; use Linux in WSL"
        )
    fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(folder: Path, out: Path) -> Iterator[None]:
    """Hold the lock of `folder`, from which this process makes `out`. ValueError if another process holds it."""
    with opened(folder) as descriptor:
        try:
            lock(descriptor)
        except BlockingIOError:
            raise ValueError(
                f"{out} is being written by another process; wait for it, or choose another --out"
            ) from None
        yield


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file descriptor of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def empty(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of killed processes from a folder. Only for its one writer."""
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def flush(path: Path) -> None:
    """Write a file or folder from the system's cache to the disk."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def write_json(path: Path, value: Any, allow_nan: bool = False) -> None:
    """Write JSON, whole or not at all. allow_nan: for files of other programs, which may have NaN or Infinity."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=allow_nan)
    with atomic(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path, remedy: str = "restore the file") -> Any:
    """The value, or None if there is no such file. ValueError if it is not JSON, or has a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"{twice[0]!r} is in it twice")
        return dict(pairs)

    if path.exists() and not path.is_file():  # reading a pipe would wait
        raise ValueError(f"{path} is no file; {remedy}")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RecursionError:
        raise ValueError(f"{path} is not readable JSON (nested too deeply); {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}); {remedy}") from None


def append_json(path: Path, entry: Mapping[str, Any]) -> None:
    """Append a line of JSON, which is on the disk when this returns."""
    with naming(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_json_lines(path: Path) -> list[Any]:
    """Read the lines of `append_json`. An incomplete last line, left by a kill, is removed, so only the writer may call it."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
        flush(path)
    return [json.loads(line) for line in content[:whole].splitlines()]


def out_of_space(error: BaseException | None, directory: Path) -> bool:
    """Whether an error comes from a full disk. Libraries wrap the system's error; torch has a different message."""
    if directory.exists() and shutil.disk_usage(directory).free < FULL:
        return True
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(error):
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


def require_writable(out: Path) -> None:
    """ValueError unless `out` can be created; check it before minutes of work."""
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"--out {out}: {parent} is not a directory that can be written to; choose another --out")
