"""What verbs share: exit codes, what is shown while they load, JSON for machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps, loads
from typing import Any

DONE, FAILURES, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def print_json(value: Any) -> None:
    """Plain data, or a DataFrame as a list of rows, on standard output."""
    rows = loads(value.to_json(orient="records")) if hasattr(value, "to_json") else value
    print(dumps(rows, indent=1, ensure_ascii=False))


def stderr_console() -> Any:
    """Where progress is shown."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


@contextmanager
def waiting(message: str) -> Iterator[None]:
    """Shows what is being loaded or read, on a terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield
