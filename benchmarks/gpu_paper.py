"""What the kernels in Triton should take on an H100 or H200, on paper: operations and bytes against the limits of the chip.

    python benchmarks/gpu_paper.py [--json benchmarks/results/DATE-gpu-expected.json]

For each kernel seven units work: tensor cores, shared memory that feeds them, exponentials, other arithmetic, reads of the bias,
the second cache, memory. If all overlap, a kernel takes as long as the slowest; if none does, as long as their sum. Real ones lie
between, and waste more.
Ratios to flash attention, of which the same is assumed, are between those of the two assumptions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # nothing is installed where GPUs are

from longitude.attention.backends.triton import launch

SMS, CLOCK = 132, 1.7e9
TENSOR = 990e12
"""FLOP/s of dense products in bfloat16."""
PER_CLOCK = {"exponentials": 16, "arithmetic": 128, "bias": 32, "shared": 128}
"""Of each multiprocessor: 2^x, operations in float32 (a multiplication with an addition is one), numbers read through L1, and
bytes of shared memory."""
ROWS = 64
"""Of a product that four warps compute together: they read its right side once, and its left side where no register holds it."""
MEMORY = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes/s."""
L2 = 5.5e12
"""Bytes/s through the second cache."""
TOKENS, WIDTH = 16384, 2048
"""Of all sequences of a shape, and of all heads of a token."""
FLASH = launch.Blocks(128, 64, 8, 2)


