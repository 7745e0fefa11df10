"""The C kernels that were compiled when the package was installed. Nothing here runs a compiler.

Without them torch's operators run.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longitude.native import build

AGAIN = "install longitude again where gcc is on the PATH, or run python src/longitude/native/build.py in a clone"


class Kernels(NamedTuple):
    """The functions of a C file and for which processors they were compiled; or None, and why there are none."""

    library: ctypes.CDLL | None
    origin: str


def library(source: Path, *options: str) -> ctypes.CDLL | None:
    """The functions of a C file; None if there are none, so that torch's operators run."""
    return kernels(source, *options).library


@lru_cache
def kernels(source: Path, *options: str) -> Kernels:
    """The functions of a C file, compiled with these options, for the best instructions of this processor.

    LONGITUDE_COMPILE=0 in the environment selects none. A RuntimeWarning tells of a library that cannot be loaded.
    """
    if os.environ.get("LONGITUDE_COMPILE") == "0":
        return Kernels(None, "LONGITUDE_COMPILE=0 is in the environment")
    machine = platform.machine()
    name = build.name_of(source.relative_to(build.PACKAGE).as_posix(), options)
    for level in build.levels_of(machine, build.cpuinfo()):
        path = build.COMPILED / machine / level / name
        if not path.exists():
            continue
        try:
            functions = ctypes.CDLL(str(path))
        except OSError as error:
            warnings.warn(
                f"{source.name}: {error}; torch's operators run instead; {AGAIN}", RuntimeWarning, stacklevel=3
            )
            return Kernels(None, f"{error}: {AGAIN}")
        functions.use_team(ctypes.c_void_p(team()))
        return Kernels(functions, f"compiled for {level}")
    return Kernels(None, f"this install has none for {sys.platform} on {machine} and these sources: {AGAIN}")


def without_kernels() -> str | None:
    """A sentence if there are no C kernels here, and why; None if there are."""
    rotate = _rotate()
    if rotate.library is not None:
        return None
    return f"C kernels: none, so torch's operators run, which take up to three times as long: {rotate.origin}"


def route() -> str:
    """A line on the kernels that run on the CPU in this process."""
    alone = "" if team() else ", on one thread: torch has no OpenMP runtime here"
    return without_kernels() or f"C kernels: {_rotate().origin}{alone}"


def _rotate() -> Kernels:
    """Kernels of rotation, which represent all: one command compiles them."""
    source = "positions/rotate.c"
    return kernels(build.PACKAGE / source, *build.LIBRARIES[source][0])


# ---- threads: those of torch's OpenMP runtime, because two runtimes would take the processor from each other -----------------
@lru_cache
def team() -> int | None:
    """The address of GOMP_parallel in torch's runtime; None if torch has no OpenMP: our kernels then use one thread.

    It is found as the dynamic linker finds it: in global symbols, then in what torch links to. Neither contains the runtime that
    another package has for itself.
    """
    if not torch.backends.openmp.is_available():
        return None
    for name in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


# ---- calls -----------------------------------------------------------------------------------------------------------------
@lru_cache
def passes(source: Path, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """Forward and backward of a C file for float32 or float64 (-DDOUBLE); None for other dtypes, and if there are none."""
    if dtype not in (torch.float32, torch.float64):
        return None
    functions = library(source, *(("-DDOUBLE",) if dtype == torch.float64 else ()))
    if functions is None:
        return None
    functions.forward.restype = functions.backward.restype = None
    return functions.forward, functions.backward


def struct_of(numbers: Sequence[int]) -> bytes:
    """A struct of pointers and int64, as C reads it. An array of ctypes takes four times as long to make."""
    return struct.pack(f"{len(numbers)}q", *numbers)
