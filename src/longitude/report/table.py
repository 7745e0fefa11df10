"""Tables as text: on the terminal, in plain lines and as Markdown."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from textwrap import TextWrapper
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.runs.terminal import Screen

UNCUT = 10_000
"""Columns of an output that is no terminal: a file has no margin to cut tables at."""


def table(
    *columns: str,
    rows: Iterable[Sequence[Any]] = (),
    words: int = 1,
    title: str = "",
    caption: str = "",
    fold: bool = False,
    **more: Any,
) -> Table:
    """A table for the terminal: words to the left, numbers to the right.

    Args:
        columns: Heads of the columns.
        rows: Cells of each row; `add_row` adds others.
        words: How many columns, from the left, have words; the others have numbers.
        title: Above it.
        caption: Below it.
        fold: Break words if the terminal is too narrow, and draw a line below the heads.
        more: Further arguments of rich's Table.
    """
    made = Table(
        title=_uncut(title, "bold") if title else None,
        caption=_uncut(caption, "dim") if caption else None,
        title_justify="left",
        title_style="",
        caption_justify="left",
        caption_style="",
        **{"box": SIMPLE_HEAD if fold else None, "pad_edge": False, **({"show_edge": False} if fold else {}), **more},
    )
    for place, head in enumerate(columns):
        justify, name = "left" if place < words else "right", not fold and place == 0
        made.add_column(head, justify=justify, no_wrap=name, overflow="ellipsis" if name else "fold")
    for row in rows:
        made.add_row(*row)
    return made


def plain(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table whose first column has words and whose others have numbers, for text that is no terminal's."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{first:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def markdown(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table as Markdown; missing values are empty."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |" for row in rows)


def _uncut(text: str, style: str) -> Text:
    # rich would wrap at the width of the table, which may be that of a short word
    return Text(sentences(text), style, no_wrap=True, overflow="ignore")


def width() -> int:
    """Columns of standard output."""
    console = Console()
    return console.width if console.is_terminal else UNCUT


def show(*parts: Any) -> None:
    """Print tables and sentences to standard output; words are taken as they are, brackets included."""
    console = Screen(width=width())
    for part in parts:
        is_table = isinstance(part, Table)
        if isinstance(part, str) and part.endswith(".") and console.is_terminal:  # a command is copied in one line
            part = sentences(part)
        with console.capture() if is_table and not console.is_terminal else nullcontext() as captured:
            wraps = is_table or (isinstance(part, Text) and console.is_terminal)  # at words, as a terminal does not
            console.print(part, highlight=False, markup=False, crop=False, soft_wrap=not wraps)
        if captured is not None:
            console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def sentences(text: str) -> str:
    """Text with its lines broken between words to fit a terminal; elsewhere as it is."""
    wrapper = TextWrapper(width(), break_long_words=False, break_on_hyphens=False)
    return "\n".join(line for part in text.split("\n") for line in wrapper.wrap(part) or [""])