@dataclass(frozen=True)
class Shape:
    """Causal attention over sequences of a length; within a window, or packed documents of a size."""

    length: int
    head_dim: int
    window: int | None = None
    document: int | None = None
    tokens: int = TOKENS
    width: int = WIDTH

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def all_heads(self) -> int:
        return self.batch * self.heads

    def ends(self) -> tuple[list[int], list[int]]:
        """Of each query: its first key, and the first after its keys."""
        lo = [max(i + 1 - self.window if self.window else 0, i - i % self.document if self.document else 0, 0)
              for i in range(self.length)]  # fmt: skip
        return lo, [i + 1 for i in range(self.length)]

    @property
    def pairs(self) -> int:
        """Of one head."""
        lo, hi = self.ends()
        return sum(hi) - sum(lo)

    @property
    def share(self) -> float:
        """Of the pairs of plain causality."""
        return self.pairs / (self.length * (self.length + 1) // 2)


@lru_cache
def visited(shape: Shape, Q: int, K: int, by_keys: bool) -> int:
    """Pairs of the blocks that a kernel computes for one head: by blocks of queries, or of keys."""
    (lo, hi), n, found = shape.ends(), shape.length, 0
    if by_keys:
        for start in range(0, n, K):
            first, last = bisect_right(hi, start) // Q * Q, bisect_left(lo, min(start + K, n))
            found += -(-(last - first) // Q)
    else:
        for first in range(0, n, Q):
            start, stop = lo[first] // K * K, hi[min(first + Q, n) - 1]
            found += -(-(stop - start) // K)
    return found * Q * K


@lru_cache
def ends_in_blocks(shape: Shape, Q: int, K: int) -> float:
    """Ends of FIRE's pieces that a block of causal attention has within it, on average."""

    def psi(x: int) -> float:
        return math.log1p(FIRE_C * x)

    found = []
    for first in range(0, shape.length, Q):
        oldest, newest = (psi(max(i, FIRE_THRESHOLD)) for i in (first, min(first + Q, shape.length) - 1))
        for start in range(0, first + Q, K):
            far, near = first + Q - 1 - start, max(0, first - start - K + 1)
            found.append(FIRE_ENDS * min(1.0, psi(far) / oldest - psi(near) / newest))
    return sum(found) / len(found)


@dataclass(frozen=True)
class Kernel:
    """Per pair that it visits: products of blocks of head_dim, operations in float32; and what it moves, in tensors of tokens.

    shared: the products of vectors, of which both sides are in shared memory; weights, the left side of others, are in registers.
    streamed: bytes of the vectors of queries or keys that each block reads and writes, for each number of head_dim.
    """

    name: str
    products: int
    shared: int
    arithmetic: int
    tensors: int
    streamed: int = 4


FORWARD, QUERIES, KEYS = (
    Kernel("forward", 2, 1, 4, 4),
    Kernel("backward_queries", 3, 2, 4, 6),
    Kernel("backward_keys", 4, 2, 4, 6),
)
FLASH_FORWARD, FLASH_BACKWARD = Kernel("flash forward", 2, 1, 4, 4), Kernel("flash backward", 5, 2, 4, 8, 8)
ONE = Kernel("one backward kernel", 5, 2, 4, 8, 12)
LEARNED = 4
"""Operations per pair that sum a block's gradients along its diagonals: two choices, two additions."""
CURVES, ENDS, ENDS_BACKWARD, UNBENT = 3, 2, 9, 5
"""Operations per pair with FIRE's curves: each has 3, and 2 for each end of a piece within its block, where gradients take 9;
gradients of curves and rates take 5 everywhere."""
FIRE_ENDS, FIRE_C, FIRE_THRESHOLD = 8, 0.1, 512
"""As it is initialised: of 32 units one in four ends where the curve is read, here evenly spaced."""


def seconds(kernel: Kernel, shape: Shape, adds: str, chip: str, blocks: launch.Blocks = FLASH) -> dict[str, float]:
    """Of each unit. adds: "nothing", "fixed" and "learned" tables, "levels", "curves"."""
    pairs = visited(shape, blocks.Q, blocks.K, kernel in (KEYS, ONE)) * shape.all_heads
    table, clocks = adds in ("fixed", "learned", "curves"), SMS * CLOCK
    arithmetic = kernel.arithmetic + {"nothing": 0, "levels": 2}.get(adds, 1)
    moved = 2 * kernel.tensors * shape.tokens * shape.width + 8 * shape.tokens * shape.heads
    if adds == "curves":
        ends = ends_in_blocks(shape, blocks.Q, blocks.K)
        arithmetic += CURVES - 1 + ENDS * ends
        if kernel is QUERIES:
            arithmetic += UNBENT + ENDS_BACKWARD * ends
            table = 2
    if adds in ("learned", "curves") and kernel in (QUERIES, ONE):
        arithmetic += LEARNED
        moved += 3 * workspace(shape)
    outer, inner = (blocks.K, blocks.Q) if kernel in (KEYS, ONE) else (blocks.Q, blocks.K)
    fed = 2 * shape.head_dim * (kernel.products / min(outer, ROWS) + kernel.shared / inner)
    return {
        "tensor": pairs * kernel.products * 2 * shape.head_dim / TENSOR,
        "shared": pairs * fed / (PER_CLOCK["shared"] * clocks),
        "exponentials": pairs / (PER_CLOCK["exponentials"] * clocks),
        "arithmetic": pairs * arithmetic / (PER_CLOCK["arithmetic"] * clocks),
        "bias": pairs * table / (PER_CLOCK["bias"] * clocks),
        "L2": pairs * kernel.streamed * shape.head_dim / outer / L2,
        "memory": moved / MEMORY[chip],
    }


def one_kernel(shape: Shape, adds: str, chip: str = "H200", K: int = 128) -> dict[str, Any]:
    """Of a backward pass that was not built: one kernel, whose results are the same each time, too.

    Each of the programs of a head has blocks of keys of its own, holds the gradients of a block of keys and values in registers,
    and adds those of queries, in float32, to rows of its own in memory: five products, not seven, and each block of queries read
    and written. seconds: of each unit; workspace: bytes of the rows; ratio: to flash, forward and backward together.
    """
    programs = max(1, SMS // shape.all_heads)
    blocks = launch.Blocks(64, K, 8, 2)
    units = seconds(ONE, shape, adds, chip, blocks)
    rounds = -(-programs * shape.all_heads // SMS)
    idle = rounds * SMS / (programs * shape.all_heads)  # multiprocessors that wait for the last programs
    rows = 4 * shape.tokens * shape.width * programs
    units["memory"] += (rows * (2 if programs > 1 else 1) + 2 * shape.tokens * shape.width) / MEMORY[chip]
    first = seconds(FORWARD, shape, adds, chip, launch.blocks_for(9, shape.head_dim)[0])
    flash = [seconds(kernel, shape, "nothing", chip) for kernel in (FLASH_FORWARD, FLASH_BACKWARD)]
    ratios = [sum(join(each.values()) for each in flash) / (join(first.values()) + idle * join(units.values()))
              for join in (sum, max)]  # fmt: skip
    return {"programs": programs, "workspace": rows, "ratio": sorted(ratios), "seconds": units}


def workspace(shape: Shape) -> int:
    """Bytes of the rows in which programs sum gradients of the table."""
    return 4 * shape.heads * -(-launch.PROGRAMS * SMS // shape.heads) * 2 * shape.length


def extra(shape: Shape, learned: bool) -> int:
    """Bytes beyond inputs, output and their gradients in training: three numbers per query, tables, the workspace."""
    return 12 * shape.all_heads * shape.length + 4 * shape.heads * 2 * shape.length * 3 + workspace(shape) * learned


def expected(shape: Shape, adds: str, backward: bool, chip: str = "H200") -> dict[str, Any]:
    """Ms where all units overlap, and where none does; and the ratio to flash attention over the pairs of plain causality.

    Where the mask leaves pairs out, the ratio is the score: flash's time times the share of pairs that is left, over ours.
    """
    ours = [(kernel, blocks) for kernel, blocks in
            zip((FORWARD, QUERIES, KEYS), launch.blocks_for(9, shape.head_dim, adds == "curves"), strict=True)]  # fmt: skip
    flash = [FLASH_FORWARD, FLASH_BACKWARD]
    if not backward:
        ours, flash = ours[:1], flash[:1]
    mine = [seconds(kernel, shape, adds, chip, blocks) for kernel, blocks in ours]
    plain = Shape(shape.length, shape.head_dim, tokens=shape.tokens, width=shape.width)
    theirs = [seconds(kernel, plain, "nothing", chip) for kernel in flash]
    at_best, at_worst = (sum(join(units.values()) for units in mine) for join in (max, sum))
    ratios = [sum(join(units.values()) for units in theirs) * shape.share / time
              for join, time in ((max, at_best), (sum, at_worst))]  # fmt: skip
    slowest = {max(units, key=units.__getitem__) for units in mine}
    return {
        "ms": [1e3 * at_best, 1e3 * at_worst],
        "ratio": [min(ratios), max(ratios)],
        "bound": ", ".join(sorted(slowest)),
        "tflops": [flops(shape, backward) / time / 1e12 for time in (at_worst, at_best)],
    }


def flops(shape: Shape, backward: bool) -> float:
    """Of the pairs that the mask allows, as papers count: 4 head_dim forward, 2.5 times as many backward."""
    return 4 * shape.head_dim * shape.pairs * shape.all_heads * (3.5 if backward else 1)


def rotation_share(heads_per_read: int = 4) -> float:
    """Time of copying q and k over that of rotating them: cos and sin are read beside them, once for a few heads."""
    vector, angles = (
        2 * 2,
        4 / heads_per_read,
    )  # bytes for each number: read and written in bfloat16; cos and sin of half of them
    return vector / (vector + angles)


ADDS = {
    "none": "nothing",
    "alibi": "fixed",
    "t5": "learned",
    "kerple_log": "learned",
    "fox": "levels",
    "fire": "curves",
}
"""What an encoding adds to scores."""
MASKED = {"window 1024": {"window": 1024}, "documents of 2048": {"document": 2048}}


def rows() -> list[dict[str, Any]]:
    """The table of docs/gpu.md."""
    cases = [(name, {}) for name in ADDS] + [("alibi", mask) for mask in MASKED.values()]
    found = []
    for name, mask in cases:
        for length in (16384,) if mask else (2048, 8192):
            for head_dim in (64, 128):
                shape, adds = Shape(length, head_dim, **mask), ADDS[name]
                row = {"encoding": name, "mask": mask, "length": length, "head_dim": head_dim}
                for backward, passed in ((False, "forward"), (True, "forward + backward")):
                    found.append(row | {"passed": passed} | {
                        chip: rounded(expected(shape, adds, backward, chip)) for chip in MEMORY
                    })  # fmt: skip
    return found


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [float(f"{x:.3g}") for x in value] if isinstance(value, list) else value for name, value in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    chosen, found = parser.parse_args(), rows()
    for row in found:
        on = row["H200"]
        about = f"{row['encoding']:10} {' '.join(map(str, *row['mask'].items())) if row['mask'] else '':13} {row['length']:5}"
        times, ratios = (" to ".join(f"{x:5.2f}" for x in on[name]) for name in ("ms", "ratio"))
        print(f"{about}  head_dim {row['head_dim']:3}  {row['passed']:18} {times} ms  {ratios} of flash  {on['bound']}")
    for name in ("none", "alibi", "t5"):
        for length in (2048, 8192):
            for head_dim in (64, 128):
                shape = Shape(length, head_dim)
                one = one_kernel(shape, ADDS[name])
                ratios = " to ".join(f"{x:.2f}" for x in one["ratio"])
                print(f"{name:6} {length:5}  head_dim {head_dim:3}  both passes, one backward kernel, not built: {ratios}, "
                      f"{one['workspace'] / 2**20:.0f} MiB of rows, {one['programs']} programs per head")  # fmt: skip
    if chosen.json:
        chosen.json.write_text(json.dumps({"schema": 1, "rows": found}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
