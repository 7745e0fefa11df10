"""Tables as text: on the terminal, and in plain lines."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.runs.progress import Screen

UNCUT = 200
"""Columns of an output that is no terminal: a file has no margin to cut tables at."""


def table(
    *columns: str, rows: Iterable[Sequence[Any]] = (), words: int = 1, title: str = "", caption: str = "", **more: Any
) -> Table:
    """A table for the terminal: words to the left, numbers to the right.

    Args:
        columns: Heads of the columns.
        rows: Cells of each row; `add_row` adds others.
        words: How many columns, from the left, have words; the others have numbers.
        title: Above it.
        caption: Below it.
        more: Further arguments of rich's Table.
    """
    made = Table(
        title=_uncut(title, "bold") if title else None,
        caption=_uncut(caption, "dim") if caption else None,
        title_justify="left",
        title_style="",
        caption_justify="left",
        caption_style="",
        **{"box": None, "pad_edge": False, **more},
    )
    for place, head in enumerate(columns):
        made.add_column(head, justify="left" if place < words else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def plain(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table whose first column has words and whose others have numbers, for text that is no terminal's."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{first:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _uncut(text: str, style: str) -> Text:
    # rich wraps a title at the width of its table, which may be that of a short word
    return Text(text, style, no_wrap=True, overflow="ignore")


def width() -> int:
    """Columns of standard output."""
    console = Console()
    return console.width if console.is_terminal else UNCUT


def show(*parts: Any) -> None:
    """Print tables and sentences to standard output; words are taken as they are, brackets included."""
    console = Screen(width=width())
    for part in parts:
        console.print(part, highlight=False, markup=False, crop=False, soft_wrap=not isinstance(part, Table))
