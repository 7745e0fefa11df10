"""Memory: how much is free, and by how much a call raises the peak of this process."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from longitude.runs.device import GROUP

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


# ---- what there is ---------------------------------------------------------------------------------------------------
def available_memory(device: str = "cpu") -> int:
    """Bytes that can be allocated now: on the device, or on the machine within the limits of this process and its group."""
    if device.startswith("cuda"):
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
        return torch.cuda.mem_get_info()[1]
    return psutil.virtual_memory().total


def require_memory(needed: float, free: float, what: str, remedy: str) -> None:
    """ValueError if more bytes are needed than are free. what: such as "reading takes"; remedy: such as "take less"."""
    if needed > free:
        there = f"{free / 2**30:.1f} GiB are available"
        raise ValueError(f"{what} about {needed / 2**30:.1f} GiB of memory, {there}; {remedy}")


# ---- what a call takes -----------------------------------------------------------------------------------------------
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
