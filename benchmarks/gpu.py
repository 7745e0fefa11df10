"""Everything that needs a GPU, in one command of at most nine minutes: `make gpu`, or `python benchmarks/gpu.py` with any Python
that has torch >= 2.11 for CUDA, triton, jaxtyping and pytest. Nothing is installed.

    python benchmarks/gpu.py                                   # laws, then times, against torch's flash attention
    python benchmarks/gpu.py --parts attention rotation        # some of it
    python benchmarks/gpu.py --interpret                       # every cell once, interpreted, tiny: no number means anything

Without a GPU it runs the laws interpreted, and says so. Rows are written as they come, to $OUT/gpu.json or
benchmarks/results/DATE-gpu.json. A cell that fails leaves a row with the reason; a part that crashes, or that loses the GPU, goes
on behind the cell that did it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # nothing is installed where GPUs are
MINUTES = 9
"""Minutes that the whole command takes at most."""
GPU_LOST = 3
"""Exit code of a process whose GPU answers no more."""
AHEAD = 45
"""Seconds in which kernels are compiled, all at once."""
PARTS = {"laws": 140, "checks": 50, "attention": 150, "rotation": 30, "decode": 60}
"""Seconds of each, at most, in this order."""
TARGETS = {
    "the same bits twice": 1.0,
    "ALiBi, T5, KERPLE, forward": 0.90,
    "ALiBi, T5, KERPLE, forward + backward": 0.80,
    "FIRE, forward": 0.85,
    "FIRE, forward + backward": 0.75,
    "FoX, forward": 0.85,
    "FoX, forward + backward": 0.75,
    "window and documents, forward": 0.80,
    "window and documents, forward + backward": 0.80,
    "rotation of q and k, of a copy": 0.85,
    "memory at 8192, of a dense bias": 0.02,
}
"""At least; of memory at most. Ratios are to torch's flash attention in the same process."""
AT_MOST = {"memory at 8192, of a dense bias"}
PROTOCOL = (
    "Causal attention in bfloat16 over 16,384 tokens in all, heads of together 2,048 numbers, [B, L, H, D] with the heads "
    "brought forward. Each row: all ways in turns in one process, 20 turns after two calls that warm up, the median of "
    "times by CUDA events, behind a pause of the GPU in which the host runs ahead. flash, cudnn: torch's "
    "scaled_dot_product_attention by that kernel, causal, without any bias. score: flash's time over ours; where a mask "
    "leaves pairs out, times the share of pairs that is left. TFLOP/s count 4 head_dim per pair that the mask allows, and "
    "2.5 times as much backward. Documents and windows are found once, as the layers of a forward share them. Decoding: 64 "
    "tokens after a prompt of 512, whole generations by the wall clock. Memory: the peak of a training step beyond inputs, "
    "output and gradients."
)


# ---- rows ------------------------------------------------------------------------------------------------------------
class Results:
    """The file, written whole after every row; the row of a cell that began is there before it ends."""

    def __init__(self, path: Path):
        self.path = path
        self.kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schema": 1, "rows": []}

    def put(self, row: dict[str, Any]) -> None:
        self.kept["rows"] = [other for other in self.rows if other["key"] != row["key"]] + [row]
        self.write()

    def write(self) -> None:
        part, rows = self.path.with_suffix(".part"), ",\n  ".join(map(json.dumps, self.rows))
        text = json.dumps(self.kept | {"rows": []}, indent=1).replace('"rows": []', f'"rows": [\n  {rows}\n ]')
        part.write_text(text, encoding="utf-8")
        part.replace(self.path)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.kept["rows"]


def chip() -> dict[str, Any]:
    """What it runs on."""
    about: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        about |= {"gpu": gpu.name, "multiprocessors": gpu.multi_processor_count, "memory": gpu.total_memory}
        about["capability"] = list(torch.cuda.get_device_capability())
    return about


