"""The device of a run, the cores that it may use, and its number of threads. Importing this does not load torch."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda", "mps"]
"""Device of a run; auto: an accelerator if there is one."""
GROUP = Path("/sys/fs/cgroup")
"""Folder of a container's resource limits."""


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
