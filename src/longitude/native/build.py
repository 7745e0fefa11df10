"""Compiles the C kernels: hatch_build.py runs it when the package is installed, `python src/longitude/native/build.py` by hand.

It needs only Python and gcc, because a build has no torch.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

NATIVE = Path(__file__).parent
PACKAGE = NATIVE.parent
COMPILED = NATIVE / "compiled"
"""Folder of the libraries: compiled/MACHINE/LEVEL/NAME-HASH.so."""
# psabi: gcc remarks on every vector that is passed by value, and ours never leave their file
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-fPIC", "-shared", "-s")

_SCANS, _ROTATED = ((), ("-DDOUBLE",)), ("FLOAT32", "BFLOAT16", "FLOAT16")
LIBRARIES = {
    "attention/backends/table/band.c": (*_SCANS, ("-DBFLOAT16",)),
    "attention/backends/table/decode.c": (*_SCANS, ("-DBFLOAT16",)),
    "positions/rotate.c": tuple(("-ffp-contract=off", f"-D{number}") for number in _ROTATED),
    "recurrent/ops/delta.c": _SCANS,
    "recurrent/ops/diagonal.c": _SCANS,
    "recurrent/ops/scan.c": _SCANS,
    "recurrent/ops/wkv.c": _SCANS,
}
"""Source files with the compiler options of each library, which set its dtypes."""

_V2 = "sse3 cx16 sse4_1 sse4_2 ssse3 popcnt lahf_lm"
_V3 = f"{_V2} avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
LEVELS = {
    "x86_64": {
        "x86-64-v4": (("-march=x86-64-v4", "-mprefer-vector-width=512"), _V4.replace("sse3 ", "pni ", 1)),
        "x86-64-v3": (("-march=x86-64-v3",), _V3.replace("sse3 ", "pni ", 1)),
        "x86-64": (("-march=x86-64",), ""),
    },
    "aarch64": {"armv8-a": (("-march=armv8-a",), "")},
}
"""Variants for each machine type, best first: compiler options, and the flags of /proc/cpuinfo that a processor must have."""


def levels_of(machine: str, cpuinfo: str) -> list[str]:
    """The levels of instructions that a processor has, best first."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = set(next((value for name, _, value in lines if name.strip() in ("flags", "Features")), "").split())
    return [level for level, (_, needed) in LEVELS.get(machine, {}).items() if flags.issuperset(needed.split())]


def cpuinfo() -> str:
    """Content of /proc/cpuinfo; "" if it cannot be read; a baseline processor is then assumed."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


@lru_cache
def name_of(source: str, options: tuple[str, ...]) -> str:
    """File name of the library of a source file: another one for each content of the sources and each set of options."""
    texts = [path.read_bytes() for path in (PACKAGE / source, *sorted(NATIVE.glob("*.h")))]
    digest = hashlib.sha256(b"\0".join([*texts, " ".join([*FLAGS, *options]).encode()])).hexdigest()
    defined = [option.removeprefix("-D") for option in options if option.startswith("-D")]
    return "-".join([Path(source).stem, *defined, digest[:12]]) + ".so"


def compile_c(gcc: str, source: Path, options: Iterable[str], to: Path) -> None:
    """Write a library whole or not at all, also if several processes compile it.

    Args:
        gcc: The compiler.
        source: A C file.
        options: Options of the compiler.
        to: The library.

    Raises:
        OSError: The folder cannot be written, or gcc cannot be run.
        subprocess.CalledProcessError: The compiler fails, with its messages as `stderr`.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    made = to.with_name(f".{os.getpid()}-{to.name}")
    command = [
        gcc,
        *options,
        "-include",
        str(NATIVE / "old_glibc.h"),
        f"-I{NATIVE}",
        "-o",
        str(made),
        str(source),
        "-lm",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.chmod(0o755)
        made.replace(to)
    finally:
        made.unlink(missing_ok=True)


def compile_all(machine: str, levels: Iterable[str], gcc: str = "gcc", to: Path = COMPILED) -> list[Path]:
    """Compile what is missing of the kernels for some levels of a machine, into `to`/MACHINE/LEVEL; remove older libraries."""
    made = {
        to / machine / level / name_of(source, options): (
            PACKAGE / source,
            [*FLAGS, *LEVELS[machine][level][0], *options],
        )
        for level in levels
        for source, kinds in LIBRARIES.items()
        for options in kinds
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        missing = [path for path in made if not path.exists()]
        list(pool.map(lambda path: compile_c(gcc, *made[path], path), missing))
    for old in {path for library in made for path in library.parent.glob("*.so")} - made.keys():
        old.unlink(missing_ok=True)
    return list(made)


def why_not(gcc: str) -> str | None:
    """Why nothing is compiled here; None if it is."""
    machine = platform.machine()
    if os.environ.get("LONGITUDE_COMPILE") == "0":
        return "no C kernels: LONGITUDE_COMPILE=0 is in the environment"
    if sys.platform != "linux" or machine not in LEVELS:
        return f"no C kernels: they are for Linux on {' and '.join(LEVELS)}, and this is {sys.platform} on {machine}"
    return None if shutil.which(gcc) else f"no C kernels: {gcc} is not on the PATH"


def compile_here() -> str:
    """Compile for this processor; returns what was done, or why nothing was."""
    machine, gcc = platform.machine(), os.environ.get("LONGITUDE_GCC", "gcc")
    if (why := why_not(gcc)) is not None:
        return why
    levels = levels_of(machine, cpuinfo())
    try:
        libraries = compile_all(machine, levels[:1], gcc)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no C kernels: {error}: {(getattr(error, 'stderr', None) or '').strip()[:500]}"
    return f"{len(libraries)} libraries of C kernels for {levels[0]}: {libraries[0].parent}"


if __name__ == "__main__":
    print(compile_here())
