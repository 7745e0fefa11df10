"""Files and folders that are whole or not there."""

import os
from contextlib import suppress

import pytest

from longitude.runs.files import (
    atomic,
    locked,
    new_folder,
    out_of_space,
    read_json,
    remove_unfinished,
    require_space,
    write_json,
)


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a.json"
    with suppress(RuntimeError), atomic(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    write_json(path, {"é": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
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
    for text, reason in (("{", "Expecting property name"), ('{"a": 1, "a": 2}', "'a' is in it twice")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"a\.json is not readable JSON \({reason}.*; start over"):
            read_json(path, "start over")
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="nested"):
        read_json(path)
    path.unlink()
    os.mkfifo(path)  # which would be waited for
    with pytest.raises(ValueError, match=r"a\.json"):
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
        with pytest.raises(ValueError, match="another process"), new_folder(out):
            pass
    assert [path.name for path in out.parent.iterdir()] == ["out"] and [path.name for path in out.iterdir()] == ["a"]
    with pytest.raises(ValueError, match="nothing is written over"), new_folder(out):
        pass


def test_one_writer_per_directory(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match=f"process {os.getpid()}; wait"), locked(tmp_path):
        pass
    with locked(tmp_path):
        (tmp_path / ".a.json.7.tmp").touch()
        (tmp_path / ".model.7.tmp").mkdir()
        remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_full_disk(tmp_path):
    with pytest.raises(ValueError, match=f"the study needs about .* MB of disk, {tmp_path} has"):
        require_space(tmp_path / "not" / "there", 2**60, "the study")
    wrapped = RuntimeError("in words of its own")
    wrapped.__cause__ = OSError(28, "no space")
    assert out_of_space(wrapped, tmp_path) and not out_of_space(RuntimeError(), tmp_path)
