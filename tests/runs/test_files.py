"""Files and folders that are whole or not there."""

import os
from contextlib import suppress

from longitude.runs.files import (
    atomic,
    held,
    new_folder,
    out_of_space,
    read_json,
    remove_unfinished,
    require_space,
    write_json,
)
from tests.support import refused


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a.json"
    with suppress(RuntimeError), atomic(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    write_json(path, {"é": 1})
    with refused("JSON"):
        write_json(path, float("nan"))
    with suppress(RuntimeError), atomic(path) as unfinished:
        assert read_json(path) == {"é": 1}  # there until the new one is whole
        raise RuntimeError
    assert read_json(path) == {"é": 1} and list(tmp_path.iterdir()) == [path]
    write_json(path, float("inf"), allow_nan=True)
    assert read_json(path) == float("inf")


def test_json_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path) is None
    for text, reason in (("{", "property"), ('{"a": 1, "a": 2}', "'a'")):
        path.write_text(text)
        with refused("a.json", reason, "remedy"):
            read_json(path, "remedy")
    path.write_text("[" * 100_000 + "]" * 100_000)
    with refused("a.json", "nested"):
        read_json(path)
    path.unlink()
    os.mkfifo(path)  # which would be waited for
    with refused("a.json"):
        read_json(path)


def test_a_folder_is_whole_or_not_there(tmp_path):
    out = tmp_path / "new" / "out"
    with suppress(KeyboardInterrupt), new_folder(out) as unfinished:
        (unfinished / "a").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (out.parent / ".out.unfinished").mkdir(parents=True)
    (out.parent / ".out.unfinished" / "killed").touch()
    with new_folder(out) as unfinished:
        (unfinished / "a").write_text("whole")
        with refused(str(out)), new_folder(out):
            pass
    assert [path.name for path in out.parent.iterdir()] == ["out"] and [path.name for path in out.iterdir()] == ["a"]
    with refused("--out", str(out)), new_folder(out):
        pass


def test_one_writer_per_directory(tmp_path):
    with held(tmp_path, tmp_path), refused("--out", str(tmp_path)), held(tmp_path, tmp_path):
        pass
    with held(tmp_path, tmp_path):
        (tmp_path / ".a.json.7.tmp").touch()
        (tmp_path / ".model.7.tmp").mkdir()
        remove_unfinished(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk(tmp_path):
    with refused("MB", str(tmp_path)):
        require_space(tmp_path / "not" / "there", 2**60, "the study")
    wrapped = RuntimeError("in words of its own")
    wrapped.__cause__ = OSError(28, "no space")
    assert out_of_space(wrapped, tmp_path) and not out_of_space(RuntimeError(), tmp_path)
