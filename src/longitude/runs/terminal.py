"""The terminal: text from files and servers with the signs that would control it written out, and the progress of any work.

Progress is bars and lines on a terminal; elsewhere it is lines about finished parts only.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column

ORDERS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Signs that turn the direction of text, so that it reads otherwise than it is."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
CONTROLS |= {code: f"\\u{code:04x}" for code in ORDERS}


def clean(text: str) -> str:
    """Text whose control signs are visible; line ends and tabs stay."""
    return text.translate(CONTROLS)


class Cleaned:
    """A text stream that cleans what is written to it.

    Consoles of rich write past it, since they control the terminal; `Screen` cleans what these print.

    Args:
        stream: Where the text goes.
        keep: Further control signs that stay: progress bars of other libraries need the carriage return.
    """

    def __init__(self, stream: Any, keep: str = ""):
        self.rich_proxied_file = stream
        self._controls = {code: seen for code, seen in CONTROLS.items() if chr(code) not in keep}

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(text.translate(self._controls))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class Screen(Console):
    """A console that cleans the text of everything it prints, and none of its own control sequences."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text))


def whole() -> Column:
    """A column that is never cut, whatever stands beside it."""
    return Column(no_wrap=True, overflow="ignore")


class Progress:
    """Progress bar as a context manager, for work of a known amount in any unit.

    Args:
        console: Output console; by default standard error.
        total: The whole amount of work; None: unknown until an update gives it.
    """

    def __init__(self, console: Console | None = None, total: float | None = None):
        self.console = console or Screen(stderr=True, soft_wrap=True)
        self.total, self.done = total, 0.0
        self._begun = False
        self._bar = Bar(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%", table_column=whole()),
            TimeRemainingColumn(compact=True, table_column=whole()),
            TextColumn("left", table_column=whole()),
            expand=True,
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, description: str | None, done: float, total: float | None = None) -> None:
        """Show a description of the current work, and the done part of the total.

        A smaller `done` than before starts another part of the work.
        """
        if done < self.done or not self._begun:  # the first update may continue earlier work: no speed follows from it
            self._begun = True
            self._bar.reset(self._task)
        self.done, self.total = done, total or self.total
        self._bar.update(self._task, description=description, completed=done, total=self.total)

    def advance(self, description: str | None = None, by: float = 1) -> None:
        """Add `by` to the done part of the total."""
        self.update(description, self.done + by)

    def note(self, message: str) -> None:
        """Print a line that stays, on a terminal or not."""
        at_words = self.console.is_terminal  # which breaks a longer line within a word
        self.console.print(message, highlight=False, markup=False, soft_wrap=not at_words)
