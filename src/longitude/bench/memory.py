"""Memory of a case: increase of the peak of a fresh process by forward and backward (Linux).

`python -m longitude.bench.memory` reads a case from its argument and prints MiB; `growth` starts it.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import torch

from longitude.bench.cases import PLAIN, AttentionShape, Case, Inputs, ours, plain
from longitude.bench.peers import PEERS
from longitude.runs.memory import memory_growth

STEADY = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""Larger blocks go back to the system as soon as they are freed, so that the peak is what was held at a time. Otherwise glibc
keeps holes, whose size varies with the order of threads, and blocks that fit into those of the warm-up count as no growth."""


def growth(shape: AttentionShape, name: str, backend: str, threads: int) -> float:
    """MiB by which forward and backward of a case raise the peak of a fresh process, above its inputs."""
    case = json.dumps({"shape": asdict(shape), "name": name, "backend": backend, "threads": threads})
    command = [sys.executable, "-m", "longitude.bench.memory", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **STEADY})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"measuring the memory of {name} ended with code {done.returncode}: {last}")
    return float(done.stdout)


def find(name: str, backend: str, inputs: Inputs) -> Case:
    """A case by its name: plain, a peer, or an encoding of ours."""
    if name == PLAIN:
        return plain(inputs)
    peer = next((peer for peer in PEERS if peer.name == name), None)
    return ours(name, backend, inputs) if peer is None else peer.case(inputs)


def main(text: str) -> None:
    case = json.loads(text)
    torch.set_num_threads(case["threads"])
    shape = AttentionShape(**case["shape"])
    small = replace(shape, length=min(shape.length, 300))
    find(case["name"], case["backend"], Inputs.of(small)).step(backward=True)()  # warm-up: the libraries' own buffers
    step = find(case["name"], case["backend"], Inputs.of(shape)).step(backward=True)
    print(memory_growth(step) / 2**20)


if __name__ == "__main__":
    main(sys.argv[1])
