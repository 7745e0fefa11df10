"""How memory is measured: one case per process, by how far forward and backward lift the peak of that process.

`python -m longitude.bench.memory` reads a case from its arguments and prints MiB; `growth` asks it. Linux, because the peak
is read from /proc.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from longitude.bench.cases import AttentionShape, Inputs, find

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def can_measure() -> bool:
    return STATUS.exists() and RESET.exists()


def growth(work: AttentionShape, name: str, backend: str, threads: int) -> float:
    """MiB by which forward and backward of a case lift the peak of a fresh process, above its inputs."""
    question = json.dumps({"work": asdict(work), "name": name, "backend": backend, "threads": threads})
    command = [sys.executable, "-m", "longitude.bench.memory", question]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RuntimeError(f"measuring the memory of {name} ended with code {done.returncode}: {said}")
    return float(done.stdout)


def lifted(call: Callable[[], object]) -> float:
    """MiB by which call() lifts the peak of this process above what it holds now."""
    RESET.write_text("5")  # the peak starts again from what is held now: imports peak higher
    before = peak()
    call()
    return peak() - before


def peak() -> float:
    """The most memory that this process has held, in MiB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) / 1024


def available() -> float:
    """Bytes of memory that are free for the asking: of the machine, or of the group that this process is confined to."""
    free = [float("inf")]
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        free += [int(found[1]) * 1024.0] if found else []
        group = Path("/sys/fs/cgroup")
        free += [float((group / "memory.max").read_text()) - float((group / "memory.current").read_text())]
    except (OSError, ValueError):  # not Linux, or no limit ("max")
        pass
    return min(free)


def main(question: str) -> None:
    import torch

    asked: dict[str, Any] = json.loads(question)
    torch.set_num_threads(asked["threads"])
    work = AttentionShape(**asked["work"])
    small = replace(work, length=min(work.length, 300))
    find(asked["name"], asked["backend"], Inputs.of(small)).step(backward=True)()  # the libraries' own buffers
    step = find(asked["name"], asked["backend"], Inputs.of(work)).step(backward=True)
    print(lifted(step))


if __name__ == "__main__":
    main(sys.argv[1])
