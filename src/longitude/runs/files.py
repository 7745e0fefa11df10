"""Open, read and write the files of runs, checkpoints and caches, which are not trusted.

Reading opens regular files only, follows no link unless the caller allows it, and checks the size first. Files and folders are
written whole or not at all, with one writer per directory.
"""

import errno
import json
import os
import re
import shutil
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longitude.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows, where only commands that write a run directory fail
    fcntl = None

LOCK, TEMPORARY = ".lock", ".*.tmp"
"""Name of the lock of a folder; pattern of the names of `atomic`, which a killed process leaves."""
SYSTEM = re.compile(r"\(os error (\d+)\)")
"""Message of Rust libraries such as safetensors for an error of the operating system."""
COMPLETE, UNIT = "complete.json", "unit.json"
"""Written last, into a checkpoint of a training and into a unit: they have the checksums of the other files."""
FULL = 2**20
"""With fewer bytes free, a disk is full."""
LARGEST = 2**28
"""Maximum bytes of a file that is read into memory as JSON or text."""
RESTORE = "restore the file"
# Windows has none of these flags. Without O_NONBLOCK, opening a pipe waits for its writer.
NO_LINK, NO_WAIT = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK"))
NESTED = 64
"""Levels of JSON at most: about ten times those of a config."""
JSON_TYPES = {dict: "object", list: "array", str: "string", int: "number", float: "number", type(None): "null"}


# ---- opening and reading ---------------------------------------------------------------------------------------------
@contextmanager
def regular(path: Path, flags: int = os.O_RDONLY, remedy: str = RESTORE, *, links: bool = False) -> Iterator[int]:
    """A descriptor of a regular file, closed afterwards.

    Args:
        path: The file.
        flags: Flags of os.open; with O_CREAT the file may be missing.
        remedy: Advice in the error.
        links: Whether to follow a link to a regular file, as the snapshots of the Hugging Face cache have.

    Raises:
        ValueError: There is something else of this name, such as a link, a pipe, a folder or a device.
        FileNotFoundError: There is nothing of this name.
    """
    try:
        with suppress(FileNotFoundError):  # opening some devices has an effect, so look before
            _require_regular(path, path.stat() if links else path.lstat(), remedy)
        descriptor = os.open(path, flags | NO_WAIT | (0 if links else NO_LINK), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UsageError(str(path), "a regular file", "a link that leads to itself", remedy) from None
    try:
        _require_regular(path, os.fstat(descriptor), remedy)  # it may have been replaced meanwhile
        yield descriptor
    finally:
        os.close(descriptor)


def _require_regular(path: Path, status: os.stat_result, remedy: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(str(path), "a regular file", _kind_of(status.st_mode), remedy)


def _kind_of(mode: int) -> str:
    """What a path is, in words, from the mode of its status."""
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_bytes(path: Path, remedy: str = RESTORE, *, links: bool = False, limit: int = LARGEST) -> bytes:
    """Content of a regular file of at most `limit` bytes; arguments and errors of `regular`."""
    with regular(path, remedy=remedy, links=links) as descriptor:
        if (size := os.fstat(descriptor).st_size) > limit:
            raise UsageError(str(path), f"at most {limit:,} bytes", f"{size:,}", remedy)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)


def read_text(path: Path, remedy: str = RESTORE, *, links: bool = False, limit: int = LARGEST) -> str:
    """Content of a file of UTF-8 text; arguments and errors of `read_bytes`."""
    try:
        return read_bytes(path, remedy, links=links, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            str(path), "UTF-8 text", f"byte {error.start} = {error.object[error.start]:#x}", remedy
        ) from None


def read_json(path: Path, remedy: str = RESTORE, kind: type = dict, *, links: bool = False) -> Any:
    """The JSON value of a file, or None if there is no such file.

    Args:
        path: The file.
        remedy: Advice in the error.
        kind: Expected type of the value; object for any.
        links: Whether the file may be a link.

    Raises:
        ValueError: It is no regular file, too large, not JSON, of another type, or has a key twice.
    """

    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = Counter(key for key, _ in pairs)
            raise ValueError(f"{keys.most_common(1)[0][0]!r} is in it twice")
        return values

    try:
        text = read_text(path, remedy, links=links)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        value = parsed_json(text, object_pairs_hook=without_doubles)
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}); {remedy}") from None
    if not isinstance(value, kind):
        expected = f"a JSON {JSON_TYPES.get(kind, kind.__name__)}"
        raise UsageError(str(path), expected, JSON_TYPES.get(type(value), type(value).__name__), remedy)
    return value


