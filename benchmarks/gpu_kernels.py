"""Compile the kernels in Triton for chips that are not here, and print a table of what the compiled code takes.

    python benchmarks/gpu_kernels.py                        # head_dim 64 and 128, all that is added to scores
    python benchmarks/gpu_kernels.py --chips 80 --widths 64 --adds table --json kernels.json

No GPU is needed: Triton compiles for a target, and brings the assembler. A register that spills is written to memory. The loop
is the innermost one with products of matrices: instructions, those of masked blocks included, and barriers. Cycles of a pass
through the loop, on paper: of the tensor cores, and to issue the instructions of all warps of a block. No device measured them.
A cell `205 → 119` has the number of the file BEFORE first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # nothing is installed where GPUs are

from longitude.attention.backends.triton import kernels, launch
from longitude.positions.gpu import rotate

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block may take on a chip of this compute capability (CUDA C++ Programming Guide, table of technical
specifications)."""
ADDS = {
    "nothing": (False, False, 0),
    "table": (True, False, 0),
    "levels": (False, True, 0),
    "both": (True, True, 0),
    "curves": (True, False, 32),
}
"""A table, levels, and ends of the pieces of FIRE's curves."""
PRODUCTS = {"forward": 2, "backward_queries": 3, "backward_keys": 4, "diagonals": 2}
FLOPS = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192}
"""Operations of a multiprocessor's tensor cores in a cycle, in bfloat16, dense."""
BEFORE = Path(__file__).parent / "results" / "2026-11-30-gpu-kernels-before.json"
ABOUT, COLUMNS = ("chip", "kernel", "head_dim", "adds"), ("registers", "spilled", "shared", "loop", "loop_barriers")
WHOLE = {"q", "k", "v", "out", "grad", "of_q", "of_k", "of_v"}
INTEGERS, FLOATS = {"lo", "hi", "bounds", "reach"}, {"scale", "factor"}
FLOAT_ROWS = "lse grad_lse delta q_level k_level table curves rates of_level of_table of_rates of_curves".split()


def kind_of(name: str) -> str:
    """The type of a kernel's argument, as `launch` calls it."""
    if name in WHOLE:
        return "*bf16"
    if name in FLOAT_ROWS:
        return "*fp32"
    return "*i32" if name in INTEGERS else "fp32" if name in FLOATS else "i32"


def compiled(kernel: str, chip: int, width: int, blocks: launch.Blocks, adds: str) -> dict[str, Any]:
    """What came out of it: a row of the table."""
    function = getattr(kernels, kernel)
    (table, levels, ends), wide = ADDS[adds], launch.wide(width)
    fixed = {
        "D": width, "DV": width, "WIDE_D": wide, "WIDE_DV": wide, "Q": blocks.Q, "K": blocks.K,
        "TABLE": table, "LEVELS": levels, "ENDS": ends, "FAR": False, "LEARNED": table, "STRIP": blocks.STRIP,
    }  # fmt: skip
    names = function.arg_names
    signature = {name: "constexpr" if name in fixed else kind_of(name) for name in names}
    steps = "_stride", "_head", "_batch"
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or name.endswith(steps)]
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in fixed.items() if name in names},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {name: value for name, value in blocks._asdict().items() if name.islower()}
    about = {"kernel": kernel, "chip": f"sm_{chip}", "head_dim": width, "adds": adds, **blocks._asdict()}
    return about | resources(source, chip, options)


def resources(source: ASTSource, chip: int, options: dict[str, Any]) -> dict[str, Any]:
    """Of a kernel, by the tools that read its compiled code."""
    found = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        tools = (triton.knobs.nvidia.cuobjdump, "-res-usage"), (triton.knobs.nvidia.nvdisasm, "-c")
        quiet = {"text": True, "stderr": subprocess.DEVNULL}
        usage, code = (subprocess.check_output([tool.path, option, file.name], **quiet) for tool, option in tools)
    loop = inner_loop(code)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": found.metadata.shared,
        "fits": found.metadata.shared <= SHARED[chip] * 1024,
        # Loads that are under way while others are used.
        "ahead": len(re.findall(r"cp\.async\.c[ag]\.", found.asm["ptx"])),
        "loop": len(loop),
        "loop_barriers": sum("BAR.SYNC" in instruction for instruction in loop),
    }


