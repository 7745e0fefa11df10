"""Everything that needs a GPU, in one command of at most nine minutes: `make gpu`, or `python benchmarks/gpu.py` with any Python
that has torch >= 2.11 for CUDA, triton, jaxtyping and pytest. Nothing is installed.

    python benchmarks/gpu.py                                   # laws, then times, against torch's flash attention
    python benchmarks/gpu.py --parts attention rotation        # some of it
    python benchmarks/gpu.py --device cpu --interpret          # every cell once, interpreted, tiny: no number means anything

Without a GPU it runs the laws interpreted, compiles the kernels for chips that are not here, and says so. Rows are written as
they come, to $OUT/gpu.json or benchmarks/results/DATE-gpu.json. A cell that fails leaves a row with the reason; a part that
crashes, or that loses the GPU, goes on behind the cell that did it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gpu_laws import CUBLAS, INTERPRETED, ON_CUDA, SECONDS as LAWS, ended, run_suites

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # nothing is installed where GPUs are
MINUTES = 9.0
GPU_LOST = 3
"""Exit code of a process whose GPU answers no more."""
COMPILING = 90
"""Seconds of compilations where no GPU is."""
AHEAD = 45
"""Seconds in which kernels are compiled, all at once."""
PARTS = {"checks": 50, "attention": 150, "rotation": 30, "decode": 60}
"""Seconds of each, at most, in this order; laws have their own."""
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


# ---- rows --------------------------------------------------------------------------------------------------------------
class Results:
    """The file, written whole after every row; the row of a cell that began is there before it ends."""

    def __init__(self, path: Path):
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schema": 1, "rows": []}

    def put(self, row: dict[str, Any]) -> None:
        self.found["rows"] = [each for each in self.rows if each["key"] != row["key"]] + [row]
        self.write()

    def write(self) -> None:
        part, found = self.path.with_suffix(".part"), rounded(self.found)
        rows = ",\n  ".join(map(json.dumps, found["rows"]))
        text = json.dumps(found | {"rows": []}, indent=1).replace('"rows": []', f'"rows": [\n  {rows}\n ]')
        part.write_text(text, encoding="utf-8")
        part.replace(self.path)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.found["rows"]


def rounded(found: Any) -> Any:
    """Numbers to four digits: more are noise."""
    if isinstance(found, dict):
        return {name: rounded(each) for name, each in found.items()}
    if isinstance(found, list):
        return [*map(rounded, found)]
    return float(f"{found:.4g}") if isinstance(found, float) else found


def chip() -> dict[str, Any]:
    """What it runs on."""
    names = [name for name in ("triton", "transformers", "liger_kernel", "flash_attn") if find_spec(name)]
    found: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, "has": names,
    }  # fmt: skip
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        found |= {"gpu": about.name, "multiprocessors": about.multi_processor_count, "memory": about.total_memory}
        found["capability"] = list(torch.cuda.get_device_capability())
    return found


def laws(suites: dict[str, list[str]], results: Results, seconds: float, environment: dict[str, str]) -> None:
    """A row for each suite of tests."""
    for row in run_suites(suites, results.path.parent, seconds, environment):
        results.put(row)
        print(
            f"{row['key']}: {row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped",
            *row["notes"].values(),
            *row["failed"][:20],
            sep="\n  ",
            flush=True,
        )


# ---- cells -------------------------------------------------------------------------------------------------------------
def cells(part: str, device: str) -> Iterator[Any]:
    import gpu_cells

    machine = gpu_cells.Machine(device, rounds=20 if device == "cuda" else 1)
    machine.prepare()
    parts = {"checks": gpu_cells.checks, "attention": gpu_cells.attention_cells, "rotation": gpu_cells.rotation_cells}
    return (parts | {"decode": gpu_cells.decoding_cells})[part](machine)


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
            row["notes"] = {
                "cell": f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"[:300]
            }
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
    command = [sys.executable, __file__, "--only-part", part, "--device", asked.device, "--out", str(results.path)]
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
    for cell in cells(part, asked.device):
        if cell.key not in known:
            results.put({**cell.about, "key": cell.key, "target": cell.target, "notes": {"cell": "no time was left"}})
    return results


def compile_ahead(asked: argparse.Namespace, results: Results, seconds: float) -> None:
    """Each kernel of attention once, in processes side by side: Triton keeps them on disk for the parts that follow."""
    import gpu_cells

    start, notes, running = time.monotonic(), {}, {}
    command = [sys.executable, __file__, "--device", asked.device, "--out", str(asked.out), "--ahead"]
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
    print(
        f"{len(running) - len(notes)} of {len(running)} kinds of kernels compiled",
        *notes.items(),
        sep="\n  ",
        flush=True,
    )


# ---- what is printed ---------------------------------------------------------------------------------------------------
def line(row: dict[str, Any]) -> str:
    about = "  ".join(str(value) for value in row["key"].split(" | ") if value)
    ms = ", ".join(f"{way} {time:.3f} ms" for way, time in row.get("ms", {}).items())
    rates = [
        f"{way} {rate:.0f}"
        for kind in ("tflops", "tokens_per_second", "gb_per_second")
        for way, rate in row.get(kind, {}).items()
    ]
    score = "" if row.get("score") is None else f"  -> {row['score']:.3f}"
    why = "".join(f"  [{way}: {words}]" for way, words in row.get("notes", {}).items())
    return f"{about}: {ms}" + (f" ({', '.join(rates)})" if rates else "") + score + why


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target with the worst of its rows."""
    found = []
    for name, limit in TARGETS.items():
        own = [row for row in rows if row.get("target") == name]
        scored = [row for row in own if row.get("score") is not None]
        worst = (max if name in AT_MOST else min)(scored, key=lambda row: row["score"], default=None)
        kept = None
        if worst is not None:
            kept = worst["score"] <= limit if name in AT_MOST else worst["score"] >= limit
        why = next((words for row in own for words in row.get("notes", {}).values()), "no row")
        found.append({
            "target": name, "limit": limit, "at_most": name in AT_MOST, "measured": worst and worst["score"], "kept": kept,
            "rows": len(own), "unmeasured": len(own) - len(scored), "worst": worst["key"] if worst else why,
        })  # fmt: skip
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = []
    for each in found:
        sign = "<=" if each["target"] in AT_MOST else ">="
        word = {True: "kept", False: "MISSED", None: "not measured"}[each["kept"]]
        measured = "-" if each["measured"] is None else f"{each['measured']:.3f}"
        lines.append(f"{each['target']:42} {sign} {each['limit']:.2f}  {measured:>8}  {word:12} "
                     f"{each['rows'] - each['unmeasured']}/{each['rows']} rows; {each['worst']}")  # fmt: skip
    missed = [each["target"] for each in found if not each["kept"]]
    return "\n".join([*lines, f"missed or not measured: {'; '.join(missed) or 'nothing'}"])


