"""`longitude measure`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import tyro

from longitude.cli.shared import DONE, FAILURES, print_json, stderr_console
from longitude.measure.config import MeasureConfig


def measure(
    models: Annotated[tuple[str, ...], tyro.conf.Positional],
    config: Annotated[MeasureConfig, tyro.conf.arg(name="")],
    out: Path = Path("runs/measure"),
    fresh: bool = False,
    json: bool = False,
) -> int:
    """Measure checkpoints at each length: perplexity on your text, and retrieval; one table, one report.

    The same command again continues where it stopped; with more models, tasks or lengths it adds them.

    Args:
        models: Folders of Hugging Face causal models, or names on the hub.
        config: What to measure.
        out: Directory of the run.
        fresh: Start over: remove the measurements that the directory holds.
        json: Print the rows as JSON instead of the tables.
    """
    console = stderr_console()
    with console.status("reading the text and the configurations") if console.is_terminal else nullcontext():
        from longitude.measure import report, run
        from longitude.measure.plan import plan
        from longitude.measure.progress import Terminal

        run.require_place(out)
        planned = plan(config, models)
    with Terminal(console, planned) as terminal:
        results, failures = run.measure(planned, out, fresh=fresh, watcher=terminal)
    path = report.write_report(results)
    if json:
        from longitude.measure import to_frame

        print_json(to_frame(results.rows))
    else:
        from rich.console import Console

        shown = Console()
        if not shown.is_terminal:  # a file has no margin to cut tables at
            shown = Console(width=200)
        for part in report.terminal(results):
            shown.print(part, highlight=False, soft_wrap=not hasattr(part, "columns"))
        shown.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
    finite = all(row.value is not None or row.count == 0 for row in results.rows)
    return DONE if finite and not failures else FAILURES
