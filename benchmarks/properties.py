"""Two properties of every encoding: whether it is relative, and what it costs.

    python benchmarks/properties.py [--out FILE.json] [--encodings rope alibi] [--threads 2]

relative    As declared, and verified by the battery (longitude.testing).
cost        Time of lg.attend forward and backward with the encoding, as `longitude bench` times it, over that of plain causal
            attention: B=1 H=8 D=64 L=2048, float32; all in one process, interleaved, medians. On a busy machine wall-clock
            ratios are noise: `--threads 1 --cpu-time` counts processor seconds instead.

Learned numbers are freshly drawn. Prints a table and writes its rows with their protocol, by default as
benchmarks/results/DATE-properties.json; docs/encodings.md has the printed table.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fill_numbers import RESULTS, paper_and_label
from longitude.bench.cases import AttentionShape, Inputs, built, ours, plain
from longitude.bench.measurement import CLOCKS, interleaved
from longitude.positions.base import list_encodings
from longitude.report.table import markdown
from longitude.runs.files import write_json
from longitude.runs.machine import commit_of_code, machine, versions

SHAPE = AttentionShape(batch=1, heads=8, kv_heads=8, head_dim=64, length=2048)


def measured(labels: list[str], repeats: int, clock: Callable[[], float]) -> tuple[list[dict[str, Any]], float]:
    """One row per encoding, and the seconds of plain attention."""
    inputs = Inputs.of(SHAPE)
    cases = {case.name: case for case in (plain(inputs), *(ours(label, "auto", inputs) for label in labels))}
    timings = interleaved({name: case.step(backward=True) for name, case in cases.items()}, "plain", repeats, clock)
    rows = [
        {"encoding": label, "relative": built(label, SHAPE).relative, "cost": timings[label]["ratio"]}
        for label in labels
    ]
    return rows, timings["plain"]["seconds"]


def cells(row: dict[str, Any]) -> list[str]:
    """A row as it is shown: relative, cost."""
    return [{True: "yes", False: "no", None: "-"}[row["relative"]], f"{row['cost']:.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-properties.json")
    parser.add_argument("--encodings", nargs="+", default=list_encodings(), help="by default all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor seconds instead of wall-clock seconds")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each encoding")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock, load = "processor" if options.cpu_time else "wall", os.getloadavg()[0]
    rows, seconds = measured(options.encodings, options.repeats, CLOCKS[clock])
    cost = (
        f"Cost: B=1 H={SHAPE.heads} D={SHAPE.head_dim} L={SHAPE.length} float32, forward and backward, over plain causal "
        f"attention ({seconds * 1e3:.0f} ms); torch {torch.__version__}, {options.threads} threads, {clock} time, load "
        f"{load:.1f}, medians of {options.repeats}; {date.today()}."
    )
    timing = {"threads": options.threads, "clock": clock, "load": load, "repeats": options.repeats}
    protocol = {
        "definitions": __doc__, "words": cost, "timing": timing | {"plain_seconds": seconds}, "shape": asdict(SHAPE),
        "machine": machine(), "versions": versions(), "commit": commit_of_code(),
    }  # fmt: skip
    write_json(options.out, {"protocol": protocol, "rows": rows})
    rows.sort(key=lambda row: row["cost"])
    lines = [[paper_and_label(row["encoding"]), *cells(row)] for row in rows]
    print(markdown(["encoding", "relative", "time / PyTorch"], lines), cost, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