# ---- the command -------------------------------------------------------------------------------------------------------
def without_gpu(results: Results, asked: argparse.Namespace) -> int:
    """What can be shown here: kernels interpreted, and compiled."""
    print("no CUDA device: the laws run interpreted, and the kernels are compiled for chips that are not here")
    start, kept = time.monotonic(), results.path.with_name("gpu-kernels.json")
    laws(INTERPRETED, results, 60 * asked.minutes - COMPILING, {"TRITON_INTERPRET": "1"})
    chosen = "--chips 90 --widths 64 --adds table --json".split()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_kernels.py"), *chosen, str(kept)],
        env={**environment, "TRITON_DEFAULT_FP_FUSION": "1"}, start_new_session=True,
    )  # fmt: skip
    note = ended(process, 60 * asked.minutes - (time.monotonic() - start))
    compiled = json.loads(kept.read_text()) if kept.exists() else []
    if process.returncode and not note:
        note = "one spills, does not fit, or does not compile"
    results.put({"part": "compile", "key": "compile", "kernels": compiled, "notes": {"compile": note} if note else {}})
    results.found["seconds"] = round(time.monotonic() - start)
    results.write()
    broken = [row["key"] for row in results.rows if row.get("failed") or row["notes"]]
    passed = sum(row.get("passed", 0) for row in results.rows)
    print(f"{passed} tests passed interpreted, {len(compiled)} kernels compiled, in {results.found['seconds']} s")
    print(
        f"{len(broken)} broken{': ' * bool(broken)}{'; '.join(broken)}; nothing was measured, and no target is judged"
    )
    return int(bool(broken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = (
        Path(os.environ["OUT"]) / "gpu.json"
        if os.environ.get("OUT")
        else ROOT / f"benchmarks/results/{date.today()}-gpu.json"
    )
    parser.add_argument("--out", type=Path, default=place, help="the JSON; logs are written next to it")
    parser.add_argument("--parts", nargs="+", choices=["laws", *PARTS], default=["laws", *PARTS])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the whole command")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--interpret", action="store_true", help="with --device cpu: every cell once, very small")
    parser.add_argument("--ahead", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only-part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.ahead:
        import gpu_cells

        gpu_cells.compile_one(gpu_cells.Machine(asked.device), asked.ahead[0], int(asked.ahead[1]))
        return 0
    if (asked.device == "cpu") != asked.interpret and not asked.only_part:
        parser.error("expected --device cpu and --interpret together, or neither")
    if asked.only_part:
        return measure(asked.only_part, asked.device, Results(asked.out), asked.seconds)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.unlink(missing_ok=True)
    results, start = Results(asked.out), time.monotonic()
    results.found |= {"machine": chip(), "protocol": PROTOCOL}
    results.write()
    print(", ".join(f"{name} {value}" for name, value in results.found["machine"].items()), flush=True)
    if find_spec("triton") is None:
        print("nothing was run: triton is not here")
        return 1
    if asked.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        return without_gpu(results, asked)

    def left(most: float) -> float:
        return min(most, 60 * asked.minutes - 10 - (time.monotonic() - start))

    if not asked.interpret and {"checks", "attention"} & {*asked.parts}:
        compile_ahead(asked, results, left(AHEAD))
    for part in asked.parts:
        begun = time.monotonic()
        if left(600) < 5:
            print(f"{part}: no time was left")
        elif part == "laws":
            suites, most = (INTERPRETED, 60 * asked.minutes) if asked.interpret else (ON_CUDA, LAWS)
            laws(suites, results, left(most), CUBLAS)
        else:
            results = run(part, asked, results, left(PARTS[part]))
        print(f"-- {part}: {time.monotonic() - begun:.0f} s", flush=True)
    results.found |= {"targets": verdicts(results.rows), "seconds": round(time.monotonic() - start)}
    results.write()
    broken = [
        row["key"] for row in results.rows if row.get("failed") or {"cell", "gpu", "pytest"} & row["notes"].keys()
    ]
    if asked.interpret:
        print("interpreted and very small: no number means anything, and no target is judged")
    else:
        print(table(results.found["targets"]))
    print(
        f"{len(results.rows)} rows in {results.found['seconds']} s, {len(broken)} broken{': ' * bool(broken)}{'; '.join(broken)}"
    )
    missed = not asked.interpret and any(each["kept"] is False for each in results.found["targets"])
    return int(bool(broken) or missed)


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

if __name__ == "__main__":
    sys.exit(main())
