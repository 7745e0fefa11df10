"""Journals: files of JSON lines that grow by whole lines, whenever the process is killed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longitude.runs.files import flush, naming


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """One line, on the disk when this returns."""
    with naming(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def lines(path: Path) -> list[bytes]:
    """The whole lines; none where there is no such file."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def cut(path: Path) -> None:
    """Remove what a killed process left of a line at the end. Only for the one writer."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
        flush(path)
