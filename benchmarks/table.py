"""The price of a relative bias: `toeplitz_attention` beside plain causal scaled_dot_product_attention.

    python benchmarks/table.py [--quick] [--threads 2] [--cpu-time]

Prints ratios to plain causal attention (1.00 is free), from one process, interleaved, medians; float32. Beside them the usual
way, a dense [H, L, L] bias given to scaled_dot_product_attention, where it fits. Then the memory that forward and backward
add at length 8192, each in a process of its own (VmHWM; Linux). On a busy machine wall-clock ratios are noise: `--threads 1
--cpu-time` counts processor seconds instead.
"""

import argparse
import functools
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from longitude.attention.toeplitz import toeplitz_attention

SHAPES = [(16, 4, 256, 32), (1, 8, 1024, 64), (1, 8, 2048, 64), (1, 8, 4096, 64), (8, 8, 1024, 64)]  # B, H, L, D
DENSE_LIMIT = 2**26  # elements of a dense bias that we are willing to time
MEMORY_SHAPE = (1, 8, 8192, 64)
MEMORY_CASES = ["plain", "table", "learned table", "dense bias"]


def setup(batch, heads, length, dim):
    """Four ways to compute the same shape, by name: functions without arguments that return out [B, H, L, D]."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, dim, requires_grad=True) for _ in range(3))
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    distance = torch.arange(length - 1, -length, -1)  # of the table's entries
    table = -distance.abs() * slopes[:, None]
    learned = table.clone().requires_grad_()

    @functools.cache  # built once, outside what is timed
    def bias():
        i = torch.arange(length)
        return table[:, length - 1 - i[:, None] + i].masked_fill_(i > i[:, None], float("-inf"))[None]

    return {
        "plain": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "table": lambda: toeplitz_attention(q, k, v, table, low=0, scale=dim**-0.5),
        "learned table": lambda: toeplitz_attention(q, k, v, learned, low=0, scale=dim**-0.5),
        "dense bias": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias()),
    }


def medians(functions, runs, clock):
    """Seconds of each function, called in turn, so that a slow moment of the machine meets all of them."""
    seconds = {name: [] for name in functions}
    for f in functions.values():
        f()
    for _ in range(runs):
        for name, f in functions.items():
            start = clock()
            f()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def times(shapes, runs, clock):
    print(f"{'B  H  L     D':<15}{'pass':<18}{'plain':>9}{'table':>8}{'learned':>9}{'dense':>8}")
    for shape in shapes:
        batch, heads, length, dim = shape
        functions = setup(*shape)
        if heads * length * length > DENSE_LIMIT:
            del functions["dense bias"]
        grad = torch.randn(batch, heads, length, dim)
        passes = {
            "forward": {n: torch.no_grad()(f) for n, f in functions.items() if n != "learned table"},
            "forward+backward": {n: lambda f=f, grad=grad: f().backward(grad) for n, f in functions.items()},
        }
        for name, cases in passes.items():
            seconds = medians(cases, runs, clock)
            cells = [f"{seconds[c] / seconds['plain']:.2f}" if c in seconds else "-" for c in MEMORY_CASES[1:]]
            where = f"{batch:<3}{heads:<3}{length:<6}{dim}"
            print(
                f"{where:<15}{name:<18}{seconds['plain'] * 1e3:>6.1f} ms{cells[0]:>8}{cells[1]:>9}{cells[2]:>8}",
                flush=True,
            )


def memory():
    batch, heads, length, dim = MEMORY_SHAPE
    print(
        f"\nMiB added by forward and backward, B={batch} H={heads} L={length} D={dim} (one [B, H, L, D] tensor: 16 MiB)"
    )
    for case in MEMORY_CASES:
        result = subprocess.run(
            [sys.executable, __file__, "--memory", case], check=True, capture_output=True, text=True
        )
        print(f"  {case:<15}{result.stdout.strip():>6}", flush=True)


def memory_of(case):
    """MiB by which the peak of this process grows in one forward and backward pass."""
    batch, heads, length, dim = MEMORY_SHAPE
    setup(batch, heads, 300, dim)[case]().sum().backward()  # the libraries' own buffers
    attend, grad = setup(*MEMORY_SHAPE)[case], torch.randn(batch, heads, length, dim)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now: imports peak higher
    before = peak()
    attend().backward(grad)
    return peak() - before


def peak():
    """The most memory this process has held, MiB."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the lengths 256 and 1024 only, no memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor seconds instead of wall-clock seconds")
    parser.add_argument("--memory", choices=MEMORY_CASES, help="print the memory of one case and stop")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        print(round(memory_of(options.memory)))
        return
    clock = time.process_time if options.cpu_time else time.perf_counter
    unit = "processor" if options.cpu_time else "wall-clock"
    print(f"torch {torch.__version__}, {options.threads} threads, {unit} time, load {os.getloadavg()[0]:.1f}")
    shapes = [s for s in SHAPES if s[2] <= 1024] if options.quick else SHAPES
    times(shapes, 5 if options.quick else 7, clock)
    if not options.quick:
        memory()


if __name__ == "__main__":
    main()
