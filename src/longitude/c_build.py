"""How the loops in C are compiled: on first use for this processor, and ahead for the wheels (hatch_build.py).

Needs nothing but Python: a build has no torch.
"""

import os
import platform
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile

PACKAGE = Path(__file__).parent
AHEAD = PACKAGE / "compiled"
"""In a wheel with loops: compiled/MACHINE/LEVEL/NAME.so."""
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
WIDE = "-mprefer-vector-width=512"
NATIVE = ("-march=native", *((WIDE,) if platform.machine() == "x86_64" else ()))

_SCANS, _ROTATED = ((), ("-DDOUBLE",)), ("FLOAT32", "BFLOAT16", "FLOAT16")
LOOPS = {
    "attention/backends/table/band.c": (*_SCANS, ("-DBFLOAT16",)),
    "attention/backends/table/decode.c": (*_SCANS, ("-DBFLOAT16",)),
    "positions/rotate.c": tuple(("-ffp-contract=off", f"-D{number}") for number in _ROTATED),
    "recurrent/ops/delta.c": _SCANS,
    "recurrent/ops/diagonal.c": _SCANS,
    "recurrent/ops/scan.c": _SCANS,
    "recurrent/ops/wkv.c": _SCANS,
}
"""Every file, and the options it is compiled with: what one library reads and writes."""

_V2 = "sse3 cx16 sse4_1 sse4_2 ssse3 popcnt lahf_lm"
_V3 = f"{_V2} avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
LEVELS = {
    "x86_64": {
        "x86-64-v4": (("-march=x86-64-v4", WIDE), _V4.replace("sse3 ", "pni ", 1)),
        "x86-64-v3": (("-march=x86-64-v3",), _V3.replace("sse3 ", "pni ", 1)),
        "x86-64": (("-march=x86-64",), ""),
    },
    "aarch64": {"armv8-a": (("-march=armv8-a",), "")},
}
"""Of each machine, the best first: the options, and the flags of /proc/cpuinfo that a processor must have."""


def name_of(source: str, options: Iterable[str]) -> str:
    """Of the library of a file and its options."""
    defined = [option.removeprefix("-D") for option in options if option.startswith("-D")]
    return "-".join([Path(source).stem, *defined]) + ".so"


def compile_c(gcc: str, source: Path, options: Iterable[str], to: Path, seconds: int = 60) -> None:
    """Whole or not at all, if other processes compile it too.

    Raises:
        OSError: The folder cannot be written, or gcc cannot be run.
        subprocess.SubprocessError: The compiler fails, with its words as `stderr`, or takes more than `seconds`.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=to.parent, suffix=".so", delete=False) as unfinished:
        made = Path(unfinished.name)
    try:
        command = [gcc, *options, f"-I{PACKAGE}", "-o", str(made), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=seconds)
        made.replace(to)
    finally:
        made.unlink(missing_ok=True)


def compile_ahead(machine: str, gcc: str, to: Path) -> list[Path]:
    """All loops for all levels of a machine, in `to`/MACHINE/LEVEL; returns the libraries."""
    common = [*FLAGS, "-s", "-include", str(PACKAGE / "old_glibc.h")]
    made = {
        to / machine / level / name_of(source, options): (PACKAGE / source, [*common, *march, *options])
        for level, (march, _) in LEVELS[machine].items()
        for source, kinds in LOOPS.items()
        for options in kinds
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda each: compile_c(gcc, *made[each], each, 1800), made))
    return list(made)
