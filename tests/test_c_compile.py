"""C compiled on first use: kept, shared, and done without where it cannot be had."""

import platform
import subprocess
from pathlib import Path

import pytest

from longitude import c_build, c_compile

SOURCE = "int answer(void) { return ANSWER; }"
build = lambda source, *options: c_compile.loop.__wrapped__(source, *options).library  # noqa: E731


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


needs_compiler = pytest.mark.skipif(
    c_compile.library(Path(c_compile.__file__).parent / "positions" / "rotate.c") is None, reason="no C compiler here"
)


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
    with pytest.warns(RuntimeWarning, match=r"(?s)answer.c could not be compiled.*expected"):
        assert build(source) is None
    assert list((source.parent / "cache" / "longitude").iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_written_is_told(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    with pytest.warns(RuntimeWarning, match="Not a directory"):
        assert build(source, "-DANSWER=1") is None


@pytest.mark.slow
@pytest.mark.one_in(13)
@needs_compiler
@pytest.mark.parametrize("source", sorted(Path(c_compile.__file__).parent.rglob("*.c")), ids=lambda path: path.name)
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
        with pytest.warns(RuntimeWarning, match="slower operators"):
            assert build(source, "-DANSWER=1") is None
    with monkeypatch.context() as context:
        context.setattr(c_compile.sys, "platform", "darwin")
        assert build(source, "-DANSWER=1") is None
    monkeypatch.setenv("LONGITUDE_COMPILE", "0")
    assert build(source, "-DANSWER=1") is None
