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
    """Pass the runtime's GOMP_parallel to one of our libraries."""
    _using.append(library)
    library.use_team(ctypes.c_void_p(None if _lost else team()))


def team() -> int | None:
    """The address of GOMP_parallel in torch's runtime; None if torch has no OpenMP: our loops then use one thread."""
    runtime = _runtime()
    return None if runtime is None else ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value


@lru_cache
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime of torch, found as the dynamic linker finds it: in global symbols, then in what torch links to.

    Neither contains the runtime that another package has for itself.
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
    """Why loops use one thread although torch may have several; None if they use as many."""
    if _lost:
        return "this process was forked from one with threads, which torch's runtime would wait for"
    return None if team() is not None else "torch has no OpenMP runtime here"


def _before_fork() -> None:
    """End the runtime's waiting threads, if possible: a forked child has none of them, and would wait for them forever."""
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
