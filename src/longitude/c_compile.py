"""The C kernels: prebuilt in a wheel, or by gcc on first use; and whether they may read a tensor.

Each also exists in torch's operators, which run if there is no compiled kernel.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longitude import c_build
from longitude.c_threads import use_threads, why_alone

SLOWER = {
    "band.c": "attention with a bias takes 1.4 to 1.7 times as long",
    "decode.c": "decoding a token with a bias may take longer",
    "rotate.c": "rotation takes 1.4 to 2.2 times as long",
    "delta.c": "gated DeltaNet, KDA and RWKV-7 take 1.3 to 2.1 times as long",
    "scan.c": "Mamba takes 1.9 to 2.4 times as long",
    "diagonal.c": "S4D takes 2.5 to 2.6 times as long",
    "wkv.c": "RWKV-4 takes 2.1 to 2.5 times as long",
}
"""Slowdown without the C kernels of each file, with torch's operators (benchmarks/loops.py; machine: docs/install.md)."""
_CPUINFO = Path("/proc/cpuinfo")
NAMES_ANOTHER = "XDG_CACHE_HOME=FOLDER names another"
WAIT = 600
"""Seconds to wait for another process that compiles."""
DAY = 86_400
KEPT = 90 * DAY
"""A library that nobody loaded for so long is removed."""


BY_GCC = "compiled by gcc for this processor"


class Loop(NamedTuple):
    """The functions of a C file, and how they were compiled; or None, and why there are none."""

    library: ctypes.CDLL | None
    origin: str


class _NotHere(Exception):
    """Raised if a source of compiled libraries does not exist, which is no error."""


class _Broken(_NotHere):
    """Raised if a library that should exist cannot be used, which is worth a warning."""


def library(source: Path, *options: str) -> ctypes.CDLL | None:
    """The functions of a C file; None if there are none, so that torch's operators run."""
    return loop(source, *options).library


@lru_cache
def loop(source: Path, *options: str) -> Loop:
    """The functions of a C file: prebuilt, if the wheel has it; else by gcc, in seconds, and kept in the user's cache.

    LONGITUDE_COMPILE=0 in the environment selects none, LONGITUDE_COMPILE=native gcc; another value raises ValueError. A
    RuntimeWarning tells of a way that should work and does not.
    """
    wish = os.environ.get("LONGITUDE_COMPILE", "")
    if wish not in ("", "0", "native"):
        raise ValueError(
            f"LONGITUDE_COMPILE: expected 0 (torch's operators) or native (gcc's loops), got {wish!r}; or unset it"
        )
    if wish == "0":
        return Loop(None, "LONGITUDE_COMPILE=0 is in the environment")
    if sys.platform != "linux":
        return Loop(None, f"they are for Linux, and this is {sys.platform}")
    missing: list[_NotHere] = []
    found = None
    for way in (_by_gcc,) if wish == "native" else (_ahead, _by_gcc):
        try:
            found = way(source, options)
            break
        except _NotHere as reason:
            missing.append(reason)
    why = "; ".join(map(str, [each for each in missing if isinstance(each, _Broken)] or missing))
    if any(isinstance(each, _Broken) for each in missing):
        instead = (
            found.origin
            if found
            else f"torch's operators run instead, and {_slower([source])} (LONGITUDE_COMPILE=0 selects them)"
        )
        warnings.warn(f"{source.name}, a loop in C: {why}; {instead}", RuntimeWarning, stacklevel=2)
    if found is None:
        return Loop(None, why)
    if found.library is not None and hasattr(found.library, "use_team"):
        use_threads(found.library)
    return found


def _slower(sources: Iterable[Path]) -> str:
    """Description of the slowdown without the C kernels of these files."""
    return ", ".join(SLOWER.get(source.name, f"{source.name} has no measurement") for source in sources)


def _inside(source: Path) -> str:
    """The path of a file inside the package; "" for a file outside of it."""
    return source.relative_to(c_build.PACKAGE).as_posix() if source.is_relative_to(c_build.PACKAGE) else ""


def _load(path: Path, source: Path) -> ctypes.CDLL:
    """The functions in a library. OSError if it is no library, is cut off, or lacks one of them."""
    if not _is_whole(path):
        raise OSError(f"{path} is cut off")
    library = ctypes.CDLL(str(path))
    for name in c_build.FUNCTIONS.get(_inside(source), ()):
        if not hasattr(library, name):
            raise OSError(f"{path} lacks the function {name}")
    return library


