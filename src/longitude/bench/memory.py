"""Memory of a case: increase of the peak of a fresh process by forward and backward (Linux).

`python -m longitude.bench.memory` reads a case from its argument and prints MiB; `growth` starts it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from longitude.bench.cases import PLAIN, AttentionShape, Case, Inputs, ours, plain
from longitude.runs.memory import memory_growth

STEADY = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""Larger blocks go back to the system as soon as they are freed, so that the peak is what was held at a time. Otherwise glibc
keeps holes, whose size varies with the order of threads, and blocks that fit into those of the warm-up count as no growth."""


def growth(
    shape: AttentionShape,
    name: str,
    backend: str,
    threads: int,
    program: Sequence[str] = ("-m", "longitude.bench.memory"),
) -> float:
    """MiB by which forward and backward of a case raise the peak of a fresh process, above its inputs.

    program: Arguments of Python for a program that calls `main`; this module by default.
    """
    case = json.dumps({"shape": asdict(shape), "name": name, "backend": backend, "threads": threads})
    command = [sys.executable, *program, case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **STEADY})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"measuring the memory of {name} ended with code {done.returncode}: {last}")
    return float(done.stdout)


def find(name: str, backend: str, inputs: Inputs) -> Case:
    """A case by its name: plain, or an encoding of ours."""
    return plain(inputs) if name == PLAIN else ours(name, backend, inputs)


def main(text: str, find: Callable[[str, str, Inputs], Case] = find) -> None:
    case = json.loads(text)
    torch.set_num_threads(case["threads"])
    shape = AttentionShape(**case["shape"])
    small = replace(shape, length=min(shape.length, 300))
    find(case["name"], case["backend"], Inputs.of(small)).step(backward=True)()  # warm-up: the libraries' own buffers
    step = find(case["name"], case["backend"], Inputs.of(shape)).step(backward=True)
    print(memory_growth(step) / 2**20)


if __name__ == "__main__":
    main(sys.argv[1])
