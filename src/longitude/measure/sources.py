"""Text that users name: the sources of Python's standard library, a file, a folder, or a Hugging Face dataset."""

import hashlib
import os
import platform
import sysconfig
from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from longitude.errors import UsageError, one_line_of
from longitude.runs.files import LARGEST, regular
from longitude.runs.machine import available_memory, require_memory

# Not text a programmer wrote for a reader: tests, character tables, generated topics; and what others installed.
NOT_STDLIB = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload", "__pycache__",
}  # fmt: skip

BLOCK = 2**20
"""Bytes that are read at once."""


@dataclass(frozen=True)
class Text:
    """Named documents of UTF-8 bytes, in a fixed order; `left_out` names the parts of the source that are missing."""

    source: str
    documents: list[tuple[str, bytes]]
    left_out: str = ""

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name, content in self.documents:
            digest.update(len(content).to_bytes(8) + name.encode("utf-8", "surrogateescape") + b"\0" + content)
        return digest.hexdigest()


def name_hash(name: str) -> str:
    """Hash of a name, which orders documents and draws places in them."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def read_text(data: str, option: str = "--data") -> Text:
    """Documents of "stdlib", "package:NAME", a file, a folder or "datasets:NAME". ValueError when there is none or it is no text.

    option: the command-line option that names it, for messages.
    """
    if data == "stdlib":
        return _stdlib(option)
    if data.startswith("package:"):
        return _package(data, option)
    if data.startswith("datasets:"):
        return _dataset(data, option)
    if not data:
        raise UsageError(option, "a file, a folder or the name of a text", "nothing", "a dot names the current folder")
    path = Path(data)
    if path.is_dir():
        return _folder(path, option)
    if not path.is_file():
        raise ValueError(
            f"{option} {data}: there is no such file or folder; a Hugging Face dataset is written datasets:NAME, an installed "
            f"package package:NAME, and stdlib is the sources of Python's standard library"
        )
    if (content := _read(path)) is None:
        raise UsageError(f"{option} {data}", "UTF-8 text", "a binary file", "convert it to UTF-8 text first")
    return Text(data, [(path.name, content)])


def read_texts(data: Sequence[str], option: str = "--data") -> Text:
    """Several sources of `read_text` as one text, their names before those of documents. ValueError if one is in another."""
    if len(data) == 1:
        return read_text(data[0], option)
    paths = {name: Path(name).resolve() for name in data if Path(name).exists()}
    for name, path in paths.items():
        if inside := [other for other in paths if other != name and path.is_relative_to(paths[other])]:
            raise ValueError(f"{option} {name}: it is part of {inside[0]} already; leave one of them out")
    texts = [read_text(name, option) for name in data]
    documents = [
        (f"{source}/{name}", part) for source, text in zip(data, texts, strict=True) for name, part in text.documents
    ]
    left_out = [f"{text.left_out} ({text.source})" for text in texts if text.left_out]
    return Text(" and ".join(text.source for text in texts), documents, "; ".join(left_out))


def _stdlib(option: str) -> Text:
    root = Path(sysconfig.get_path("stdlib"))
    documents = _documents(_contents(root, NOT_STDLIB, ".py"))
    documents = [(name, content) for name, content in documents if not Path(name).name.startswith("_sysconfigdata")]
    if not documents:
        raise ValueError(f"{option} stdlib: no .py files under {root}; give a text file or a folder with {option}")
    left_out = "tests, character tables, generated sources, and what is not part of the library"
    return Text(f"standard library of Python {platform.python_version()}", documents, left_out)


def _package(data: str, option: str) -> Text:
    name = data.removeprefix("package:")
    try:
        folders = list(getattr(find_spec(name), "submodule_search_locations", None) or [])
    except (ImportError, ValueError):
        folders = []
    documents = _documents(_contents(Path(folders[0]), NOT_STDLIB, ".py")) if folders else []
    if not documents:
        expected, remedy = "an installed package with sources", "use the name that Python imports it by"
        raise UsageError(f"{option} {data}", expected, "none", remedy)
    try:
        release = version(packages_distributions()[name][0])
    except (KeyError, PackageNotFoundError):
        release = ""
    return Text(f"sources of {name} {release}".strip(), documents, "tests, and what is no source of Python")


def _folder(root: Path, option: str) -> Text:
    contents = _contents(root)
    documents = _documents(contents)
    other = [name for name, content in contents.items() if content is None]
    empty = len(contents) - len(documents) - len(other)
    if not documents:
        what = f"{len(other)} binary and {empty} empty files" if contents else "no files"
        raise UsageError(f"{option} {root}", "files of UTF-8 text in this folder", what)
    left_out = [f"{len(other)} files that are not UTF-8 text, such as {other[0]}"] if other else []
    left_out += [f"{empty} empty files"] if empty else []
    return Text(str(root), documents, "; ".join(left_out))


def _dataset(data: str, option: str) -> Text:
    try:
        datasets = import_module("datasets")  # of an extra, so that type checkers need not find it
    except ImportError:
        raise ValueError(
            f"{option} {data} needs the package datasets; install it with pip install 'longitude[datasets]'"
        ) from None
    name, _, subset = data.removeprefix("datasets:").partition(":")
    try:
        parts = datasets.load_dataset(name, subset or None)
    except Exception as error:  # whatever the hub, the network or a loader raises is a wrong {option} here
        raise ValueError(f"{option} {data}: it cannot be loaded ({one_line_of(error)})") from error
    part = "train" if "train" in parts else next(iter(parts))
    rows = parts[part]
    if "text" not in rows.column_names:
        raise UsageError(f"{option} {data}", "a column named text", ", ".join(rows.column_names))
    contents = [text.encode() for text in rows["text"] if text]
    return Text(f"{data}, split {part}", [(f"row {i}", content) for i, content in enumerate(contents)])


def _documents(contents: dict[str, bytes | None]) -> list[tuple[str, bytes]]:
    """The files with text in them."""
    return [(name, content) for name, content in contents.items() if content]


def _contents(root: Path, skipped: Collection[str] = (), suffix: str = "") -> dict[str, bytes | None]:
    """Name -> content of all files under `root`, in order, None if it is no text.

    Hidden files and folders, and those of `skipped`, are left out.
    """
    paths = []
    for folder, names, files in os.walk(root, onerror=_unreadable):
        names[:] = [name for name in names if not name.startswith(".") and name not in skipped]
        paths += [Path(folder, name) for name in files if not name.startswith(".") and name.endswith(suffix)]
    return {path.relative_to(root).as_posix(): _read(path) for path in sorted(paths) if path.is_file()}


def _read(path: Path) -> bytes | None:
    """The content of a file of UTF-8 text; None if it is no text, which is known before all of it is in memory."""
    try:
        with regular(path, links=True) as descriptor, open(descriptor, "rb", closefd=False) as file:
            decoder, blocks = getincrementaldecoder("utf-8")(), []
            while block := file.read(BLOCK):
                if "\0" in decoder.decode(block):
                    return None
                if not blocks and (size := os.fstat(descriptor).st_size) > LARGEST:
                    require_memory(size, available_memory(), f"{path} takes", "give less text")
                blocks.append(block)
            decoder.decode(b"", final=True)
            return b"".join(blocks)
    except UnicodeDecodeError:
        return None
    except OSError as error:
        _unreadable(error)
        raise


def _unreadable(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error
