"""The laws that `benchmarks/gpu.py` runs by pytest: which files, and what came of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 140
BACKENDS, TRITON = "tests/attention/backends", "tests/attention/backends/triton"
ROTATION = "tests/positions/test_rotation_on_gpu.py"
ON_CUDA = {
    "triton": [f"{TRITON}/test_kernels.py", "-m", "not slow"],
    "rotation": [ROTATION, "-m", "not slow"],
    "all backends": [f"{BACKENDS}/test_cuda.py"],
}
SHARES = {"triton": 4, "all backends": 8}
"""Processes that share a suite on 16 cores: what takes time is to compile, which each does on one."""
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The tests ask for it, and without this torch refuses every product of matrices on CUDA."""
INTERPRETED = {
    "triton": [
        f"{TRITON}/test_kernels.py",
        f"{TRITON}/test_backend.py",
        f"{TRITON}/test_intervals.py",
        "-m",
        "not slow",
    ],
    "rotation": [ROTATION, "-m", "not slow"],
}


SANITIZERS = "racecheck", "memcheck"
CALL = """
import torch
import longitude as lg

torch.manual_seed(0)
q, k, v = (torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
bias = lg.T5Bias(num_heads=2).to("cuda")
out = lg.attend(q, k, v, encoding=bias, backend="triton")
torch.autograd.grad(out.square().sum(), [q, k, v, *bias.parameters()])
torch.cuda.synchronize()
"""
"""Run by these tools of CUDA, where they are installed: forward and backward with a bias that learns, in several blocks."""
LINE = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>[A-Z]+) (?P<test>\S+::.*?)"
    r"|(?P<name>\S+::.*?) (?P<then>[A-Z]+)(?: \(.*)?(?: +\[ *\d+%\])?) *$"
)
"""Of a test that ended, as pytest -v prints it, with workers or without."""
SETTINGS = """[pytest]
addopts = --import-mode=importlib
markers =
    slow: here
    one_in(n): here
    browser: here
    ecosystem: here
    gpu: here
    timeout(n): here
"""
"""The project's own ask for plugins that may not be here."""


def run_suites(
    suites: dict[str, list[str]], folder: Path, seconds: float, environment: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Suites of pytest side by side, until the time is over; a row for each, with what failed."""
    settings = folder / "pytest.ini"
    path = os.pathsep.join(
        [*(str(ROOT / name) for name in ("src", "benchmarks", "docs")), os.environ.get("PYTHONPATH", "")]
    )
    settings.write_text(SETTINGS)
    flags = ["-v", "-c", str(settings), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "gpu_part"]
    cores, commands = len(os.sched_getaffinity(0)), {}
    for name, arguments in suites.items():
        paths = [each for each in arguments if not each.endswith(".py") or imports(ROOT / each)]
        parts = max(1, SHARES.get(name, 1) * min(16, cores) // 16)
        commands[name] = [
            [sys.executable, "-m", "pytest", *flags, *paths, "--part", f"{part}/{parts}"]
            for part in range(1, parts + 1)
        ]
    if suites is ON_CUDA:
        for tool in SANITIZERS if shutil.which("compute-sanitizer") else ():
            checked = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", CALL]
            commands[tool] = [checked]
    threads = {"OMP_NUM_THREADS": str(max(1, cores // sum(map(len, commands.values()))))}
    given, running = {**threads, **os.environ, "PYTHONPATH": path, **environment}, {}
    for name, parts in commands.items():
        running[name] = []
        for part, command in enumerate(parts, 1):
            log = folder / f"laws-{name.replace(' ', '-')}{f'-{part}' if len(parts) > 1 else ''}.log"
            with log.open("w") as out:
                process = subprocess.Popen(
                    command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=given, start_new_session=True
                )
            running[name].append((log, process))
    end = time.monotonic() + seconds
    for name, parts in running.items():
        found: dict[str, set[str]] = {}
        notes: list[str] = []
        for log, process in parts:
            note = ended(process, end - time.monotonic())
            text = log.read_text(errors="replace")
            own = outcomes(text)
            for word, tests in own.items():
                found.setdefault(word, set()).update(tests)
            nothing = process.returncode == 5 and len(parts) > 1  # of few tests there may be none for this part
            if process.returncode and not note and not nothing and not {"FAILED", "ERROR"} & own.keys():
                note = (text.strip().splitlines() or ["no output"])[-1]
            notes += [note] if note else []
        failed = sorted(chain(found.get("FAILED", ()), found.get("ERROR", ())))
        counts = {word: len(found.get(word.upper(), ())) for word in ("passed", "skipped")}
        about = {"part": "laws", "suite": name, "key": f"laws | {name}"}
        yield about | counts | {"failed": failed, "notes": {"pytest": "; ".join(notes)} if notes else {}}
    settings.unlink()


def outcomes(text: str) -> dict[str, set[str]]:
    """Tests by what came of them."""
    found: dict[str, set[str]] = {}
    for line in map(LINE.match, text.splitlines()):
        if line:
            found.setdefault(line["first"] or line["then"], set()).add(line["test"] or line["name"])
    return found


def imports(path: Path) -> bool:
    """Whether what a test file imports is here."""
    asked = re.findall(r"^(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return all(find_spec(name) for name in asked if name != "tests")


def ended(process: subprocess.Popen[Any], seconds: float) -> str:
    """Wait for it, and end it with its own children when the time is over; why it was ended."""
    try:
        process.wait(max(0.1, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "its time was over"
    return ""
