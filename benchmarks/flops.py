"""How far our loop for attention is from the matrix product of this machine, in GFLOP/s of float32: printed as a table.

    python benchmarks/flops.py [--threads 1] [--cpu-time]

Of the loop the products count, 4 D for each pair that the mask allows, 14 D with gradients; exponentials do not. The product is
the fastest on squares of 512 to 2048 that torch has, in the same turns: torch.mm, or oneDNN's.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import longitude as lg
from longitude.bench.cases import AttentionShape, Inputs
from longitude.bench.clock import CLOCKS, interleaved
from longitude.bench.sweep import threads
from target import step

SQUARES = (512, 1024, 2048)
LENGTH, HEADS, TURNS = 2048, 8, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of torch; by default one per core")
    parser.add_argument("--cpu-time", action="store_true", help="processor seconds, with --threads 1")
    options = parser.parse_args()
    clock = CLOCKS["processor" if options.cpu_time else "wall"]
    calls, work = {}, {}
    for size in SQUARES:
        a, b = torch.randn(2, size, size)
        out = torch.empty(size, size)
        calls[f"product {size}"] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
        a, b = a.to_mkldnn(), b.to_mkldnn()  # by oneDNN: on AMD the other has no instructions of 512 bits
        calls[f"oneDNN's product {size}"] = torch.no_grad()(lambda a=a, b=b: F.linear(a, b))
        work[f"product {size}"] = work[f"oneDNN's product {size}"] = 2 * size**3
    for dim in (64, 128):
        inputs = Inputs.of(AttentionShape(1, HEADS, HEADS, dim, LENGTH))
        three = [inputs.q, inputs.k, inputs.v]
        for masked, pairs in (("all", LENGTH**2), ("causal", LENGTH * (LENGTH + 1) // 2)):
            mask = lg.Causal() if masked == "causal" else lg.NoMask()
            for passed, products in (("forward", 4), ("forward + backward", 14)):
                flops, backward = products * dim * pairs * HEADS, products == 14
                for who, run in (
                    ("ours", lambda three=three, mask=mask: lg.attend(*three, mask=mask, backend="table")),
                    (
                        "torch",
                        lambda three=three, c=masked == "causal": F.scaled_dot_product_attention(*three, is_causal=c),
                    ),
                ):
                    name = f"{who}, {passed}, {masked}, D {dim}"
                    calls[name], work[name] = step(run, three, backward, inputs.gradient), flops
    with threads(options.threads) as count:
        timings = interleaved(calls, next(iter(calls)), TURNS, clock)
    speeds = {name: work[name] / timing.seconds.median / 1e9 for name, timing in timings.items()}
    best = max(speed for name, speed in speeds.items() if "product" in name)
    print(f"GFLOP/s with {count} threads, torch {torch.__version__}")
    for name, speed in speeds.items():
        print(f"{name:45s} {speed:7.0f}   the product is {best / speed:4.2f} times as fast")


if __name__ == "__main__":
    main()