def inner_loop(code: str) -> list[str]:
    """The instructions of the shortest loop that multiplies matrices."""
    instructions = re.findall(r"^(\.L_\w+):|^\s+/\*\w{4,}\*/\s+(.*?) ;", code, re.MULTILINE)
    start = {label: at for at, (label, _) in enumerate(instructions) if label}
    jumps = ((at, re.search(r"\bBRA\b.*\((\.L_\w+)\)", text)) for at, (_, text) in enumerate(instructions))
    back = ((start[to[1]], at + 1) for at, to in jumps if to and start[to[1]] < at)
    loops = ([text for _, text in instructions[slice(*ends)] if text] for ends in back)
    return min((loop for loop in loops if any("MMA" in text for text in loop)), key=len, default=[])


def rows(chips: list[int], widths: list[int], adds: list[str]) -> Iterator[dict[str, Any]]:
    for chip, width in itertools.product(chips, widths):
        for (number, kernel), what in itertools.product(enumerate(launch.KERNELS), adds):
            several = what in ("both", "curves")
            blocks = launch.blocks_for(chip // 10, launch.wide(width), several)[number]
            if kernel != "diagonals" or ADDS[what][0]:
                yield compiled(kernel, chip, width, blocks, what)
        yield from (rotation(chip, width, half) for half in (True, False))


def rotation(chip: int, width: int, half: bool) -> dict[str, Any]:
    """The same of the kernel that rotates queries and keys; a quarter of each head stays."""
    fixed = {"T": rotate.TOKENS, "H": rotate.HEADS, "PAIRS": launch.wide(width) // 2, "HALF": half}
    fixed |= {"Q_REST": launch.wide(width) // 4, "K_REST": launch.wide(width) // 4}
    types = dict.fromkeys(("q", "k", "q_out", "k_out"), "*bf16") | {"cos": "*fp32", "sin": "*fp32"}
    names = rotate.kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    about = {"kernel": "rotate", "chip": f"sm_{chip}", "head_dim": width, "adds": "half" if half else "between"}
    about |= {"Q": fixed["T"], "K": fixed["H"], "num_warps": 4}
    return about | resources(ASTSource(rotate.kernel, signature, constants), chip, {"num_warps": 4})


def cells(row: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table, by column."""
    before = next((old for old in earlier if all(old[name] == row[name] for name in ABOUT)), {})
    numbers = {name: f"{before[name]} → {row[name]}" if name in before else row[name] for name in COLUMNS}
    operations = PRODUCTS.get(row["kernel"], 0) * 2 * row["Q"] * row["K"] * row["head_dim"]
    products = operations // FLOPS[row["chip"]] if row["chip"] in FLOPS else "-"
    about = {name: row[name] for name in ABOUT} | {"block": f"{row['Q']}x{row['K']}, {row['num_warps']} warps"}
    return {**about, **numbers, "products": products, "issue": row["loop"] * row["num_warps"] // 4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chips = {"type": int, "nargs": "+", "choices": SHARED, "default": list(SHARED)}
    parser.add_argument("--chips", **chips, help="compute capabilities")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128], help="head_dims")
    parser.add_argument("--adds", nargs="+", choices=ADDS, default=list(ADDS), help="what is added to scores")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--before", type=Path, default=BEFORE, help="rows of earlier kernels")
    chosen = parser.parse_args()
    found, earlier = [], json.loads(chosen.before.read_text())
    for row in rows(chosen.chips, chosen.widths, chosen.adds):
        shown = cells(row, earlier)
        for line in ([] if found else [shown, ["---"] * len(shown)]) + [shown.values()]:
            print(f"| {' | '.join(map(str, line))} |", flush=True)
        found.append(row)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))
    bad = [row for row in found if row["spilled"] or not row["fits"]]
    versions = f"triton {triton.__version__}, torch {torch.__version__}"
    print(f"{len(found)} kernels ({versions}): {len(bad)} spill or do not fit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