def _ahead(source: Path, options: tuple[str, ...]) -> Loop:
    """The prebuilt library of a source file from the installed wheel."""
    relative = _inside(source)
    if not c_build.AHEAD.is_dir() or options not in c_build.LOOPS.get(relative, ()):
        raise _NotHere("this install has none prebuilt")
    again = "install longitude again (pip install --force-reinstall --no-deps longitude)"
    machine = platform.machine()
    here = c_build.AHEAD / machine
    if not here.is_dir() or machine not in c_build.LEVELS:
        others = " and ".join(sorted(each.name for each in c_build.AHEAD.iterdir()))
        raise _Broken(f"this install is for {others or 'no processor'}, and the processor is {machine}: {again}")
    level = level_of(machine, _cpuinfo())
    try:
        return Loop(_load(here / level / c_build.name_of(relative, options), source), f"prebuilt for {level}")
    except OSError as error:
        raise _Broken(f"{error}: {again}") from error


def _cpuinfo() -> str:
    """Content of /proc/cpuinfo; "" if it cannot be read; a baseline processor is then assumed."""
    try:
        return _CPUINFO.read_text()
    except OSError:
        return ""


def level_of(machine: str, cpuinfo: str) -> str:
    """The best level of instructions that the processor has, of those that wheels are compiled for."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = set(next((value for name, _, value in lines if name.strip() in ("flags", "Features")), "").split())
    levels = c_build.LEVELS[machine].items()
    return next(level for level, (_, needed) in levels if flags.issuperset(needed.split()))


def _is_whole(path: Path) -> bool:
    """Whether a library has its full length: loading a truncated one would crash the process."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            return False
        (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        return file.seek(0, os.SEEK_END) >= start + size * count


def _by_gcc(source: Path, options: tuple[str, ...]) -> Loop:
    """The library for this processor, from the cache or compiled now."""
    gcc = shutil.which("gcc")
    if gcc is None:
        raise _NotHere("no gcc is on the PATH")
    command = [*c_build.FLAGS, *c_build.NATIVE, *options]
    name = _name_in_cache(source, gcc, command)
    shared, own = _caches()
    for folder in dict.fromkeys((shared, own)):
        if (library := _kept(folder / name, source)) is not None:
            return Loop(library, BY_GCC)
    try:
        own.mkdir(mode=0o755, parents=True, exist_ok=True)
        if os.statvfs(own).f_flag & os.ST_NOEXEC:
            raise _Broken(f"{own} is on a file system from which no code may be loaded (noexec); {NAMES_ANOTHER}")
        with _alone_in(own):
            library = _kept(own / name, source)  # another process may have compiled it meanwhile
            if library is None:
                c_build.compile_c(gcc, source, command, own / name)
                _prune(own)
    except c_build.TooLong as error:
        raise _Broken(f"{gcc} was stopped: {error}") from error
    except subprocess.SubprocessError as error:
        words = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").strip()
        raise _Broken(f"it could not be compiled by {gcc}: {words[:500]}") from error
    except OSError as error:
        raise _Broken(f"{own} cannot be written to: {error.strerror or error}; {NAMES_ANOTHER}") from error
    try:
        return Loop(library or _load(own / name, source), BY_GCC)
    except OSError as error:
        raise _Broken(f"what {gcc} made cannot be loaded: {error}") from error


def _name_in_cache(source: Path, gcc: str, command: list[str]) -> str:
    """File name in the cache, different for each source text, compiler, processor and set of options."""
    try:
        version = subprocess.run([gcc, "--version"], check=True, capture_output=True, timeout=WAIT).stdout
        headers = sorted({*source.parent.glob("*.h"), c_build.PACKAGE / "parallel.h"})
        texts = [path.read_bytes() for path in (source, *headers)]
    except (OSError, subprocess.SubprocessError) as error:
        raise _Broken(f"it could not be compiled by {gcc}: {error}") from error
    inputs = b"\0".join([*texts, version, _processor(), " ".join([gcc, *command]).encode()])
    return f"{source.stem}-{hashlib.sha256(inputs).hexdigest()[:20]}.so"


# ---- the cache: code that this process will run, so only what nobody else can have written ----------------------------
def _caches() -> tuple[Path, Path]:
    """The folder that root may have filled for all users, and the one of this user: often the same."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:  # a relative path would be another folder in each working directory; the standard says to ignore it
        base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError as error:
        raise _Broken(
            "this user has no home directory, in which what gcc compiles is kept; XDG_CACHE_HOME=FOLDER names one"
        ) from error
    shared = base / "longitude"
    own = shared if _owner(shared) in (None, os.geteuid()) else base / f"longitude-{os.geteuid()}"
    if _owner(own) is not None and not _is_safe(own):
        raise _Broken(
            f"{own} belongs to user {_owner(own)} or can be written to by others, whose code it could contain; "
            f"mend it (chmod go-w), or {NAMES_ANOTHER}"
        )
    return shared, own


def _owner(path: Path) -> int | None:
    """User id of a file's owner; None if the file is missing or cannot be read."""
    try:
        return path.stat().st_uid
    except OSError:
        return None


def _is_safe(path: Path) -> bool:
    """Whether this user or root owns a file or folder, and nobody else can write to it, or only add files of his own."""
    found = path.stat()
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    adds_alone = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and (not others or bool(adds_alone))


def _kept(path: Path, source: Path) -> ctypes.CDLL | None:
    """A library that was compiled before; None if it is not there, is broken, or could be another user's."""
    try:
        if not (_is_safe(path.parent) and _is_safe(path)):
            return None
        library = _load(path, source)
    except OSError:
        return None
    with suppress(OSError):  # a file of root's cannot be changed
        if path.stat().st_mtime < time.time() - DAY:
            os.utime(path)  # still in use
    return library


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Context in which no other process compiles into this folder.

    It only saves work, because libraries are written atomically: if it takes too long, or the file system has no locks,
    processes compile in parallel.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    with suppress(Timeout, NotImplementedError):
        lock.acquire(timeout=WAIT)
    try:
        yield
    finally:
        lock.release()


def _prune(folder: Path) -> None:
    """Remove libraries that nobody loads any more, of older versions and compilers, and what killed processes left."""
    now = time.time()
    with suppress(OSError):
        for path in folder.glob("*.so"):
            if path.stat().st_mtime < now - KEPT:
                path.unlink()
        for path in folder.glob(f"{c_build.UNFINISHED}*"):
            if path.stat().st_mtime < now - DAY:
                shutil.rmtree(path)


def route() -> str:
    """A line on the kernels that run on the CPU in this process, and why; those of rotation and attention represent all."""
    package = c_build.PACKAGE
    rotate, band = package / "positions/rotate.c", package / "attention/backends/table/band.c"
    some = {rotate: loop(rotate, *c_build.LOOPS["positions/rotate.c"][0]), band: loop(band)}
    origins = sorted({each.origin for each in some.values() if each.library is not None})
    absent = {source: each.origin for source, each in some.items() if each.library is None}
    if absent:
        why = "; ".join(sorted({*absent.values()}))
        return f"C kernels: {'only some' if origins else 'none'}, {why}: {_slower(absent)}"
    alone = why_alone()
    return f"C kernels: {' and '.join(origins)}{f', on one thread: {alone}' if alone else ''}"


class Passes(NamedTuple):
    """The forward and backward functions of a C file."""

    forward: Any
    backward: Any


@lru_cache
def passes(source: Path, dtype: torch.dtype) -> Passes | None:
    """Compiled passes of a file for float32 or float64 (-DDOUBLE); None for other dtypes, and if it cannot be compiled."""
    if dtype not in (torch.float32, torch.float64):
        return None
    found = library(source, *(("-DDOUBLE",) if dtype == torch.float64 else ()))
    if found is None:
        return None
    found.forward.restype = found.backward.restype = None
    return Passes(found.forward, found.backward)


def needs_operator(*tensors: Tensor | None) -> bool:
    """Whether a graph, a mode, a trace, a transform or a subclass of tensors need an operator: they have no plain memory."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._get_tracing_state() is not None:
        return True
    for x in tensors:  # noqa: SIM110 (every layer of a decoding step asks)
        if x is not None and (type(x) not in (Tensor, nn.Parameter) or x.is_neg()):
            return True
    return False


def in_memory(*tensors: Tensor) -> bool:
    """Whether C may read the tensors: they have memory on the CPU."""
    if needs_operator(*tensors):
        return False
    for x in tensors:  # noqa: SIM110 (as above)
        if not x.is_cpu:
            return False
    return True


def words(numbers: Sequence[int]) -> bytes:
    """A struct of pointers and int64, as C reads it. An array of ctypes takes four times as long to make."""
    return struct.pack(f"{len(numbers)}q", *numbers)


def _processor() -> bytes:
    """Model and features of the processor, for the cache key: several machines may share a home directory."""
    lines = _cpuinfo().encode().splitlines()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
