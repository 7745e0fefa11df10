"""The cache of compiled loops: who may have written what is loaded, and what is removed."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longitude import c_build, c_compile
from tests.test_c_compile import build, c_source, libraries, needs_compiler  # noqa: F401


@needs_compiler
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077, 0o000])
def test_a_library_can_be_read_as_umask_says_and_written_by_its_owner_alone(source: Path, umask: int):
    before = os.umask(umask)
    try:
        assert build(source, "-DANSWER=1").answer() == 1
    finally:
        os.umask(before)
    (kept,) = libraries(source)
    for path, wanted in ((kept, 0o777), (kept.parent, 0o755)):
        assert path.stat().st_mode & 0o777 == wanted & ~umask & ~0o022, path


@needs_compiler
@pytest.mark.parametrize("which", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
def test_what_others_can_write_to_is_never_loaded(which: str, mode: int, source: Path, monkeypatch):
    """A file is compiled again, a folder is named."""
    assert build(source, "-DANSWER=1").answer() == 1
    (kept,) = libraries(source)
    (kept if which == "file" else kept.parent).chmod(mode)
    loaded: list[Path] = []
    plain: Callable[[Path, Path], object] = c_compile._load

    def load(path: Path, source: Path) -> object:
        loaded.append(path)
        assert path.stat().st_mode & 0o022 == 0
        return plain(path, source)

    monkeypatch.setattr(c_compile, "_load", load)
    if which == "file":
        assert build(source, "-DANSWER=1").answer() == 1 and loaded
        return
    with pytest.warns(RuntimeWarning, match="chmod go-w"):
        assert build(source, "-DANSWER=1") is None
    kept.parent.chmod(mode | 0o1000)  # others may add files, and not replace ours
    assert build(source, "-DANSWER=1").answer() == 1


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_never_loaded(source: Path):
    """Neither a folder, beside which one of our own is made, nor a file in a folder for all."""
    for own in (False, True):
        assert build(source, "-DANSWER=1").answer() == 1
        (kept,) = libraries(source)
        kept.parent.chmod(0o1777)
        kept.unlink()  # this process has it open
        kept.write_bytes(b"not to be read")
        os.chown(kept, 1001, 1001)
        if not own:
            os.chown(kept.parent, 1001, 1001)
        assert build(source, "-DANSWER=1").answer() == 1
        found = {path.stat().st_uid: path for path in libraries(source)}
        assert found[0].parent.name == ("longitude" if own else "longitude-0") and own == (1001 not in found)
        shutil.rmtree(source.parent / "cache")


@needs_compiler
def test_what_nobody_loads_is_removed(source: Path):
    """When another is compiled; what is still loaded stays."""
    assert build(source, "-DANSWER=1").answer() == 1
    (used,) = libraries(source)
    long_ago = time.time() - 2 * c_compile.KEPT
    for name in ("old.so", f"{c_build.UNFINISHED}killed/part.so"):
        path = used.parent / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (long_ago, long_ago))
        os.utime(path.parent, (long_ago, long_ago))
    os.utime(used, (long_ago, long_ago))
    assert build(source, "-DANSWER=1").answer() == 1  # now it is new again
    assert build(source, "-DANSWER=2").answer() == 2
    assert used in libraries(source) and len(libraries(source)) == 2
    assert not list(used.parent.glob(f"{c_build.UNFINISHED}*"))
