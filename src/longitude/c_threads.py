"""Threads of the C kernels: those of torch's OpenMP runtime. The kernels link to no runtime themselves (parallel.h)."""

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

import torch

_using: list[ctypes.CDLL] = []
_waits_for_nobody = True  # whether a child of the last fork may call torch's runtime
_lost = False


def use_threads(library: ctypes.CDLL) -> None:
    """Gives the runtime's function to a library of ours."""
    _using.append(library)
    library.use_team(ctypes.c_void_p(None if _lost else team()))


def team() -> int | None:
    """The address of GOMP_parallel in torch's runtime; None where torch has no OpenMP, and our loops take one thread."""
    runtime = _runtime()
    return None if runtime is None else ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value


@lru_cache
def _runtime() -> ctypes.CDLL | None:
    """Found as the dynamic linker finds it for torch: among what is global in the process, then in what torch links to.

    A runtime that another package brought for itself is in neither.
    """
    if not torch.backends.openmp.is_available():
        return None
    for name in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            library = ctypes.CDLL(name)
            library.GOMP_parallel  # noqa: B018
            return library
        except (OSError, AttributeError):
            continue
    return None


def why_alone() -> str | None:
    """Why loops take one thread although torch may have several; None where they take as many."""
    if _lost:
        return "this process was forked from one with threads, which torch's runtime would wait for"
    return None if team() is not None else "torch has no OpenMP runtime here"


def _before_fork() -> None:
    """Ends the runtime's waiting threads, where it can: a child has none of them, and would wait for them for ever."""
    global _waits_for_nobody
    pause = getattr(_runtime(), "omp_pause_resource_all", None)
    ended = pause is not None and pause(1) == 0  # since OpenMP 5; the next loop or operator starts them again
    try:
        _waits_for_nobody = ended or len(os.listdir("/proc/self/task")) == 1
    except OSError:  # no /proc: there may be threads
        _waits_for_nobody = False


def _after_fork() -> None:
    global _lost
    _lost = _lost or not _waits_for_nobody
    for library in _using if _lost else ():
        library.use_team(ctypes.c_void_p(None))


if sys.platform == "linux":
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
