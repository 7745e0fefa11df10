"""What verbs share: exit codes, what is shown while they load, JSON for machines, signs for terminals that have few."""

import codecs
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from json import dumps, loads
from typing import Any

DONE, FAILURES, WRONG_USE, UNTRIED, INTERRUPTED = 0, 1, 2, 3, 130
PLAIN = {
    "±": "+-",
    "−": "-",
    "–": "-",
    "—": "-",
    "×": "x",
    "·": ".",
    "…": "...",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "°": "deg",
}
PLAIN |= dict.fromkeys("│┆╎", "|") | dict.fromkeys("─┄━╌", "-") | dict.fromkeys("█▓▒░▇▆▅▄▃▂▁", "#")
"""Written for a sign where the terminal, or the file behind standard output, cannot hold it."""

STRICT = ("strict", "surrogateescape")
"""Handlers of errors that raise for such a sign; the second is Python's own choice where the locale is C."""


def print_json(value: Any) -> None:
    """Plain data, or a DataFrame as a list of rows, on standard output."""
    rows = loads(value.to_json(orient="records")) if hasattr(value, "to_json") else value
    print(dumps(rows, indent=1, ensure_ascii=not _holds_all_signs(sys.stdout)))


def write_any_sign() -> None:
    """Let standard output write a plain sign for one that its encoding lacks, where it would raise after hours of work."""
    if isinstance(sys.stdout, TextIOWrapper) and not _holds_all_signs(sys.stdout) and sys.stdout.errors in STRICT:
        codecs.register_error("longitude", _in_plain_signs)
        sys.stdout.reconfigure(errors="longitude")


def _holds_all_signs(stream: Any) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


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
