"""What verbs share: exit codes, what is shown while they load, JSON for machines."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from json import dumps, loads
from typing import Any

DONE, FAILURES, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def print_json(value: Any) -> None:
    """Plain data, or a DataFrame as a list of rows, on standard output."""
    rows = loads(value.to_json(orient="records")) if hasattr(value, "to_json") else value
    print(dumps(rows, indent=1))


def write_any_sign() -> None:
    """Let standard output write "?" for a sign that its encoding lacks, where it would raise after hours of work."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # Python's second choice is of a locale without signs


@contextmanager
def waiting(message: str) -> Iterator[None]:
    """Shows what is being loaded or read, on a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(message) if console.is_terminal else nullcontext():
        yield


def duration(seconds: float) -> str:
    """In the unit that fits."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
