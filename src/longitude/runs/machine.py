"""This machine: device, cores, memory, what a call takes of them, limits for work of others, and what computed a number.

Importing this does not load torch.
"""

import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil

try:
    import resource
except ImportError:  # Windows
    resource: Any = None

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda", "mps"]
"""Device of a run; auto: an accelerator if there is one."""
GROUP = Path("/sys/fs/cgroup")
"""Folder of a container's resource limits."""
PACKAGES = ("longitude", "torch", "transformers", "accelerate", "numpy", "scipy", "pandas")
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


# ---- device and cores ------------------------------------------------------------------------------------------------
def device_of(name: str = "auto") -> "torch.device":
    """The device of an option --device. ValueError when this machine does not have it."""
    import torch

    if name == "auto":
        name = next(name for name in ("cuda", "mps", "cpu") if there(name))
    if not there(name):
        raise ValueError(f"--device {name}: this machine has none that torch {torch.__version__} can use; try cpu")
    return torch.device(name)


def there(name: str) -> bool:
    """Whether this machine has the device of an option --device."""
    import torch

    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    return name in ("auto", "cpu") or (name in available and available[name]())


def cores() -> int:
    """Cores that this process may use: those of its affinity, and of its container's share of the processor's time."""
    count = float(os.cpu_count() or 1)
    with suppress(AttributeError):  # not Linux
        count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no group, or no limit ("max")
        quota, period = (GROUP / "cpu.max").read_text().split()
        count = min(count, int(quota) / int(period))
    return max(1, math.ceil(count))


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Set torch's number of threads; None leaves it. Yields the number, and restores the previous one afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


# ---- memory ----------------------------------------------------------------------------------------------------------
def available_memory(device: str = "cpu") -> int:
    """Bytes that can be allocated now: on the device, or on the machine within the limits of this process and its group."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info()[0]
    free = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # not Linux, or no limit ("max")
        free.append(int((GROUP / "memory.max").read_text()) - int((GROUP / "memory.current").read_text()))
    with suppress(AttributeError):  # not Linux
        process = psutil.Process()
        if (limit := process.rlimit(psutil.RLIMIT_AS)[0]) != psutil.RLIM_INFINITY:  # ulimit -v
            free.append(limit - process.memory_info().vms)
    return max(0, min(free))


def total_memory(device: str = "cpu") -> int:
    """Bytes of the device or of the machine."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info()[1]
    return psutil.virtual_memory().total


def require_memory(needed: float, free: float, what: str, remedy: str) -> None:
    """ValueError if more bytes are needed than are free. what: such as "reading takes"; remedy: such as "take less"."""
    if needed > free:
        there = f"{free / 2**30:.1f} GiB are available"
        raise ValueError(f"{what} about {needed / 2**30:.1f} GiB of memory, {there}; {remedy}")


def can_measure_peak() -> bool:
    """Whether /proc has the peak of a process and can reset it, as on Linux."""
    return STATUS.exists() and RESET.exists()


def peak_memory() -> int:
    """The peak of this process's memory, in bytes."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text())
    assert peak is not None
    return int(peak[1]) * 1024


def memory_growth(call: Callable[[], object]) -> int:
    """Bytes by which call() raises the peak of this process above its memory before."""
    RESET.write_text("5")  # the peak starts again from what is held now: imports peak higher
    before = peak_memory()
    call()
    return peak_memory() - before


# ---- limits ----------------------------------------------------------------------------------------------------------
def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns. TimeoutError after `seconds`; its thread is abandoned then, and keeps no process alive."""
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType] - it is None only with an error


@contextmanager
def memory_within(more: int) -> Iterator[None]:
    """Context in which this process may take `more` bytes; beyond them MemoryError. Without effect except on Linux."""
    if resource is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + more
    with suppress(ValueError, OSError):  # a lower limit is there already
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---- provenance ------------------------------------------------------------------------------------------------------
def provenance() -> dict[str, Any]:
    """versions, commit and machine: what every run records."""
    return {"versions": versions(), "commit": commit_of_code(), "machine": machine()}


def versions() -> dict[str, str | None]:
    """Package -> version; Python too."""
    return {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}


@cache
def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def machine() -> dict[str, Any]:
    """Description of this machine."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name, family = known.get("model name"), known.get("cpu family")
    kind = f" (family {family}, model {known.get('model')})" if family else ""  # many processors share a name
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": f"{name}{kind}" if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


@cache
def commit_of_code() -> str | None:
    """The git commit of this source tree, with "-dirty" if files differ from it; None if it is in no repository."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")
