"""The quick tests as other machines would run them, one setting after the other; exit code 1 if any fell.

    python tests/elsewhere.py [SETTING ...]      # make test-elsewhere ARGS="python order"; all of them where none is named

core      on one core, in one process
threads1  OMP_NUM_THREADS=1
threads3  OMP_NUM_THREADS=3, more threads than a small machine has cores
avx2      without the 512-bit instructions of a processor that has them, in torch and in its matrix products
busy      at low priority, together with a busy loop
python    without C kernels
order     the files shuffled; the seed is printed, and --shuffle SEED repeats it
again     twice in one fresh clone of what is committed
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKERS = ("-n", "2", "--dist", "worksteal")
SEED = str(random.randrange(10**6))


def pytest(setting: str, *options: str, before: tuple[str, ...] = (), at: Path = ROOT, **environment: str) -> bool:
    """One run of the quick tests: whether all passed. before: the command that runs it, such as nice."""
    command = [*before, sys.executable, "-m", "pytest", "-q", "-m", "not slow", *options]
    print(f"\n==== {setting}: {' '.join(command)}", flush=True)
    path = os.pathsep.join(filter(None, [str(at / "src"), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, cwd=at, env={**os.environ, "PYTHONPATH": path, **environment}).returncode == 0


def busy() -> bool:
    """On one core: a process at low priority would get nothing of two."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return pytest("nice 19, a busy loop", *WORKERS, before=("nice", "-n", "19"))
    finally:
        loop.kill()
        loop.wait()


def again() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run([sys.executable, str(clone / "src/longitude/native/build.py")], check=True)
        passed = [pytest(f"a clone, {nth} time", *WORKERS, at=clone) for nth in ("first", "second")]
        return all(passed)


# without the third torch still packs bfloat16 for AVX-512, and raises an error of its own
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SETTINGS: dict[str, Callable[[], bool]] = {
    "core": lambda: pytest("one core", "-n", "0", before=("taskset", "-c", "0")),
    "threads1": lambda: pytest("OMP_NUM_THREADS=1", *WORKERS, OMP_NUM_THREADS="1"),
    "threads3": lambda: pytest("OMP_NUM_THREADS=3", *WORKERS, OMP_NUM_THREADS="3"),
    "avx2": lambda: pytest("AVX2 only", *WORKERS, **AVX2),
    "busy": busy,
    "python": lambda: pytest("without C kernels", *WORKERS, LONGITUDE_COMPILE="0"),
    "order": lambda: pytest(f"files shuffled by {SEED}", *WORKERS, "--shuffle", SEED),
    "again": again,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", choices=[*SETTINGS, []], metavar="SETTING")
    fell = [name for name in parser.parse_args().settings or SETTINGS if not SETTINGS[name]()]
    print(f"\n==== fell: {', '.join(fell) or 'none'}")
    return int(bool(fell))


if __name__ == "__main__":
    sys.exit(main())
