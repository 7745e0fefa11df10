"""The C kernels are compiled once, by name of their sources, and loaded for the best instructions that a processor has."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longitude.attention.backends.table import band
from longitude.native import build, load
from longitude.positions import rotation

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="no C compiler here")
ROTATE = "positions/rotate.c"


def loaded(source: str = ROTATE) -> load.Kernels:
    """Loaded again, whatever was loaded before."""
    return load.kernels.__wrapped__(build.PACKAGE / source, *build.LIBRARIES[source][0])


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of libraries."""
    monkeypatch.setattr(build, "COMPILED", tmp_path)
    monkeypatch.setattr(build, "LIBRARIES", {ROTATE: build.LIBRARIES[ROTATE][:1]})
    monkeypatch.delenv("LONGITUDE_COMPILE", raising=False)
    return tmp_path


@pytest.mark.slow
@needs_compiler
def test_compiled_once_and_again_for_another_source(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, (best, *_) = platform.machine(), build.levels_of(platform.machine(), build.cpuinfo())
    assert loaded().library is None
    (library,) = build.compile_all(machine, [best], to=compiled)
    made = library.stat()
    assert loaded().library is not None and loaded().origin.endswith(best)
    build.compile_all(machine, [best], to=compiled)
    assert library.stat().st_mtime_ns == made.st_mtime_ns and library.stat().st_mode & 0o777 == 0o755
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANOTHER"))  # as another text
    build.name_of.cache_clear()
    assert loaded().library is None
    (newer,) = build.compile_all(machine, [best], to=compiled)
    assert [*library.parent.iterdir()] == [newer] and newer != library
    build.name_of.cache_clear()


def test_without_kernels_attention_runs_and_says_so(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is run: none is on the PATH, and a home cannot be written to."""
    monkeypatch.setenv("PATH", str(compiled))
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setattr(load, "kernels", load.kernels.__wrapped__)
    assert "not on the PATH" in build.compile_here() and not [*compiled.iterdir()]
    assert load.route().startswith("C kernels: none") and load.AGAIN in load.route()
    monkeypatch.setenv("LONGITUDE_COMPILE", "0")
    assert "LONGITUDE_COMPILE=0" in load.route() and "LONGITUDE_COMPILE=0" in build.compile_here()


def test_the_level_is_what_the_processor_has() -> None:
    """Flags as /proc/cpuinfo has them, of a Zen 4, a Haswell, a Nehalem, and of an Arm."""
    nehalem = "fpu pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
    haswell = f"{nehalem} fma movbe xsave avx f16c abm bmi1 avx2 bmi2"
    zen_4 = f"{haswell} avx512f avx512dq avx512cd avx512bw avx512vl"
    level = lambda flags: build.levels_of("x86_64", f"processor : 0\nflags\t\t: {flags}\nbugs\t: none\n")[0]  # noqa: E731
    assert [level(flags) for flags in (zen_4, haswell, nehalem)] == ["x86-64-v4", "x86-64-v3", "x86-64"]
    assert level(zen_4.replace("avx512vl", "")) == "x86-64-v3" and level(haswell.replace("fma", "")) == "x86-64"
    assert level("") == "x86-64" and build.levels_of("aarch64", "Features\t: fp asimd\n") == ["armv8-a"]
    assert build.levels_of("riscv64", "") == []


FLAGS = {*build.LEVELS["x86_64"]["x86-64-v4"][1].split(), "pni", "avx512vnni", "avx512bf16", "avx512ifma"}


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="gcc's names of levels are those of x86-64")
def test_a_level_asks_for_every_instruction_that_gcc_may_use() -> None:
    """What gcc defines for a level, by the names of /proc/cpuinfo."""
    names = {"lzcnt": "abm", "sse3": "pni", "bmi": "bmi1"}
    for (march, *_), needed in build.LEVELS["x86_64"].values():
        command = ["gcc", march, "-dM", "-E", "-x", "c", os.devnull]
        macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        defined = {name.lower() for name in re.findall(r"#define __(\w+?)__ 1\n", macros)}
        used = {names.get(name, name) for name in defined} & FLAGS
        assert used <= {*needed.split()}, used - {*needed.split()}


def test_every_source_is_compiled_with_the_options_it_is_loaded_with() -> None:
    assert {*build.LIBRARIES} == {path.relative_to(build.PACKAGE).as_posix() for path in build.PACKAGE.rglob("*.c")}
    rotated = {("-ffp-contract=off", f"-D{kind}") for kind in rotation.KINDS.values()}
    for source, kinds in build.LIBRARIES.items():
        of_band = {*band.OPTIONS.values()} if "table" in source else {(), ("-DDOUBLE",)}
        assert {*kinds} == (rotated if source == ROTATE else of_band), source
