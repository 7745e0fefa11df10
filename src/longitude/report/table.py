"""Tables on the terminal: words to the left, numbers to the right."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.runs.progress import Screen

UNCUT = 200
"""Columns of an output that is no terminal: a file has no margin to cut tables at."""


def table(*columns: str, words: int = 1, title: str = "", caption: str = "", **more: Any) -> Table:
    """An empty table for `add_row`.

    Args:
        columns: Heads of the columns.
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
    return made


def _uncut(words: str, style: str) -> Text:
    # rich wraps a title at the width of its table, which may be that of a short word
    return Text(words, style, no_wrap=True, overflow="ignore")


def width() -> int:
    """Columns of standard output."""
    console = Console()
    return console.width if console.is_terminal else UNCUT


def show(*parts: Any) -> None:
    """Print tables and sentences to standard output; words are taken as they are, brackets included."""
    console = Screen(width=width())
    for part in parts:
        console.print(part, highlight=False, markup=False, crop=False, soft_wrap=not isinstance(part, Table))
