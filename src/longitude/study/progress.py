"""How a study goes on, on the terminal: one bar for all cells, or plain lines where nobody watches."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from longitude.study.cell import Trial, Watcher
from longitude.study.config import StudyConfig
from longitude.study.tasks import task_of

BACKWARD = 3
"""Work of a training token, in tokens of measuring."""


class Terminal(Watcher):
    """Work is counted in measured tokens."""

    def __init__(self, console: Console, config: StudyConfig, cells: int):
        self.console = console
        task = task_of(config.task)
        self.unit = task.loss_unit
        self.step_work = BACKWARD * config.batch_size * config.train_length
        self.train_work = config.steps * self.step_work
        self.cell_work = self.train_work + task.measured_tokens(config)
        self.total = cells * self.cell_work
        self.finished_cells, self.begun, self.said = 0, time.monotonic(), -1
        self.first_done: float | None = None  # work done before this process, unknown until the first report
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
        self.task = self.bar.add_task("starting", total=self.total)

    def __enter__(self) -> "Terminal":
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def trained(self, cell: Trial, step: int, steps: int, loss: float) -> None:
        words = f"{cell.label} seed {cell.seed}  training {step}/{steps}  loss {loss:.3f} nats/{self.unit}"
        self._report(step * self.step_work, words, step * 5 // steps)

    def measured(self, cell: Trial, done: int, total: int) -> None:
        work = self.train_work + (self.cell_work - self.train_work) * done / total
        self._report(work, f"{cell.label} seed {cell.seed}  measuring {done / total:.0%}", 5 + done * 2 // total)

    def note(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False)

    def finished(self, message: str) -> None:
        """The current cell ended, well or not."""
        self.finished_cells += 1
        self.said = -1
        self.bar.update(self.task, completed=self.finished_cells * self.cell_work)
        self.note(message)

    def _report(self, work: float, words: str, part: int) -> None:
        done = self.finished_cells * self.cell_work + work
        self.bar.update(self.task, completed=done, description=words)
        if self.first_done is None:
            self.first_done, self.begun = done, time.monotonic()
        elif not self.console.is_terminal and part != self.said:
            speed = (done - self.first_done) / max(1e-9, time.monotonic() - self.begun)
            self.note(f"{words}, {done / self.total:.0%} of all, {(self.total - done) / speed / 60:.1f} min left")
        self.said = part
