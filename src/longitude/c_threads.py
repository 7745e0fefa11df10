"""Threads for the loops in C: those of the OpenMP runtime that torch's operators call. The loops link to none (parallel.h)."""

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

import torch

_using: list[ctypes.CDLL] = []
_at_fork = 1  # threads of this process when it last forked
_lost = False


def use_threads(library: ctypes.CDLL) -> None:
    """Gives the runtime's function to a library of ours."""
    _using.append(library)
    library.use_team(ctypes.c_void_p(None if _lost else team()))


@lru_cache
def team() -> int | None:
    """The address of GOMP_parallel in torch's runtime; None where torch has no OpenMP, and our loops take one thread.

    Found as the dynamic linker finds it for torch: first among what is global in the process, then in what torch links to. A
    runtime that another package brought for itself is in neither.
    """
    if not torch.backends.openmp.is_available():
        return None
    for name in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        try:
            function = ctypes.CDLL(name if name is None else str(name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


def why_alone() -> str | None:
    """Why loops take one thread although torch has several; None where they take as many."""
    if _lost:
        return "this process was forked from one with threads, which a runtime would wait for"
    return None if team() is not None else "torch has no OpenMP runtime here"


def _before_fork() -> None:
    global _at_fork
    _at_fork = len(os.listdir("/proc/self/task"))


def _after_fork() -> None:
    """A runtime whose threads stayed behind would wait for them for ever."""
    global _lost
    _lost = _lost or _at_fork > 1
    for library in _using if _lost else ():
        library.use_team(ctypes.c_void_p(None))


if sys.platform == "linux":
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
