"""The loops in C: compiled ahead, compiled on first use and kept, and done without where they cannot be had."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longitude as lg
from longitude import c_build, c_compile
from longitude.attention.backends.table import band

SOURCE = "int answer(void) { return ANSWER; }"
PACKAGE = c_build.PACKAGE
INSTEAD = "torch's operators run instead"


def build(source: Path, *options: str):
    """Found anew."""
    return c_compile.loop.__wrapped__(source, *options).library


def libraries(source: Path) -> list[Path]:
    """What the cache of a test keeps."""
    return sorted((source.parent / "cache").glob("longitude*/*.so"))


@pytest.fixture(name="source")
def c_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


needs_compiler = pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="no C compiler here")


# ---- by gcc, on first use --------------------------------------------------------------------------------------------
@needs_compiler
def test_compiled_once_for_each_text_and_option(source: Path, monkeypatch: pytest.MonkeyPatch):
    assert build(source, "-DANSWER=41").answer() == 41
    assert build(source, "-DANSWER=42").answer() == 42
    source.write_text("\n" + SOURCE)
    assert build(source, "-DANSWER=41").answer() == 41
    assert len(libraries(source)) == 3

    def refuse(command: list[str], **options):
        assert "--version" in command, "compiled again"
        return subprocess.CompletedProcess(command, 0, stdout=version)

    version = subprocess.run(["gcc", "--version"], check=True, capture_output=True).stdout
    monkeypatch.setattr(c_compile.subprocess, "run", refuse)
    assert build(source, "-DANSWER=41").answer() == 41


@needs_compiler
def test_what_does_not_compile_leaves_nothing(source: Path):
    source.write_text("int answer(void) { return")
    with pytest.warns(RuntimeWarning, match=rf"(?s)answer.c.* could not be compiled by .*gcc: .*expected.*{INSTEAD}"):
        assert build(source) is None
    assert libraries(source) == [] and not list((source.parent / "cache").rglob(f"{c_build.UNFINISHED}*"))


@pytest.mark.one_in(2)
@needs_compiler
@pytest.mark.parametrize("wall", [False, True])
def test_the_limit_is_on_the_processors_time_and_is_called_so(wall: bool, source: Path, monkeypatch):
    """A compiler that waits is left alone, one that computes for ever is stopped, with that as the reason."""
    gcc = source.parent / "gcc"
    work = f'sleep 2; exec {shutil.which("gcc")} "$@"' if wall else "while :; do :; done"
    gcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "gcc: a remark" >&2\n{work}\n')
    gcc.chmod(0o755)
    monkeypatch.setattr(c_compile.shutil, "which", lambda name: str(gcc))
    monkeypatch.setattr(c_build.compile_c, "__defaults__", (1,))
    if wall:
        assert build(source, "-DANSWER=7").answer() == 7
        return
    with pytest.warns(RuntimeWarning, match="1 s of the processor's time") as warned:
        assert build(source, "-DANSWER=7") is None
    assert "remark" not in str(warned[0].message)


@pytest.mark.slow
@needs_compiler
def test_processes_that_start_together_compile_once(source: Path):
    """As the workers of a study do; on a busy machine each would take the whole time."""
    log = source.parent / "log"
    gcc = source.parent / "gcc"
    gcc.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho here >> {log}\nsleep 1\nexec {shutil.which("gcc")} "$@"\n'
    )
    gcc.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from longitude import c_compile\n"
        "print(c_compile.library(Path(sys.argv[1]), '-DANSWER=5').answer())"
    )
    environment = {**os.environ, "PATH": f"{source.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(source)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=250)[0].strip() for process in running] == [b"5"] * 2
    assert log.read_text().split() == ["here"]


@needs_compiler
def test_a_cache_that_cannot_be_written_is_told(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    with pytest.warns(RuntimeWarning, match=rf"cannot be written to: .*Not a directory.*XDG_CACHE_HOME.*{INSTEAD}"):
        assert build(source, "-DANSWER=1") is None


@needs_compiler
def test_without_a_home_attention_works(source: Path, monkeypatch: pytest.MonkeyPatch):
    """A container's user may have neither HOME nor an entry in the list of users."""

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    assert build(source, "-DANSWER=1").answer() == 1  # XDG_CACHE_HOME is enough
    for cache in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        with pytest.warns(RuntimeWarning, match=rf"no home directory.*XDG_CACHE_HOME=FOLDER.*{INSTEAD}"):
            assert build(source, "-DANSWER=1") is None
    monkeypatch.setattr(c_compile, "loop", c_compile.loop.__wrapped__)
    monkeypatch.setattr(band, "functions", band.functions.__wrapped__)
    monkeypatch.setattr(band, "_known", {})
    q = torch.randn(3, 1, 2, 200, 8, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="no home directory"):
        out = lg.attend(*q, encoding=lg.ALiBi(2))
    torch.testing.assert_close(out, lg.attend(*q, encoding=lg.ALiBi(2), backend="reference"))


