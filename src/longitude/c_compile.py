"""The loops in C: compiled ahead in a wheel, or by gcc on first use; and whether they may read a tensor.

Each has a form in torch's operators too, which runs where there is no loop.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longitude import c_build
from longitude.c_threads import use_threads, why_alone

SLOWER = "attention with a bias takes 1.4 to 1.7 times as long, rotation 1.4 to 2.2 times"
"""What torch's operators take, of the time of the loops (benchmarks/loops.py)."""
_CPUINFO = Path("/proc/cpuinfo")


class Loop(NamedTuple):
    """The functions of a C file, and how they were compiled; or None, and why there are none."""

    library: ctypes.CDLL | None
    origin: str


class _NotHere(Exception):
    """One of the ways to a loop is not there: nobody promised it."""


class _Broken(_NotHere):
    """It should be there."""


def library(source: Path, *options: str) -> ctypes.CDLL | None:
    """The functions of a C file; None where there are none, and torch's operators run."""
    return loop(source, *options).library


@lru_cache
def loop(source: Path, *options: str) -> Loop:
    """Of a C file: compiled ahead, where the wheel has it; else by gcc, in seconds, and kept in the user's cache.

    LONGITUDE_COMPILE=0 in the environment: none; LONGITUDE_COMPILE=native: by gcc; ValueError for another word. There is a
    warning of what should work and does not, in one sentence.
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
            found.origin if found else f"torch's operators run instead, and {SLOWER} (LONGITUDE_COMPILE=0 selects them)"
        )
        warnings.warn(f"a loop in C is not as expected: {why}; {instead}", RuntimeWarning, stacklevel=2)
    if found is None:
        return Loop(None, why)
    if found.library is not None and hasattr(found.library, "use_team"):
        use_threads(found.library)
    return found


def _ahead(source: Path, options: tuple[str, ...]) -> Loop:
    """As the wheel has it."""
    relative = source.relative_to(c_build.PACKAGE).as_posix() if source.is_relative_to(c_build.PACKAGE) else ""
    if not c_build.AHEAD.is_dir() or options not in c_build.LOOPS.get(relative, ()):
        raise _NotHere("this install has none compiled ahead")
    again = "install longitude again (pip install --force-reinstall --no-deps longitude)"
    machine = platform.machine()
    here = c_build.AHEAD / machine
    if not here.is_dir():
        others = " and ".join(sorted(each.name for each in c_build.AHEAD.iterdir()))
        raise _Broken(f"this install is for {others or 'no processor'}, and the processor is {machine}: {again}")
    level = level_of(machine, _CPUINFO.read_text())
    path = here / level / c_build.name_of(relative, options)
    try:
        if not _is_whole(path):
            raise _Broken(f"{path} is cut off: {again}")
        return Loop(ctypes.CDLL(str(path)), f"compiled ahead for {level}")
    except OSError as error:
        raise _Broken(f"{error}: {again}") from error


def level_of(machine: str, cpuinfo: str) -> str:
    """The best level of instructions that the processor has, of those that wheels are compiled for."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = set(next((value for name, _, value in lines if name.strip() in ("flags", "Features")), "").split())
    levels = c_build.LEVELS[machine].items()
    return next(level for level, (_, needed) in levels if flags.issuperset(needed.split()))


def _is_whole(path: Path) -> bool:
    """Whether a library ends where its last part does: reading a shorter one would end the process."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            return False
        (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        return file.seek(0, os.SEEK_END) >= start + size * count


def _by_gcc(source: Path, options: tuple[str, ...]) -> Loop:
    """For this processor, on first use."""
    gcc = shutil.which("gcc")
    if gcc is None:
        raise _NotHere("no gcc is on the PATH")
    command = [*c_build.FLAGS, *c_build.NATIVE, *options]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "longitude")
    try:
        version = subprocess.run([gcc, "--version"], check=True, capture_output=True, timeout=60).stdout
        headers = sorted({*source.parent.glob("*.h"), c_build.PACKAGE / "parallel.h"})
        texts = [path.read_bytes() for path in (source, *headers)]
        inputs = b"\0".join([*texts, version, _processor(), " ".join([gcc, *command]).encode()])
        kept = folder / f"{source.stem}-{hashlib.sha256(inputs).hexdigest()[:20]}.so"
        if not kept.is_file() or not _is_whole(kept):
            c_build.compile_c(gcc, source, command, kept)
        return Loop(ctypes.CDLL(str(kept)), "compiled by gcc for this processor")
    except subprocess.SubprocessError as error:
        words = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").strip()
        raise _Broken(f"{source.name} could not be compiled by {gcc}: {words[:500]}") from error
    except (OSError, RuntimeError) as error:
        raise _Broken(
            f"{folder} cannot keep what gcc compiles: {error}; XDG_CACHE_HOME=FOLDER names another"
        ) from error


def route() -> str:
    """Which loops run on the CPU in this process, and why, in a line: those of rotation and of attention stand for all."""
    package = c_build.PACKAGE
    some = {
        loop(package / "positions/rotate.c", *c_build.LOOPS["positions/rotate.c"][0]),
        loop(package / "attention/backends/table/band.c"),
    }
    origins = sorted({each.origin for each in some if each.library is not None})
    absent = sorted({each.origin for each in some if each.library is None})
    if absent:
        return f"loops in C: {'only some' if origins else 'none'}, {'; '.join(absent)}: {SLOWER}"
    alone = why_alone()
    return f"loops in C: {' and '.join(origins)}{f', on one thread: {alone}' if alone else ''}"


class Passes(NamedTuple):
    """Both functions of a C file."""

    forward: Any
    backward: Any


@lru_cache
def passes(source: Path, dtype: torch.dtype) -> Passes | None:
    """Of a file of float32, and float64 where DOUBLE is defined; None for others, and where it cannot be compiled."""
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
    modes = torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()
    modes = modes or torch._C._get_tracing_state() is not None
    if modes:
        return True
    for x in tensors:  # noqa: SIM110 (every layer of a decoding step asks)
        if x is not None and (type(x) not in (Tensor, nn.Parameter) or x.is_neg()):
            return True
    return False


def in_memory(*tensors: Tensor) -> bool:
    """Whether C may read them: there are numbers behind them, on the CPU."""
    return not needs_operator(*tensors) and all(x.is_cpu for x in tensors)


def words(numbers: Sequence[int]) -> bytes:
    """A struct of pointers and int64, as C takes it. An array of ctypes takes four times as long to make."""
    return struct.pack(f"{len(numbers)}q", *numbers)


def _processor() -> bytes:
    """What the processor can do: a home directory may serve several."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