def parsed_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text; ValueError as `json.loads`, and for one that nests deeper than code that walks it can follow."""
    deep = f"nested deeper than {NESTED}"
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(deep) from None
    level = [value]
    for _ in range(NESTED):
        inner = [
            outer.values() if isinstance(outer, dict) else outer for outer in level if isinstance(outer, dict | list)
        ]
        level = [part for parts in inner for part in parts]
    if level:  # Python 3.13 reads what it cannot walk by recursion
        raise ValueError(deep)
    return value


# ---- writing ---------------------------------------------------------------------------------------------------------
def make_folder(path: Path) -> None:
    """Make a folder, unless it is there. ValueError if a link stands in its place: files would be written elsewhere."""
    with suppress(FileExistsError):
        path.mkdir(parents=True)
    require_folder(path)


def require_folder(path: Path) -> None:
    """ValueError unless a path is a folder, or missing; a link to a folder is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISDIR(mode := path.lstat().st_mode):
            raise UsageError(str(path), "a folder", _kind_of(mode), "remove it")


def require_plain(folder: Path) -> None:
    """ValueError if a folder has anything besides folders and regular files, at any depth."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:  # another process may remove what it holds
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                require_plain(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                kind = _kind_of(entry.stat(follow_symlinks=False).st_mode)
                raise UsageError(entry.path, "a regular file or a folder", kind, "remove it")


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
    unfinished.unlink(missing_ok=True)  # of a killed process of this number, or a link
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
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.unfinished")
    make_folder(unfinished)
    with opened(unfinished) as descriptor:
        try:
            lock(descriptor)
        except BlockingIOError:
            raise ValueError(
                f"{out} is being written by another process; wait for it, or choose another --out"
            ) from None
        try:
            empty(unfinished)
            with naming(out):
                yield unfinished
            place(unfinished, out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def place(folder: Path, out: Path) -> None:
    """Flush a folder to the disk, then rename it to `out`. ValueError if `out` exists.

    Files get the mode that new files have here; safetensors writes 0600, so that no other user could read them.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(folder.stat().st_mode & 0o666)
        flush(path)
    flush(folder)
    if out.exists():
        raise ValueError(f"--out {out} was created meanwhile, and is not overwritten; choose another --out")
    os.rename(folder, out)
    flush(out.parent)


def checksums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of each file, except of hidden ones, COMPLETE and unit.json.

    torch.load ignores those of its zip files, and safetensors has none.
    """
    return {name: [path.lstat().st_size, _crc32(path)] for name, path in _sealed(folder).items()}


def changed_file(folder: Path, sums: Any) -> str | None:
    """Name of the first file that is new, lost, or not as it was for `checksums`; None if there is none."""
    paths, sums = _sealed(folder), sums if isinstance(sums, dict) else {}
    for name in sorted(paths.keys() | sums.keys()):
        if name not in paths or name not in sums:
            return name
        size, recorded = paths[name].lstat().st_size, sums[name]
        is_of_size = isinstance(recorded, list) and recorded[:1] == [size]  # compared first: the file may be huge
        if not is_of_size or recorded != [size, _crc32(paths[name])]:
            return name
    return None


def _sealed(folder: Path) -> dict[str, Path]:
    """Name -> path of everything in a folder that has a checksum."""
    paths = [path for path in folder.rglob("[!.]*") if path.name not in (COMPLETE, UNIT)]
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_symlink() or not path.is_dir()}


def _crc32(path: Path) -> int:
    number = 0
    with regular(path) as descriptor:
        while block := os.read(descriptor, 2**20):
            number = zlib.crc32(block, number)
    return number


def is_as_sealed(folder: Path) -> bool:
    """Whether a folder's files match the checksums in its COMPLETE."""
    try:
        return changed_file(folder, read_json(folder / COMPLETE)) is None
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
def opened(path: Path) -> Iterator[int]:
    """A file descriptor of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def empty(folder: Path, pattern: str = "*") -> None:
    """Remove everything in a folder whose name fits the pattern. Only for its one writer."""
    for path in folder.glob(pattern):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def flush(path: Path) -> None:
    """Write a file or folder from the system's cache to the disk."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def write_json(path: Path, value: Any, allow_nan: bool = False) -> None:
    """Write JSON, whole or not at all. allow_nan: for files of other programs, which may have NaN or Infinity."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=allow_nan)
    with atomic(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")


def append_json(path: Path, entry: Mapping[str, Any]) -> None:
    """Append a line of JSON to a journal, made if it is missing. ValueError for a link or a pipe."""
    line = json.dumps(entry, ensure_ascii=False) + "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with naming(path), regular(path, flags, "remove it") as descriptor, open(descriptor, "ab", closefd=False) as file:
        file.write(line.encode())


def read_json_lines(path: Path) -> list[Any]:
    """The entries of a journal up to the first line that is half-written, as a kill leaves it, or damaged."""
    lines = read_bytes(path, "remove it").splitlines() if os.path.lexists(path) else []
    entries: list[Any] = []
    with suppress(ValueError):
        for line in lines:
            entries.append(parsed_json(line))  # those before an error stay
    return entries


def cut_json_lines(path: Path, count: int | None = None) -> list[Any]:
    """Cut a journal to its first `count` entries, by default to those that can be read, and return them."""
    entries = read_json_lines(path)[:count]
    with atomic(path) as unfinished:
        unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return entries


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
