"""How a measurement goes on, on the terminal: one bar, or plain lines where nobody watches."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from longitude.measure.plan import MeasurePlan, Unit
from longitude.measure.run import Watcher


class Terminal(Watcher):
    """Work is counted in units times their length."""

    def __init__(self, console: Console, plan: MeasurePlan):
        self.console, self.begin = console, time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.labels = {subject.model: subject.label for subject in plan.subjects}
        self.task = self.bar.add_task("starting", total=sum(len(plan.units(subject)) for subject in plan.subjects))
        self.done = 0.0

    def __enter__(self) -> "Terminal":
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def skipped(self, units: int) -> None:
        self.done += units
        self.bar.update(self.task, completed=self.done)

    def begun(self, unit: Unit, left: int) -> None:
        self.begin = time.monotonic()
        self.bar.update(self.task, description=self._words(unit))

    def read(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=self.done + done / total)

    def ended(self, unit: Unit) -> None:
        self.done += 1
        self.bar.update(self.task, completed=self.done)
        if not self.console.is_terminal:
            self.note(f"{self._words(unit)}: {time.monotonic() - self.begin:.1f} s")

    def note(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False)

    def _words(self, unit: Unit) -> str:
        return " ".join(str(word) for word in (self.labels[unit.model], unit.task, unit.length, unit.way) if word)