def ended(process: subprocess.Popen[Any], seconds: float) -> str:
    """Wait for it, and end it with its own children when the time is over; why it was ended."""
    try:
        process.wait(max(0.1, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "its time was over"
    return ""


# ---- laws: suites of pytest, side by side ----------------------------------------------------------------------------
BACKENDS = "tests/attention/backends"
ROTATION = ["tests/positions/test_rotation_on_gpu.py", "-m", "not slow"]
SUITES = {
    "triton": [f"{BACKENDS}/triton/test_kernels.py", "-m", "not slow"],
    "rotation": ROTATION,
    "all backends": [f"{BACKENDS}/test_cuda.py"],
}
INTERPRETED = {
    "triton": [f"{BACKENDS}/triton/test_kernels.py", f"{BACKENDS}/triton/test_backend.py", "-m", "not slow"],
    "rotation": ROTATION,
}
SHARES = {"triton": 4, "all backends": 8}
"""Processes that share a suite on 16 cores: what takes time is to compile, which each does on one."""
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
OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
"""Of a test that ended, as pytest -v prints it."""
MARKERS = "slow", "one_in(n)", "browser", "ecosystem", "gpu", "timeout(n)"
SETTINGS = "[pytest]\naddopts = --import-mode=importlib\nmarkers =\n" + "".join(
    f"    {name}: here\n" for name in MARKERS
)
"""The project's own ask for plugins that may not be here."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """This file is a plugin, too: `pytest -p gpu --part 2/5` runs the second of five parts of the tests."""
    parser.addoption("--part", default="1/1", metavar="N/OF", help="tests that are next to each other")


@pytest.hookimpl(trylast=True)  # of those that -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, of = map(int, config.getoption("--part").split("/"))
    items[:] = items[len(items) * (part - 1) // of : len(items) * part // of]


def commands(suites: dict[str, list[str]], settings: Path, cores: int) -> Iterator[tuple[str, list[str]]]:
    """(suite, command), several of a suite whose parts run side by side."""
    flags = ["-v", "-c", str(settings), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "gpu"]
    for name, arguments in suites.items():
        parts = max(1, SHARES.get(name, 1) * min(16, cores) // 16)
        for part in range(1, parts + 1):
            yield name, [sys.executable, "-m", "pytest", *flags, *arguments, "--part", f"{part}/{parts}"]
    for tool in SANITIZERS if suites is SUITES and shutil.which("compute-sanitizer") else ():
        yield tool, ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", CALL]


def laws(suites: dict[str, list[str]], results: Results, seconds: float) -> None:
    """A row for each suite, with what failed."""
    end, folder, cores = time.monotonic() + seconds, results.path.parent, len(os.sched_getaffinity(0))
    settings = folder / "pytest.ini"
    settings.write_text(SETTINGS)
    every = [*commands(suites, settings, cores)]
    path = os.pathsep.join(
        [*(str(ROOT / name) for name in ("src", "benchmarks", "docs")), os.environ.get("PYTHONPATH", "")]
    )
    # Without the second, torch refuses every product of matrices on CUDA once tests ask for determinism.
    environment = {"OMP_NUM_THREADS": str(max(1, cores // len(every))), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment = {**environment, **os.environ, "PYTHONPATH": path}
    running = []
    for number, (name, command) in enumerate(every):
        log = folder / f"laws-{name.replace(' ', '-')}-{number}.log"
        with log.open("w") as out:
            options: Any = {"stdout": out, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
            running.append((name, log, subprocess.Popen(command, cwd=ROOT, **options)))
    rows: dict[str, dict[str, Any]] = {}
    for name, log, process in running:
        row = {
            "part": "laws",
            "suite": name,
            "key": f"laws | {name}",
            "passed": 0,
            "skipped": 0,
            "failed": [],
            "notes": {},
        }
        row, note = rows.setdefault(name, row), ended(process, end - time.monotonic())
        text = log.read_text(errors="replace")
        outcomes = OUTCOME.findall(text)
        failed = [test for test, outcome in outcomes if outcome in ("FAILED", "ERROR")]
        row["failed"] += failed
        for outcome in ("passed", "skipped"):
            row[outcome] += sum(word == outcome.upper() for _, word in outcomes)
        if process.returncode not in (0, 5) and not note and not failed:  # 5: few tests leave none for a part
            note = (text.strip().splitlines() or ["no output"])[-1]
        if note:
            row["notes"] = {"pytest": note}
    for row in rows.values():
        results.put(row)
        counts = f"{row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped"
        print(f"{row['key']}: {counts}", *row["notes"].values(), *row["failed"][:20], sep="\n  ", flush=True)
    settings.unlink()


# ---- cells -----------------------------------------------------------------------------------------------------------
def cells(part: str, device: str) -> Iterator[Any]:
    import gpu_cells

    machine = gpu_cells.Machine(device, rounds=20 if device == "cuda" else 1)
    machine.prepare()
    return gpu_cells.PARTS[part](machine)


def measure(part: str, device: str, results: Results, seconds: float) -> int:
    """Every cell of a part that has no row yet, in this process."""
    start, done = time.monotonic(), {row["key"] for row in results.rows}
    for cell in cells(part, device):
        if cell.key in done:
            continue
        row = {**cell.about, "key": cell.key, "target": cell.target}
        if time.monotonic() - start > seconds:
            results.put(row | {"notes": {"cell": "no time was left"}})
            continue
        results.put(row | {"notes": {"cell": "it began, and did not end"}})
        lost = False
        try:
            row |= cell.measure()
        except ModuleNotFoundError as error:  # of other packages than those that the command asks for
            row["notes"] = {"skipped": f"it needs the package {error.name}, which is not here"}
        except Exception as error:
            message = (str(error).strip().splitlines() or ["no message"])[0]
            row["notes"] = {"cell": f"{type(error).__name__}: {message}"[:300]}
        if device == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception as error:
                lost = True
                row["notes"] = row.get("notes", {}) | {"gpu": f"lost: {type(error).__name__}"}
        results.put(row)
        print(line(row), flush=True)
        if lost:
            return GPU_LOST
    return 0


def run(part: str, asked: argparse.Namespace, results: Results, seconds: float) -> Results:
    """A part in a process of its own; begun again behind a cell that ended the process or lost the GPU."""
    end = time.monotonic() + seconds
    command = [sys.executable, __file__, "--only-part", part, "--out", str(results.path)]
    command += ["--interpret"] * asked.interpret
    for _ in range(20):
        left = end - time.monotonic()
        if left < 3:
            break
        process = subprocess.Popen([*command, "--seconds", str(left - 2)], start_new_session=True)
        note = ended(process, left)
        results = Results(results.path)
        if note or process.returncode == 0:
            break
    known = {row["key"] for row in results.rows}
    for cell in cells(part, device_of(asked)):
        if cell.key not in known:
            results.put({**cell.about, "key": cell.key, "target": cell.target, "notes": {"cell": "no time was left"}})
    return results


def compile_ahead(asked: argparse.Namespace, results: Results, seconds: float) -> None:
    """Each kernel of attention once, in processes side by side: Triton keeps them on disk for the parts that follow."""
    import gpu_cells

    start, notes, running = time.monotonic(), {}, {}
    command = [sys.executable, __file__, "--out", str(asked.out), "--ahead"]
    for job in itertools.product(gpu_cells.ENCODINGS, ("64", "128")):
        log = asked.out.with_name(f"ahead-{'-'.join(job)}.log")
        with log.open("w") as out:
            process = subprocess.Popen([*command, *job], stdout=out, stderr=out, start_new_session=True)
        running[" ".join(job)] = log, process
    for name, (log, process) in running.items():
        note = ended(process, start + seconds - time.monotonic())
        if note or process.returncode:
            notes[name] = note or (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1][:300]
        else:
            log.unlink()
    results.put({"part": "compile", "key": "compile", "seconds": time.monotonic() - start, "notes": notes})
    compiled = f"{len(running) - len(notes)} of {len(running)} kinds of kernels compiled"
    print(compiled, *notes.items(), sep="\n  ", flush=True)


# ---- what is printed -------------------------------------------------------------------------------------------------
def line(row: dict[str, Any]) -> str:
    about = "  ".join(str(value) for value in row["key"].split(" | ") if value)
    ms = ", ".join(f"{way} {time:.3f} ms" for way, time in row.get("ms", {}).items())
    kinds = ("tflops", "tokens_per_second", "gb_per_second")
    rates = ", ".join(f"{way} {rate:.0f}" for kind in kinds for way, rate in row.get(kind, {}).items())
    score = "" if row.get("score") is None else f"  -> {row['score']:.3f}"
    why = "".join(f"  [{way}: {note}]" for way, note in row.get("notes", {}).items())
    return f"{about}: {ms}" + (f" ({rates})" if rates else "") + score + why


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target with the worst of its rows."""
    judged = []
    for name, limit in TARGETS.items():
        of_target = [row for row in rows if row.get("target") == name]
        scored = [row for row in of_target if row.get("score") is not None]
        worst = (max if name in AT_MOST else min)(scored, key=lambda row: row["score"], default=None)
        kept = None
        if worst is not None:
            kept = worst["score"] <= limit if name in AT_MOST else worst["score"] >= limit
        why = next((note for row in of_target for note in row.get("notes", {}).values()), "no row")
        judged.append({
            "target": name, "limit": limit, "at_most": name in AT_MOST, "measured": worst and worst["score"], "kept": kept,
            "rows": len(of_target), "unmeasured": len(of_target) - len(scored), "worst": worst["key"] if worst else why,
        })  # fmt: skip
    return judged


def table(judged: list[dict[str, Any]]) -> str:
    lines = []
    for target in judged:
        sign = "<=" if target["at_most"] else ">="
        word = {True: "kept", False: "MISSED", None: "not measured"}[target["kept"]]
        measured = "-" if target["measured"] is None else f"{target['measured']:.3f}"
        lines.append(f"{target['target']:42} {sign} {target['limit']:.2f}  {measured:>8}  {word:12} "
                     f"{target['rows'] - target['unmeasured']}/{target['rows']} rows; {target['worst']}")  # fmt: skip
    missed = [target["target"] for target in judged if not target["kept"]]
    return "\n".join([*lines, f"missed or not measured: {'; '.join(missed) or 'nothing'}"])


# ---- the command -----------------------------------------------------------------------------------------------------
def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("OUT")
    place = Path(folder) / "gpu.json" if folder else ROOT / f"benchmarks/results/{date.today()}-gpu.json"
    parser.add_argument("--out", type=Path, default=place, help="the JSON; logs are written next to it")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--interpret", action="store_true", help="every cell once, on the CPU, very small")
    parser.add_argument("--ahead", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only-part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def device_of(asked: argparse.Namespace) -> str:
    return "cpu" if asked.interpret else "cuda"


def main() -> int:
    asked = parsed()
    if asked.ahead:
        import gpu_cells

        gpu_cells.compile_one(gpu_cells.Machine("cuda"), asked.ahead[0], int(asked.ahead[1]))
        return 0
    if asked.only_part:
        return measure(asked.only_part, device_of(asked), Results(asked.out), asked.seconds)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.unlink(missing_ok=True)
    results, start = Results(asked.out), time.monotonic()
    results.kept |= {"machine": chip(), "protocol": PROTOCOL}
    results.write()
    print(", ".join(f"{name} {value}" for name, value in results.kept["machine"].items()), flush=True)
    if find_spec("triton") is None:
        print("nothing was run: triton is not here")
        return 1
    if not asked.interpret and not torch.cuda.is_available():
        print(
            "no CUDA device: the laws run interpreted; tests/attention/backends/triton/test_compiled.py compiles the kernels"
        )
        asked.interpret, asked.parts = True, ["laws"]
    if asked.interpret:
        os.environ["TRITON_INTERPRET"] = "1"

    def left(most: float) -> float:
        """Interpreted, the seconds are the machine's, and nothing is left out."""
        return 1800 if asked.interpret else min(most, 60 * MINUTES - 10 - (time.monotonic() - start))

    if not asked.interpret and {"checks", "attention"} & {*asked.parts}:
        compile_ahead(asked, results, left(AHEAD))
    for part in asked.parts:
        begun = time.monotonic()
        if left(600) < 5:
            print(f"{part}: no time was left")
        elif part == "laws":
            laws(INTERPRETED if asked.interpret else SUITES, results, left(PARTS[part]))
        else:
            results = run(part, asked, results, left(PARTS[part]))
        print(f"-- {part}: {time.monotonic() - begun:.0f} s", flush=True)
    results.kept |= {"targets": verdicts(results.rows), "seconds": round(time.monotonic() - start)}
    results.write()
    broken = [
        row["key"] for row in results.rows if row.get("failed") or {"cell", "gpu", "pytest"} & row["notes"].keys()
    ]
    if asked.interpret:
        print("interpreted and very small: no number means anything, and no target is judged")
    else:
        print(table(results.kept["targets"]))
    summary = f"{len(results.rows)} rows in {results.kept['seconds']} s, {len(broken)} broken"
    print(summary + (f": {'; '.join(broken)}" if broken else ""))
    missed = not asked.interpret and any(target["kept"] is False for target in results.kept["targets"])
    return int(bool(broken) or missed)


if __name__ == "__main__":
    sys.exit(main())
