"""Compile the kernels in Triton for chips that are not here, and print what the assembler says of each.

    python benchmarks/gpu_kernels.py                        # head_dim 64 and 128, all that is added to scores
    python benchmarks/gpu_kernels.py --chips 80 --widths 64 --adds table --json kernels.json

No GPU is needed: Triton compiles for a target, and brings the assembler. A register that spills is one that is written to memory.
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
from triton.backends.nvidia import compiler as nvidia
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
WHOLE = {"q", "k", "v", "out", "grad", "of_q", "of_k", "of_v"}
INTEGERS, FLOATS = {"lo", "hi", "bounds"}, {"scale", "factor"}
FLOAT_ROWS = {"lse", "grad_lse", "delta", "q_level", "k_level", "table", "curves", "rates"}
FLOAT_ROWS |= {"of_level", "of_table", "of_rates", "of_curves"}


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
        "TABLE": table, "LEVELS": levels, "ENDS": ends, "FAR": False, "LEARNED": table,
    }  # fmt: skip
    names = function.arg_names
    signature = {name: "constexpr" if name in fixed else kind_of(name) for name in names}
    aligned = [
        name for name, kind in signature.items() if kind[0] == "*" or name.endswith(("_stride", "_head", "_batch"))
    ]
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in fixed.items() if name in names},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {name: value for name, value in blocks._asdict().items() if name not in "QK"}
    found = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    return {
        "kernel": kernel, "chip": f"sm_{chip}", "head_dim": width, "adds": adds, **blocks._asdict(),
        **resources(found, chip),
    }  # fmt: skip


def resources(found: Any, chip: int) -> dict[str, Any]:
    """Of a compiled kernel, by the assembler's own report."""
    said = assembled(found.asm["ptx"], chip)
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "shared": found.metadata.shared,
        "fits": found.metadata.shared <= SHARED[chip] * 1024,
        "barriers": found.asm["ptx"].count("bar.sync"),
        # Loads that are under way while others are used.
        "ahead": len(re.findall(r"cp\.async\.c[ag]\.", found.asm["ptx"])),
    }


def assembled(code: str, chip: int) -> str:
    """What the assembler reports of a kernel."""
    target = re.search(r"\.target (\w+)", code)[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(code)
        command = [
            nvidia.get_ptxas(chip).path,
            "-v",
            "--gpu-name",
            target,
            str(file),
            "-o",
            str(file.with_suffix(".cubin")),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def rows(chips: list[int], widths: list[int], adds: list[str]) -> Iterator[dict[str, Any]]:
    for chip, width in itertools.product(chips, widths):
        for (number, kernel), what in itertools.product(enumerate(launch.KERNELS), adds):
            several = what in ("both", "curves")
            blocks = launch.blocks_for(chip // 10, launch.wide(width), several)[number]
            yield compiled(kernel, chip, width, blocks, what)
        yield from (rotation(chip, width, half) for half in (True, False))


def rotation(chip: int, width: int, half: bool) -> dict[str, Any]:
    """The same of the kernel that rotates queries and keys; a quarter of each head stays."""
    fixed = {"T": rotate.TOKENS, "H": rotate.HEADS, "PAIRS": width // 2, "HALF": half}
    fixed |= {"Q_REST": width // 4, "K_REST": width // 4}
    types = dict.fromkeys(("q", "k", "q_out", "k_out"), "*bf16") | {"cos": "*fp32", "sin": "*fp32"}
    names = rotate.kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(rotate.kernel, signature, constants)
    built = triton.compile(source, target=GPUTarget("cuda", chip, 32), options={"num_warps": 4})
    about = {"kernel": "rotate", "chip": f"sm_{chip}", "head_dim": width, "adds": "half" if half else "between"}
    return {**about, "Q": fixed["T"], "K": fixed["H"], "num_warps": 4, **resources(built, chip)}


def line(row: dict[str, Any]) -> str:
    blocks = f"{row['Q']}x{row['K']}, {row['num_warps']} warps"
    fits = "" if row["fits"] else "  too much shared memory"
    return (
        f"{row['chip']:7} {row['kernel']:17} head_dim {row['head_dim']:3}  {row['adds']:7}  {blocks:15}  "
        f"{row['registers']:3} registers  {row['spilled']:3} bytes spilled  {row['shared'] / 1024:5.1f} KiB shared{fits}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--chips", type=int, nargs="+", choices=SHARED, default=list(SHARED), help="compute capabilities"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128], help="head_dims")
    parser.add_argument("--adds", nargs="+", choices=ADDS, default=list(ADDS), help="what is added to scores")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    chosen = parser.parse_args()
    found = []
    for row in rows(chosen.chips, chosen.widths, chosen.adds):
        found.append(row)
        print(line(row), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))
    bad = [row for row in found if row["spilled"] or not row["fits"]]
    print(
        f"{len(found)} kernels (triton {triton.__version__}, torch {torch.__version__}): {len(bad)} spill or do not fit"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
