"""Files and folders that are whole or not there."""

import json
import os
from contextlib import suppress

import pytest

from longitude.runs import files
from longitude.runs.files import atomic, new_folder, read_json, read_json_lines, write_json
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
    assert read_json(path, kind=float) == float("inf")


def test_json_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path) is None
    damages = {b"{": "property", b'{"a": 1, "a": 2}': "'a'", b"[" * 100_000 + b"]" * 100_000: "nested"}
    for content, reason in (damages | {b'{"a": "\xff\xfe"}': "UTF-8", b"[1]": "array"}).items():
        path.write_bytes(content)
        with refused("a.json", reason, "remedy"):
            read_json(path, "remedy")
    assert read_json(path, kind=list) == [1]


def a_link(path):
    (path.parent / "elsewhere").touch()
    path.symlink_to("elsewhere")


READ = {"bytes": files.read_bytes, "text": files.read_text, "json": read_json, "lines": read_json_lines}
STRANGE = {"link": a_link, "pipe": os.mkfifo, "loop": lambda path: path.symlink_to(path), "folder": os.mkdir}


@pytest.mark.parametrize("kind", STRANGE)
def test_only_regular_files_are_opened(tmp_path, kind):
    """A pipe would be waited for, and a link leads elsewhere."""
    path = tmp_path / "a"
    STRANGE[kind](path)
    calls = [*READ.values(), lambda path: files.append_json(path, {})]
    if kind != "folder":
        calls.append(lambda path: files.checksums(path.parent))
    for call in calls:
        with refused(str(path)):
            call(path)
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_bytes() == b""


def test_a_link_is_followed_where_that_is_allowed(tmp_path):
    """Snapshots of the Hugging Face cache have links to blobs; a pipe behind one is none."""
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_json(tmp_path / "config.json", links=True) == {}
    (tmp_path / "blob").unlink()
    os.mkfifo(tmp_path / "blob")
    for path in (tmp_path / "config.json", tmp_path / "loop"):
        (tmp_path / "loop").is_symlink() or (tmp_path / "loop").symlink_to("loop")
        with refused(str(path)):
            read_json(path, links=True)


def test_no_size_is_believed(tmp_path):
    """A sparse file of a terabyte takes no room on the disk, and would take all memory."""
    path = tmp_path / "a"
    with open(path, "wb") as file:
        file.truncate(2**40)
    for read in READ.values():
        with refused(str(path), "bytes"):
            read(path)


def test_many_keys_are_read_in_linear_time(tmp_path):
    """The index of a large checkpoint has 100,000 names; comparing each with each took minutes."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(dict.fromkeys(map(str, range(100_000)), "model.safetensors")))
    assert len(read_json(path)) == 100_000


DAMAGES = {"half": b'{"step"', "UTF-8": b'{"step": \xff}\n', "deep": b"[" * 100_000 + b"\n"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_journal_ends_before_the_first_damaged_line(damage, tmp_path):
    path, entries = tmp_path / "losses.jsonl", [{"step": i} for i in range(4)]
    assert read_json_lines(path) == []
    for entry in entries[:3]:
        files.append_json(path, entry)
    with open(path, "ab") as file:
        file.write(DAMAGES[damage])
    assert read_json_lines(path) == files.cut_json_lines(path) == entries[:3]
    files.append_json(path, entries[3])
    assert read_json_lines(path) == entries and files.cut_json_lines(path, 2) == read_json_lines(path) == entries[:2]


def test_files_of_a_folder_get_the_mode_of_new_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").touch(0o600)
    (tmp_path / "new").touch()
    files.place(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "weights").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_nothing_is_written_or_removed_through_a_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("kept")
    (tmp_path / ".out.unfinished").symlink_to(elsewhere)
    with refused(".out.unfinished"), new_folder(tmp_path / "out"):
        pass
    (tmp_path / f".a.json.{os.getpid()}.tmp").symlink_to(elsewhere / "mine")
    write_json(tmp_path / "a.json", {})
    (tmp_path / ".b.tmp").symlink_to(elsewhere)
    files.empty(tmp_path, files.TEMPORARY)
    assert [path.read_text() for path in elsewhere.iterdir()] == ["kept"] and not (tmp_path / ".b.tmp").is_symlink()


def test_a_folder_is_whole_or_not_there(tmp_path):
    out = tmp_path / "new" / "out"
    with suppress(KeyboardInterrupt), new_folder(out) as unfinished:
        (unfinished / "a").write_text("half")
        raise KeyboardInterrupt
    assert list(out.parent.iterdir()) == []
    (out.parent / ".out.unfinished").mkdir()
    (out.parent / ".out.unfinished" / "killed").touch()
    with new_folder(out) as unfinished:
        (unfinished / "a").write_text("whole")
        with refused(str(out)), new_folder(out):
            pass
    assert [path.name for path in out.parent.iterdir()] == ["out"] and [path.name for path in out.iterdir()] == ["a"]
    with refused("--out", str(out)), new_folder(out):
        pass


def test_a_full_disk(tmp_path):
    with refused("MB", str(tmp_path)):
        files.require_space(tmp_path / "not" / "there", 2**60, "the study")
    wrapped = RuntimeError("in words of its own")
    wrapped.__cause__ = OSError(28, "no space")
    assert files.out_of_space(wrapped, tmp_path) and not files.out_of_space(RuntimeError(), tmp_path)


def test_json_nests_as_deep_as_code_can_walk():
    """Python 3.13 reads 3,000 levels, which functions that walk them do not survive."""
    assert files.parsed_json("[" * 64 + "]" * 64) and files.parsed_json('{"a":' * 63 + "{}" + "}" * 63)
    for text in ("[" * 65 + "]" * 65, '{"a":' * 3000 + "1" + "}" * 3000):
        with pytest.raises(ValueError, match="nested deeper than 64"):
            files.parsed_json(text)
