"""The few loops in C, compiled on first use where there is a compiler, and whether they may read a tensor.

Each has a form in torch's operators too.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")


@lru_cache
def library(source: Path, *options: str) -> ctypes.CDLL | None:
    """The functions of a C file, compiled for this processor in less than a second and kept in the user's cache.

    None where there is no Linux or gcc, or LONGITUDE_COMPILE=0 in the environment; with a warning where compiling fails.
    """
    # Elsewhere torch ships another OpenMP than the compiler's, and two in one process oversubscribe the cores.
    gcc = shutil.which("gcc") if sys.platform == "linux" and os.environ.get("LONGITUDE_COMPILE") != "0" else None
    if gcc is None:
        return None
    wide = ["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []
    command = [gcc, *FLAGS, *wide, *options]
    try:
        version = subprocess.run([gcc, "--version"], check=True, capture_output=True, timeout=60).stdout
        texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
        inputs = b"\0".join([*texts, version, _processor(), " ".join(command).encode()])
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "longitude")
        kept = folder / f"{source.stem}-{hashlib.sha256(inputs).hexdigest()[:20]}.so"
        if not kept.is_file() or kept.stat().st_size == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as unfinished:
                made = Path(unfinished.name)
            try:
                subprocess.run(
                    [*command, "-o", str(made), str(source), "-lm"], check=True, capture_output=True, timeout=60
                )
                made.replace(kept)  # whole or not at all, if other processes compile it too
            finally:
                made.unlink(missing_ok=True)
        return ctypes.CDLL(str(kept))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
        warnings.warn(
            f"{source.name} could not be compiled, and slower operators run instead (LONGITUDE_COMPILE=0 selects them): "
            f"{reason.decode(errors='replace').strip()[:500]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


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


def words(numbers: Iterable[int]) -> ctypes.Array:
    """A struct of pointers and int64, as C takes it."""
    values = tuple(numbers)
    return (ctypes.c_int64 * len(values))(*values)


def _processor() -> bytes:
    """What the processor can do: a home directory may serve several."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
