"""The quick tests as other machines would run them, one setting after the other; a table at the end, exit code 1 if any fell.

    python tests/elsewhere.py [SETTING ...]      # make test-elsewhere ARGS="gcc order"; all of them where none is named

core      on one core, in one process
threads1  OMP_NUM_THREADS=1
threads3  OMP_NUM_THREADS=3, more threads than a small machine has cores
avx2      without the 512-bit instructions of a processor that has them, in torch and in its matrix products
busy      at low priority, together with a busy loop
gcc       where no C compiler is found
order     the files shuffled; the seed is printed, and --shuffle SEED repeats it
again     twice in one fresh clone of what is committed
"""

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
COMPILERS = {"gcc", "cc", "g++", "c++", "clang", "clang++"}
WORKERS = ("-n", "2", "--dist", "worksteal")
SEED = str(random.randrange(10**6))


class Outcome(NamedTuple):
    setting: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def pytest(setting: str, *options: str, before: tuple[str, ...] = (), at: Path = ROOT, **environment: str) -> Outcome:
    """One run of the quick tests. before: the command that runs it, such as nice; failed: errors too."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*before, sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--junitxml", str(report), *options]
        print(f"\n==== {setting}: {' '.join(command)}", flush=True)
        start = time.monotonic()
        path = os.pathsep.join(filter(None, [str(at / "src"), os.environ.get("PYTHONPATH")]))
        code = subprocess.run(command, cwd=at, env={**os.environ, "PYTHONPATH": path, **environment}).returncode
        seconds = time.monotonic() - start
        counts = ET.parse(report).find("testsuite").attrib if report.is_file() else {}
    tests, skipped = int(counts.get("tests", 0)), int(counts.get("skipped", 0))
    failed = int(counts.get("failures", 0)) + int(counts.get("errors", 0))
    return Outcome(setting, tests - failed - skipped, max(failed, int(code != 0)), skipped, seconds)


@contextlib.contextmanager
def busy_loop() -> Iterator[None]:
    """On one core: a process at low priority would get nothing of two."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


@contextlib.contextmanager
def programs_without_compilers() -> Iterator[str]:
    """A folder of links to all programs but compilers."""
    with tempfile.TemporaryDirectory() as folder:
        for place in filter(os.path.isdir, os.environ["PATH"].split(os.pathsep)):
            for program in os.scandir(place):
                link = Path(folder, program.name)
                if program.name not in COMPILERS and not link.is_symlink():
                    link.symlink_to(Path(place, program.name).absolute())
        assert shutil.which("gcc", path=folder) is None
        yield folder


def busy() -> Iterator[Outcome]:
    with busy_loop():
        yield pytest("nice 19, a busy loop", *WORKERS, before=("nice", "-n", "19"))


def gcc() -> Iterator[Outcome]:
    with programs_without_compilers() as path:
        yield pytest("without gcc", *WORKERS, PATH=path)


def again() -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for time_of in ("first", "second"):
            yield pytest(f"a clone, {time_of} time", *WORKERS, at=clone, XDG_CACHE_HOME=str(Path(folder) / "cache"))


PLAIN: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "core": ("one core", ("-n", "0"), {"before": ("taskset", "-c", "0")}),
    "threads1": ("OMP_NUM_THREADS=1", WORKERS, {"OMP_NUM_THREADS": "1"}),
    "threads3": ("OMP_NUM_THREADS=3", WORKERS, {"OMP_NUM_THREADS": "3"}),
    "avx2": ("AVX2 only", WORKERS, {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    "order": (f"files shuffled by {SEED}", (*WORKERS, "--shuffle", SEED), {}),
}
"""Settings of one run: its title, options of pytest, and what `pytest` takes by name."""
OTHERS = {"busy": busy, "gcc": gcc, "again": again}


def outcomes_of(name: str) -> Iterator[Outcome]:
    if name in OTHERS:
        yield from OTHERS[name]()
    else:
        title, options, named = PLAIN[name]
        yield pytest(title, *options, **named)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", choices=[*PLAIN, *OTHERS, []], metavar="SETTING")
    names = parser.parse_args().settings or [*PLAIN, *OTHERS]
    outcomes = [outcome for name in names for outcome in outcomes_of(name)]
    width = max(len(outcome.setting) for outcome in outcomes)
    print(f"\n{'setting':<{width}}  passed  failed  skipped  seconds")
    for setting, passed, failed, skipped, seconds in outcomes:
        print(f"{setting:<{width}}  {passed:>6}  {failed:>6}  {skipped:>7}  {seconds:>7.0f}")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
