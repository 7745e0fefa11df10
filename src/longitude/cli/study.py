"""`longitude study` and `longitude report`."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, FAILURES, print_json, stderr_console
from longitude.study.config import StudyConfig, of_task


def defaults(arguments: list[str]) -> dict[str, Any]:
    """Of `study`, for the task that the arguments name."""
    task = "text"
    for i, argument in enumerate(arguments):
        if argument == "--task" and i + 1 < len(arguments):
            task = arguments[i + 1]
        elif argument.startswith("--task="):
            task = argument.removeprefix("--task=")
    return {"config": of_task(task), "out": Path("runs") / ("study" if task == "text" else task)}


def study(
    config: Annotated[StudyConfig, tyro.conf.arg(name="")],
    out: Path = Path("runs/study"),
    fresh: bool = False,
    json: bool = False,
) -> int:
    """Train one small model per encoding and seed at a short length, measure each at longer lengths, write a report.

    The same command again continues where it stopped; with more encodings or seeds it adds them.

    Args:
        config: What to study.
        out: Directory of the run; by default runs/study, or runs and the name of another task.
        fresh: Start over: remove the study that the directory holds.
        json: Print the rows as JSON instead of the table.
    """
    # Threads that spin while they wait for each other lose much as soon as anything else runs; docs/decisions.md has figures.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = stderr_console()
    with console.status("reading the text, building the models") if console.is_terminal else nullcontext():
        from longitude.study import runner
        from longitude.study.progress import Terminal

        planned = runner.plan(config, out)
    with Terminal(console, planned.config, len(planned.cells)) as terminal:
        outcome = runner.study(planned, fresh=fresh, watcher=terminal, finished=terminal.finished)
    return _show(outcome.run, json, outcome.complete)


def report(run: Annotated[Path, tyro.conf.Positional], json: bool = False) -> int:
    """Build the report of a run again, from its saved results alone.

    Args:
        run: Directory of a study.
        json: Print the rows as JSON instead of the table.
    """
    if not (run / "study.json").is_file():
        raise ValueError(f"{run} holds no study: expected a directory with study.json, as `longitude study` writes")
    return _show(run, json, True)


def _show(run: Path, json: bool, complete: bool) -> int:
    """Write the report of a run; print its table and conclusion, or its rows."""
    from longitude.study import report as reports, statistics
    from longitude.study.results import read_run

    results = read_run(run)
    path = reports.write_report(results)
    if json:
        from longitude.measure import to_frame

        print_json(to_frame(results.rows))
    else:
        from rich.console import Console

        console = Console()
        console.print(statistics.table(results))
        console.print(statistics.conclusion(results), highlight=False, markup=False)
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
    return DONE if complete else FAILURES
