"""Measure from which length our loop in C is faster than torch's function for attention without a bias: routes.json.

    python benchmarks/routes.py [--processor avx2] [--threads 1 2]      # some minutes for each number of threads, quiet

A length counts where our loop takes at most 0.9 of torch's time, there and in all longer ones, with batches of 1 and 8.
--processor avx2: this processor, without its instructions of 512 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from datetime import date
from itertools import product
from pathlib import Path

import torch

import longitude as lg
from longitude import c_build
from longitude.attention.backends import routes
from longitude.bench.cases import AttentionShape, Inputs
from longitude.bench.clock import CLOCKS, interleaved
from longitude.bench.sweep import threads
from longitude.runs.progress import Progress
from longitude.runs.provenance import machine
from target import step

TABLE = Path(routes.__file__).with_name("routes.json")
LENGTHS = (32, 64, 128, 256, 512)
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = ("float32", "bfloat16")
MASKS = {"all pairs": lg.NoMask(), "causal": lg.Causal()}
ENOUGH = 0.9
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def ratio(shape: AttentionShape, mask: lg.Mask, backward: bool, clock: str) -> float:
    """Time of our loop over that of torch's function."""
    inputs, turns = Inputs.of(shape), 3 if shape.length >= 512 else 9
    three = [inputs.q, inputs.k, inputs.v]
    calls = {
        name: step(lambda name=name: lg.attend(*three, mask=mask, backend=name), three, backward, inputs.gradient)
        for name in ("sdpa", "table")
    }
    found = interleaved(calls, "sdpa", turns, CLOCKS[clock])["table"].ratio
    assert found is not None
    return found.median


def shortest(head_dim: int, dtype: str, mask: lg.Mask, backward: bool, clock: str) -> int | None:
    """The shortest length from which on it is enough; None: none."""
    found = None
    for length in reversed(LENGTHS):
        for batch in (1, 8):
            shape = AttentionShape(batch, routes.HEADS, routes.HEADS, head_dim, length, dtype)
            if ratio(shape, mask, backward, clock) > ENOUGH:
                return found
        found = length
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processor", choices=["avx2"], help="leave out what it can do beyond this")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    if options.processor and os.environ.get("ATEN_CPU_CAPABILITY") != options.processor:
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, **AVX2}).returncode)
    if options.processor:  # our own loops too
        os.environ["LONGITUDE_COMPILE"], c_build.NATIVE = "native", ("-march=x86-64-v3", c_build.WIDE)
    found: dict[str, dict[str, dict[str, int | None]]] = {}
    work = list(product(options.threads, ("forward", "training"), DTYPES, MASKS))
    with Progress(total=len(work)) as progress:
        for n, (count, name, dtype, mask) in enumerate(work):
            with threads(count):
                clock = "processor" if count == 1 else "wall"
                for dim in HEAD_DIMS:
                    progress.update(f"{name} {dtype}, {mask}, head_dim {dim}, {count} threads", n)
                    own = found.setdefault(f"{name} {dtype} {mask}", {}).setdefault(str(count), {})
                    own[str(dim)] = shortest(dim, dtype, MASKS[mask], name == "training", clock)
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    here = machine()
    by = f"{here['cpu']}, {here['cores']} cores, torch {torch.__version__}, {date.today()}"
    table[routes.processor()] = {"measured": by, "shortest": found}
    text = json.dumps(table, indent=1) + "\n"
    for _ in range(2):  # a row of lengths by head_dim, and by threads, on one line
        text = re.sub(
            r'\{\s+("\d+": [^\n]*(?:\n\s+"\d+": [^\n]*)*)\s+\}', lambda row: "{" + " ".join(row[1].split()) + "}", text
        )
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
