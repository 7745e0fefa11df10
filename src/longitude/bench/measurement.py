"""One measurement: time in turns, memory in a fresh process, and the row that keeps both with their protocol.

Compared cases are called in turn, in one process, and ratios are taken turn by turn. Memory is the increase of the peak of a
fresh process by forward and backward (Linux): `python -m longitude.bench.measurement` reads a case from its argument and prints
MiB; `growth` starts it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from longitude.bench.cases import PLAIN, AttentionShape, Case, Inputs, ours, plain
from longitude.runs.machine import memory_growth

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
FAILED = "failed"
"""Prefix of a row's note if a measurement raised an error."""
STEADY = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""Larger blocks go back to the system as soon as they are freed, so that the peak is what was held at a time. Otherwise glibc
keeps holes, whose size varies with the order of threads, and blocks that fit into those of the warm-up count as no growth."""


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    baseline: str | Mapping[str, str],
    turns: int,
    clock: Clock = time.perf_counter,
    on_call: Callable[[str], object] = lambda name: None,
) -> dict[str, dict[str, Any]]:
    """Time cases in turns: each turn calls every case once, so that a slow moment of the machine affects all of them.

    The first turn warms up and is not counted. A ratio divides by the baseline of the same turn.

    Args:
        cases: name -> call.
        baseline: The name of the case that ratios divide by; or case -> the name of its baseline.
        turns: Number of counted turns; medians and quartiles are over them.
        clock: Function that returns seconds.
        on_call: Called with the name of each case after its call.

    Returns:
        name -> fields of its `Row`: seconds and, unless it is a baseline, ratio and `against`; medians with their quartiles.
    """
    against = dict.fromkeys(cases, baseline) if isinstance(baseline, str) else baseline
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(turns + 1):
        for name, call in cases.items():
            start = clock()
            call()
            spent = clock() - start
            if turn:
                seconds[name].append(spent)
            on_call(name)
    timings: dict[str, dict[str, Any]] = {}
    for name, spent in seconds.items():
        base = against.get(name, name)
        timings[name] = _spread("seconds", spent)
        if base != name:
            ratios = [of_case / of_base for of_case, of_base in zip(spent, seconds[base], strict=True)]
            timings[name] |= _spread("ratio", ratios) | {"against": base}
    return timings


def _spread(name: str, numbers: list[float]) -> dict[str, float]:
    """The median of some numbers, and their quartiles, as fields of a `Row`."""
    low, median, high = map(float, np.quantile(numbers, (0.25, 0.5, 0.75)))
    return {name: median, f"{name}_low": low, f"{name}_high": high}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of results; numbers that were not measured are None, and note gives the reason.

    group: the target it belongs to, "" for none. kind: "plain", "ours" or "peer". asked: the requested backend. backend: the
    backend that ran. work: description of the work.
    passed: "forward", "forward+backward", or another pass of this work. seconds: median of one call. ratio: to `against`,
    the median over turns, with its quartiles. memory_mib: increase of the peak of a fresh process by forward and backward.
    memory_beyond_mib: memory_mib minus that of attention without bias.
    """

    group: str = ""
    name: str
    kind: str
    asked: str = ""
    backend: str
    work: str = "attention"
    passed: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    dtype: str
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    against: str | None = None
    score: float | None = None
    memory_mib: float | None = None
    memory_beyond_mib: float | None = None
    threads: int
    clock: str
    turns: int
    note: str = ""


def growth(
    shape: AttentionShape,
    name: str,
    backend: str,
    threads: int,
    program: Sequence[str] = ("-m", "longitude.bench.measurement"),
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
