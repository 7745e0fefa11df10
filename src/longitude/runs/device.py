"""Which device computes, and how many cores there are for it. Importing this does not load torch."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda", "mps"]
"""auto: an accelerator where there is one."""
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def device_of(name: str = "auto") -> "torch.device":
    """The device of an option --device. ValueError when this machine does not have it."""
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(each for each, there in available.items() if there)
    if not available.get(name):
        raise ValueError(f"--device {name}: this machine has none that torch {torch.__version__} can use; try cpu")
    return torch.device(name)


def cores() -> int:
    """Cores that this process may use: those of its affinity, and of its container's share of the processor's time."""
    count = os.cpu_count() or 1
    with suppress(AttributeError):  # not Linux
        count = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(count, min(_quotas(), default=count))))


def _quotas() -> Iterator[float]:
    """Cores' worth of time that each cgroup of this process grants, its own and those above it, of either version."""
    with suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = CGROUPS if not controllers else CGROUPS / "cpu"
            own = root / path.lstrip(
                "/"
            )  # in a container it may be a path of the host, and the root is the container's
            for folder in (own, *own.parents):
                if folder.is_relative_to(root):
                    with suppress(OSError, ValueError):  # no limit: no file, or "max"
                        yield _granted(folder, second=not controllers)


def _granted(folder: Path, second: bool) -> float:
    """OSError or ValueError where there is no limit."""
    if second:
        quota, period = map(int, (folder / "cpu.max").read_text().split())
    else:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return quota / period if quota > 0 else math.inf
