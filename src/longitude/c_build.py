"""Compilation of the C kernels: on first use for this processor, and ahead of time for the wheels (hatch_build.py).

It needs only Python, because a build has no torch.
"""

import os
import platform
import signal
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = Path(__file__).parent
AHEAD = PACKAGE / "compiled"
"""Folder of prebuilt libraries in a wheel: compiled/MACHINE/LEVEL/NAME.so."""
# psabi: gcc remarks on every vector that is passed by value, and ours never leave their file
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-fPIC", "-shared")
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
"""Source files with the compiler options of each library, which set its dtypes."""
_BOTH = ("forward", "backward")
FUNCTIONS = dict.fromkeys(LOOPS, _BOTH) | {
    "attention/backends/table/band.c": (*_BOTH, "forward_space", "backward_space"),
    "attention/backends/table/decode.c": ("decode", "decode_space"),
    "positions/rotate.c": ("rotate",),
}
"""The functions that a library of each file must have."""
UNFINISHED = ".unfinished-"
"""Prefix of the folders in which libraries are compiled."""

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
"""Builds of each machine type, best first: compiler options, and the flags of /proc/cpuinfo that a processor must have."""


def name_of(source: str, options: Iterable[str]) -> str:
    """File name of the library of a source file and its options."""
    defined = [option.removeprefix("-D") for option in options if option.startswith("-D")]
    return "-".join([Path(source).stem, *defined]) + ".so"


class TooLong(Exception):
    """Raised if the compiler takes more CPU time than it may."""


_LIMITED = 'ulimit -c 0; ulimit -S -t "$0"; exec "$@"'
"""Shell script that limits the CPU time of a command and of the processes that it starts. A limit on wall-clock time would stop
correct compilers on a busy machine."""


def compile_c(gcc: str, source: Path, options: Iterable[str], to: Path, seconds: int = 120) -> None:
    """Write a library whole or not at all, if other processes compile it too. Only its owner may write to it.

    Args:
        gcc: The compiler.
        source: A C file.
        options: Options of the compiler.
        to: The library.
        seconds: Limit on CPU time.

    Raises:
        OSError: The folder cannot be written, or gcc cannot be run.
        subprocess.CalledProcessError: The compiler fails, with its words as `stderr`.
        TooLong: It takes more than `seconds`.
    """
    to.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with TemporaryDirectory(dir=to.parent, prefix=UNFINISHED) as folder:
        made = Path(folder, to.name)
        command = [gcc, *options, f"-I{PACKAGE}", "-o", str(made), str(source), "-lm"]
        # English messages, because the one about the limit is searched for
        done = subprocess.run(
            ["sh", "-c", _LIMITED, str(seconds), *command], capture_output=True, env={**os.environ, "LC_ALL": "C"}
        )
        if b"CPU time limit exceeded" in done.stderr or -done.returncode == getattr(signal, "SIGXCPU", None):
            raise TooLong(f"it took more than {seconds} s of the processor's time")
        done.check_returncode()
        made.chmod(made.stat().st_mode & ~0o022)  # as umask says, and never for others to write: it is code
        made.replace(to)


def compile_ahead(machine: str, gcc: str, to: Path) -> list[Path]:
    """Compile all loops for all levels of a machine, into `to`/MACHINE/LEVEL; returns the libraries."""
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
