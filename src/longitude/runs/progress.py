"""The progress of any work: one bar on a terminal, a few plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Progress:
    """A context manager around work whose amount is known, in any unit, from the start or from the first update.

    Args:
        console: Where it is shown; by default standard error.
        total: The whole amount of work; None: unknown until an update gives it.
        lines: How many plain lines, evenly over the work, stand for the bar where the console is no terminal.
    """

    def __init__(self, console: Console | None = None, total: float | None = None, lines: int = 0):
        self.console = console or Console(stderr=True, soft_wrap=True)
        self.total, self.lines, self.done = total, lines, 0.0
        # time and amount of the first update, which may continue earlier work
        self._first: tuple[float, float] | None = None
        self._last_line = 0
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
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
        """What is being done now, a line for each of what is done side by side, and how much of the total is done.

        Less than before begins another part of the work.
        """
        if done < self.done or self._first is None:
            self._first, self._last_line = (time.monotonic(), done), 0
            self._bar.reset(self._task)
        self.done, self.total = done, total or self.total
        self._bar.update(self._task, description=description, completed=done, total=self.total)
        if self.lines and self.total and not self.console.is_terminal:
            line = int(self.lines * done / self.total)
            if line > self._last_line and description:
                description = description.replace("\n", "; ")
                self.note(f"{description}, {done / self.total:.0%} of all{self._left()}")
            self._last_line = max(line, self._last_line)

    def advance(self, description: str | None = None, by: float = 1) -> None:
        """`by` more of the total is done."""
        self.update(description, self.done + by)

    def note(self, message: str) -> None:
        """A line that stays, on a terminal or not."""
        self.console.print(message, highlight=False, markup=False)

    def _left(self) -> str:
        """, 2.1 min left; empty before anything is known of the speed."""
        assert self._first is not None and self.total is not None
        begun, first = self._first
        if self.done <= first:
            return ""
        left = (self.total - self.done) * (time.monotonic() - begun) / (self.done - first)
        return f", {left / 60:.1f} min left"
