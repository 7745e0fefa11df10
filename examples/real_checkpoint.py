"""A real checkpoint, whole: check, perplexity by position under every method, retrieval with its answers, some steps of training.

    python examples/real_checkpoint.py smollm2 notes/ --to 16384 --out real.json

Each step is one command of `longitude`, which is printed with the time that it took: type the same ones for your model. MODEL is
a folder or a name on the hub. The same call continues after a kill: steps whose results are in --runs are not run
again. With two cores, 135 million parameters and 16,384 tokens that is half an hour of a processor; `--to 4096` is shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any


def steps(model: str, text: str, to: int, options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """(name, arguments) of every command, in order."""
    extended, tuned = (str(options.runs / name) for name in ("extended", "tuned"))
    retrieval = ["--tasks", "passkey", "--depths", "0.5", "--trials", str(options.trials), "--no-trained"]
    lengths = ["--lengths", *map(str, options.lengths)]
    longer = ["--to", str(to), "--method", options.method]
    training = ["--steps", "20", "--positions", "skipped", "--window", str(options.window)]
    yield "check", ["check", model, "--quick"]
    yield (
        "methods",
        ["extend", model, "--to", str(to), "--method", "all", "--text", text, "--cost-minutes", str(options.minutes)],
    )
    yield "extend", ["extend", model, *longer, "--text", text, "--out", extended]
    yield "retrieval", ["measure", model, extended, *retrieval, *lengths, "--out", str(options.runs / "measure")]
    yield (
        "training",
        ["extend", model, *longer, "--fine-tune", options.train or text, *training, "--text", text, "--out", tuned],
    )


def run(name: str, arguments: list[str], runs: Path) -> dict[str, Any]:
    """The JSON of a command with its time, kept in a file; from there if it ran before."""
    path, command = runs / f"{name}.json", shlex.join(["longitude", *arguments])
    print(f"\n$ {command}", flush=True)
    if not path.exists():
        begun, spent = time.perf_counter(), processor_seconds()
        done = subprocess.run(
            [sys.executable, "-m", "longitude", *arguments, "--json"], stdout=subprocess.PIPE, text=True
        )
        if done.returncode not in (0, 1):  # 1: a test failed, which is a result
            raise SystemExit(done.returncode)
        times = {"seconds": time.perf_counter() - begun, "processor_seconds": processor_seconds() - spent}
        kept = {"command": command, "load": os.getloadavg()[0], **times, "result": json.loads(done.stdout)}
        path.write_text(json.dumps(kept, indent=1))
    found = json.loads(path.read_text())
    if found["command"] != command:
        raise SystemExit(f"{path} is of another command, {found['command']}; give another --runs")
    print("{seconds:.0f} s, of a processor {processor_seconds:.0f} s, load {load:.1f}".format(**found))
    return found


def processor_seconds() -> float:
    """Seconds that processors worked for commands that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show(name: str, found: Any) -> None:
    """A table of a command's result."""
    if name == "check":
        broken = [[law["law"], law["status"], law["reason"]] for law in found["laws"] if law["status"] == "failed"]
        table(["law", "status", "reason"], broken)
        print(f"{len(found['laws'])} laws, {found['failed']} failed")
    if name == "methods":
        rows = [[row["method"], *(f"{each['perplexity']:.4g}" for each in row["losses"])] for row in found["rows"]]
        head = [f"{each['position_from']}-{each['position_to'] - 1}" for each in found["best"]]
        table(["perplexity", *head], [row for row in rows if len(row) > 1])
        print(found["recommendation"])
    if name in ("extend", "training"):
        for each in found["cost"]:
            before, after = each["original"]["value"], each["extended"]["value"]
            print(f"bits per byte at {each['length']} tokens: {before:.3f}, extended {after:.3f}")
    if name == "training":
        tuned = found["tuned"]
        print(
            f"{len(tuned['losses'])} steps: {tuned['losses'][0]:.3f} to {tuned['losses'][-1]:.3f} nats per token",
            end=", ",
        )
        print(f"{tuned['tokens_per_second']:.0f} tokens per second")
    if name == "retrieval":
        head = ["model", "task", "length", "depth", "score"]
        table(
            head,
            [
                [str(row["label"]), row["task"], *(f"{row[key]:g}" for key in ("length", "depth", "value"))]
                for row in found
            ],
        )


def answers(path: Path) -> list[dict[str, Any]]:
    """Every question's answer."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    head = ["model", "length", "expected", "generated"]
    table(head, [[each["model"], str(each["length"]), *each["expected"], repr(each["generated"])] for each in found])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, the folder of a checkpoint, or a name on the hub")
    parser.add_argument("text", help="a file or a folder of text to measure on")
    parser.add_argument("--to", type=int, default=16384, help="the new length in tokens")
    parser.add_argument("--method", default="yarn", help="the method that is written, asked and trained")
    parser.add_argument("--train", help="text to train on; by default the same, which flatters the trained model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 12288], help="lengths of questions")
    parser.add_argument("--trials", type=int, default=2, help="questions per length")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window of training")
    parser.add_argument("--minutes", type=float, default=60, help="for the comparison of methods")
    parser.add_argument("--runs", type=Path, default=Path("runs/real"), help="what is kept between calls")
    parser.add_argument("--out", type=Path, help="a JSON file of all results")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {"made": str(date.today()), "cores": os.cpu_count(), "model": Path(options.model).name}
    for name, arguments in steps(options.model, options.text, options.to, options):
        kept[name] = run(name, arguments, options.runs)
        show(name, kept[name]["result"])
    kept["answers"] = answers(options.runs / "measure" / "answers.jsonl")
    if options.out:
        options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