def no_entry(number: int) -> None:
    raise KeyError(number)


@needs_compiler
def test_a_relative_cache_is_ignored(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build(source, "-DANSWER=3").answer() == 3
    assert not Path("here").exists() and len(list((tmp_path / "home").rglob("*.so"))) == 1


@needs_compiler
def test_a_cache_without_execution_is_told_before_gcc_runs(source: Path, monkeypatch: pytest.MonkeyPatch):
    class Noexec:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(c_compile.os, "statvfs", lambda path: Noexec)
    monkeypatch.setattr(c_build, "compile_c", None)
    with pytest.warns(RuntimeWarning, match="noexec"):
        assert build(source, "-DANSWER=1") is None


@needs_compiler
def test_a_library_that_was_cut_off_in_the_cache_is_compiled_again(source: Path):
    assert build(source, "-DANSWER=41").answer() == 41
    (kept,) = libraries(source)
    whole = kept.read_bytes()
    kept.unlink()  # this process has it open
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        kept.write_bytes(whole[:size])
        assert build(source, "-DANSWER=41").answer() == 41
        assert kept.stat().st_size == len(whole)
        kept.unlink()


@pytest.mark.slow
@pytest.mark.one_in(13)
@needs_compiler
@pytest.mark.parametrize("source", sorted(PACKAGE.rglob("*.c")), ids=lambda path: path.name)
@pytest.mark.parametrize("options", [(), ("-DDOUBLE",), ("-mno-avx512f",), ("-mno-avx", "-DDOUBLE")], ids=" ".join)
def test_all_of_ours_compiles_for_wide_and_narrow_processors(
    source: Path, options: tuple[str, ...], tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build(source, *(options if platform.machine() == "x86_64" else ())) is not None


def test_done_without(source: Path, monkeypatch: pytest.MonkeyPatch):
    """No gcc, one that fails, another system, no wish for it."""
    with monkeypatch.context() as context:
        context.setattr(c_compile.shutil, "which", lambda name: None)
        assert build(source, "-DANSWER=1") is None
        context.setattr(c_compile.shutil, "which", lambda name: "/bin/false")
        with pytest.warns(RuntimeWarning, match=f"could not be compiled by /bin/false: .*{INSTEAD}"):
            assert build(source, "-DANSWER=1") is None
    with monkeypatch.context() as context:
        context.setattr(c_compile.sys, "platform", "darwin")
        assert build(source, "-DANSWER=1") is None
    monkeypatch.setenv("LONGITUDE_COMPILE", "0")
    assert build(source, "-DANSWER=1") is None


# ---- compiled ahead --------------------------------------------------------------------------------------------------
ROTATE, OPTIONS = "positions/rotate.c", c_build.LOOPS["positions/rotate.c"][0]


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An install with one loop compiled ahead, on a machine without gcc: where the loop is."""
    if platform.machine() not in c_build.LEVELS or sys.platform != "linux":
        pytest.skip("no wheel is made for this machine")
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(c_build, "AHEAD", tmp_path / "compiled")
    monkeypatch.setattr(c_compile.shutil, "which", lambda name: None)
    levels = c_build.LEVELS[platform.machine()]
    level = c_compile.level_of(platform.machine(), Path("/proc/cpuinfo").read_text())
    path = tmp_path / "compiled" / platform.machine() / level / c_build.name_of(ROTATE, OPTIONS)
    c_build.compile_c(gcc, PACKAGE / ROTATE, [*c_build.FLAGS, *levels[level][0], *OPTIONS, "-s"], path)
    return path


@pytest.fixture
def of_another_source(source: Path) -> bytes:
    """A library without the functions that are asked for."""
    to = source.with_suffix(".so")
    c_build.compile_c("gcc", source, [*c_build.FLAGS, "-DANSWER=1"], to)
    return to.read_bytes()


def found() -> c_compile.Loop:
    return c_compile.loop.__wrapped__(PACKAGE / ROTATE, *OPTIONS)


def test_a_loop_compiled_ahead_needs_no_compiler(ahead: Path, monkeypatch: pytest.MonkeyPatch):
    loop = found()
    assert loop.library is not None and loop.library._name == str(ahead)
    assert loop.origin == f"prebuilt for {ahead.parent.name}"
    monkeypatch.setenv("LONGITUDE_COMPILE", "native")
    assert found() == (None, "no gcc is on the PATH")


def test_a_broken_install_is_one_sentence(ahead: Path, of_another_source: bytes, monkeypatch: pytest.MonkeyPatch):
    """Cut off anywhere, not a library, of another processor, or missing: never loaded, since that could end the process."""
    whole = ahead.read_bytes()
    other_machine = bytearray(whole)
    other_machine[18:20] = (243).to_bytes(2, "little")  # RISC-V
    cases = [(whole[:size], "is cut off") for size in (0, 63, 64, len(whole) // 3, len(whole) - 1)]
    cases += [(b"no library" * 1000, "is cut off"), (bytes(other_machine), "rotate-FLOAT32.so"), (None, "No such file")]
    cases += [(of_another_source, "lacks the function rotate")]
    for content, words in cases:
        ahead.unlink(missing_ok=True)
        if content is not None:
            ahead.write_bytes(content)
        with pytest.warns(RuntimeWarning, match=f"{words}.*--force-reinstall.*{INSTEAD}") as warned:
            assert found().library is None
        assert len(warned) == 1 and "\n" not in str(warned[0].message)
    shutil.rmtree(ahead.parent.parent)
    (c_build.AHEAD / "s390x").mkdir()
    words = f"this install is for s390x, and the processor is {platform.machine()}: .*{INSTEAD}"
    with pytest.warns(RuntimeWarning, match=words):
        assert found().library is None


def test_gcc_mends_a_broken_install_and_says_so(ahead: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "cache"))
    monkeypatch.setattr(c_build, "AHEAD", ahead.parents[2])
    ahead.unlink()
    with pytest.warns(RuntimeWarning, match="No such file.*; compiled by gcc for this processor"):
        assert found().library is not None


def test_the_level_is_what_the_processor_has():
    """Flags as /proc/cpuinfo has them, of a Zen 4, a Haswell, a Nehalem, and of an Arm."""
    nehalem = "fpu pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
    haswell = f"{nehalem} fma movbe xsave avx f16c abm bmi1 avx2 bmi2"
    zen_4 = f"{haswell} avx512f avx512dq avx512cd avx512bw avx512vl"
    level = lambda flags: c_compile.level_of("x86_64", f"processor : 0\nflags\t\t: {flags}\nbugs\t: none\n")  # noqa: E731
    assert [level(flags) for flags in (zen_4, haswell, nehalem)] == ["x86-64-v4", "x86-64-v3", "x86-64"]
    assert level(zen_4.replace("avx512vl", "")) == "x86-64-v3" and level(haswell.replace("fma", "")) == "x86-64"
    assert level("") == "x86-64" and c_compile.level_of("aarch64", "Features\t: fp asimd\n") == "armv8-a"


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="gcc's names of levels are those of x86-64")
def test_a_level_asks_for_every_instruction_that_gcc_may_use():
    """What gcc defines for a level, by the names of /proc/cpuinfo."""
    names = {"sse4_1": "sse4_1", "sse4_2": "sse4_2", "lzcnt": "abm", "sse3": "pni", "bmi": "bmi1"}
    here = {
        "fxsr",
        "mmx",
        "mmx_with_sse",
        "sse",
        "sse2",
        "sse_math",
        "sse2_math",
        "code_model_small",
        "k8",
    }  # all have these
    for march, needed in c_build.LEVELS["x86_64"].values():
        command = ["gcc", march[0], "-dM", "-E", "-x", "c", "/dev/null"]
        macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        plain = subprocess.run(["gcc", "-march=x86-64", *command[2:]], check=True, capture_output=True, text=True)
        added = {m.strip("_").lower() for m in macros if m.startswith("__") and m not in plain.stdout.split()}
        asked = {names.get(m, m) for m in added - here}
        instructions = {m for m in asked if m in known_flags()}
        assert instructions <= set(needed.split()), instructions - set(needed.split())


def known_flags() -> set[str]:
    return set("pni ssse3 sse4_1 sse4_2 popcnt avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()) | {
        f"avx512{part}" for part in "f bw cd dq vl vbmi vnni bf16 ifma".split()
    }


def test_every_loop_is_compiled_ahead_with_the_options_it_is_asked_for():
    """A new file, or a new number, would have no loop in a wheel."""
    from longitude.positions import rotation

    assert set(c_build.LOOPS) == {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.c")}
    rotated = {("-ffp-contract=off", f"-D{kind}") for kind in rotation.KINDS.values()}
    for source, kinds in c_build.LOOPS.items():
        asked = (
            rotated if source == ROTATE else set(band.OPTIONS.values()) if "table" in source else {(), ("-DDOUBLE",)}
        )
        assert set(kinds) == asked, source
        assert len({c_build.name_of(source, options) for options in kinds}) == len(kinds)
        assert set(c_build.FUNCTIONS[source]) <= defined_in(PACKAGE / source)
        assert Path(source).name in c_compile.SLOWER


def defined_in(source: Path) -> set[str]:
    """Functions of a C file that other files can call."""
    return set(re.findall(r"^(?:void|num) (\w+)\(", source.read_text(), re.MULTILINE))


# ---- which route, in words -------------------------------------------------------------------------------------------
def test_the_route_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from longitude.catalogue import catalogue

    here = c_compile.route()
    assert here.startswith("C kernels: ")
    q = torch.randn(1, 1, 3, 4)
    lg.explain(q, q, q)
    assert here in capsys.readouterr().out
    assert catalogue()["machine"]["loops"] == here
    monkeypatch.setenv("LONGITUDE_COMPILE", "0")
    monkeypatch.setattr(c_compile, "loop", c_compile.loop.__wrapped__)
    words = c_compile.route()
    assert words.startswith("C kernels: none") and "LONGITUDE_COMPILE=0" in words
    assert all(c_compile.SLOWER[name] in words for name in ("band.c", "rotate.c"))


def test_another_word_for_the_loops_is_refused(monkeypatch):
    """Not taken for one of the two that there are."""
    monkeypatch.setenv("LONGITUDE_COMPILE", "off")
    with pytest.raises(ValueError, match=r"LONGITUDE_COMPILE: expected 0 .* or native .*, got 'off'"):
        c_compile.loop.__wrapped__(Path("rotate.c"))
