"""The loops in C: compiled ahead, compiled on first use and kept, and done without where they cannot be had."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longitude as lg
from longitude import c_build, c_compile

SOURCE = "int answer(void) { return ANSWER; }"
PACKAGE = c_build.PACKAGE
INSTEAD = "torch's operators run instead, and .* times as long"


def build(source: Path, *options: str):
    """Found anew."""
    return c_compile.loop.__wrapped__(source, *options).library


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    kept = sorted((source.parent / "cache" / "longitude").iterdir())
    assert len(kept) == 3 and all(path.suffix == ".so" for path in kept)

    def refuse(command: list[str], **options):
        assert "--version" in command, "compiled again"
        return subprocess.CompletedProcess(command, 0, stdout=version)

    version = subprocess.run(["gcc", "--version"], check=True, capture_output=True).stdout
    monkeypatch.setattr(c_compile.subprocess, "run", refuse)
    assert build(source, "-DANSWER=41").answer() == 41


@needs_compiler
def test_what_does_not_compile_leaves_nothing(source: Path):
    source.write_text("int answer(void) { return")
    with pytest.warns(RuntimeWarning, match=rf"(?s)answer.c could not be compiled by .*gcc: .*expected.*{INSTEAD}"):
        assert build(source) is None
    assert list((source.parent / "cache" / "longitude").iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_written_is_told(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    words = rf"cannot keep what gcc compiles: .*Not a directory.*XDG_CACHE_HOME=FOLDER names another; {INSTEAD}"
    with pytest.warns(RuntimeWarning, match=words):
        assert build(source, "-DANSWER=1") is None


@needs_compiler
def test_a_library_that_was_cut_off_in_the_cache_is_compiled_again(source: Path):
    assert build(source, "-DANSWER=41").answer() == 41
    (kept,) = (source.parent / "cache" / "longitude").iterdir()
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


def found() -> c_compile.Loop:
    return c_compile.loop.__wrapped__(PACKAGE / ROTATE, *OPTIONS)


def test_a_loop_compiled_ahead_needs_no_compiler(ahead: Path, monkeypatch: pytest.MonkeyPatch):
    loop = found()
    assert loop.library is not None and loop.library._name == str(ahead)
    assert loop.origin == f"compiled ahead for {ahead.parent.name}"
    monkeypatch.setenv("LONGITUDE_COMPILE", "native")
    assert found() == (None, "no gcc is on the PATH")


def test_a_broken_install_is_one_sentence(ahead: Path, monkeypatch: pytest.MonkeyPatch):
    """Cut off anywhere, not a library, of another processor, or missing: never loaded, since that could end the process."""
    whole = ahead.read_bytes()
    other_machine = bytearray(whole)
    other_machine[18:20] = (243).to_bytes(2, "little")  # RISC-V
    cases = [(whole[:size], "is cut off") for size in (0, 63, 64, len(whole) // 3, len(whole) - 1)]
    cases += [(b"no library" * 1000, "is cut off"), (bytes(other_machine), "rotate-FLOAT32.so"), (None, "No such file")]
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
    from longitude.attention.backends.table import band
    from longitude.positions import rotation

    assert set(c_build.LOOPS) == {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.c")}
    rotated = {("-ffp-contract=off", f"-D{kind}") for kind in rotation.KINDS.values()}
    for source, kinds in c_build.LOOPS.items():
        asked = (
            rotated if source == ROTATE else set(band.OPTIONS.values()) if "table" in source else {(), ("-DDOUBLE",)}
        )
        assert set(kinds) == asked, source
        assert len({c_build.name_of(source, options) for options in kinds}) == len(kinds)


# ---- which route, in words -------------------------------------------------------------------------------------------
def test_the_route_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from longitude.catalogue import catalogue

    here = c_compile.route()
    assert here.startswith("loops in C: ")
    q = torch.randn(1, 1, 3, 4)
    lg.explain(q, q, q)
    assert here in capsys.readouterr().out
    assert catalogue()["machine"]["loops"] == here
    monkeypatch.setenv("LONGITUDE_COMPILE", "0")
    monkeypatch.setattr(c_compile, "loop", c_compile.loop.__wrapped__)
    words = f"loops in C: none, LONGITUDE_COMPILE=0 is in the environment: {c_compile.SLOWER}"
    assert c_compile.route() == words


def test_another_word_for_the_loops_is_refused(monkeypatch):
    """Not taken for one of the two that there are."""
    monkeypatch.setenv("LONGITUDE_COMPILE", "off")
    with pytest.raises(ValueError, match=r"LONGITUDE_COMPILE: expected 0 .* or native .*, got 'off'"):
        c_compile.loop.__wrapped__(Path("rotate.c"))
