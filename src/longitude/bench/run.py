"""One measurement from options to files: the JSON, and the chart beside it."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

import transformers
import vl_convert
from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from longitude.bench import decode_report, figures, report, targets_mixers
from longitude.bench.config import BenchConfig
from longitude.bench.decode import decode
from longitude.bench.sweep import sweep, threads
from longitude.bench.target import Session
from longitude.bench.targets import TARGETS
from longitude.runs.files import atomic, write_json


class Progress:
    """How it goes on, on the terminal: one bar; nothing where nobody watches."""

    def __init__(self, console: Console):
        self.bar = Bar(
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
        self.task = self.bar.add_task("starting", total=None)
        self.console, self.begun, self.now = console, 0, ""

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def expect(self, steps: int) -> None:
        self.bar.update(self.task, total=steps)

    def did(self, words: str) -> None:
        self.bar.update(self.task, advance=1, description=words)

    def begin(self, name: str) -> None:
        """The next target."""
        self.bar.update(self.task, completed=self.begun, description=name)
        self.begun, self.now = self.begun + 1, name

    def note(self, words: str) -> None:
        """A line that remains, whether or not anybody watches."""
        self.console.print(words, highlight=False, markup=False)

    def say(self, words: str) -> None:
        self.bar.update(self.task, description=f"{self.now}: {words}")


SETS = {"encodings": TARGETS, "mixers": targets_mixers.TARGETS}


def run(config: BenchConfig, the_set: str | None, progress: Progress) -> dict[str, Any]:
    """Measure what a checked configuration asks for, or a set of targets by name -> everything as plain data."""
    transformers.utils.logging.set_verbosity_error()
    if the_set is None:
        return report.document(config, sweep(config, progress))
    targets = SETS[the_set]
    progress.expect(len(targets))
    rows, outcomes = [], []
    with threads(config.threads) as count:
        session = Session(
            threads=count, clock=config.clock, repeats=config.repeats, memory=not config.no_memory, peers=not config.no_peers,
            say=progress.say,
        )  # fmt: skip
        for target in targets:
            progress.begin(target.name)
            start = time.monotonic()
            found = target.rows(session)
            rows += found
            outcomes.append(target.outcome(found) | {"took": round(time.monotonic() - start, 1)})
            progress.note(report.sentence(outcomes[-1]))
    return report.document(config, rows, outcomes)


def run_decoding(config: BenchConfig, progress: Progress) -> dict[str, Any]:
    """Measure steps of decoding -> everything as plain data."""
    transformers.utils.logging.set_verbosity_error()
    return decode_report.document(config, *decode(config, progress))


def write(out: Path, measured: dict[str, Any]) -> None:
    """The JSON, and the chart as .svg and as a page of its own, each whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, measured)
    chart = (decode_report if "lines" in measured else figures).chart(measured)
    with atomic(out.with_suffix(".svg")) as beside:
        chart.save(str(beside), format="svg")
    page = vl_convert.vegalite_to_html(chart.to_dict(), bundle=True)
    with atomic(out.with_suffix(".html")) as beside:
        beside.write_text(page, encoding="utf-8")
