"""`longitude measure`."""

from pathlib import Path
from typing import Annotated

import tyro

from longitude.cli.shared import DONE, FAILURES, print_json
from longitude.measure.config import MeasureConfig


def measure(
    models: Annotated[tuple[str, ...], tyro.conf.Positional],
    config: Annotated[MeasureConfig, tyro.conf.arg(name="")],
    out: Path | None = None,
    fresh: bool = False,
    json: bool = False,
) -> int:
    """Measure checkpoints at each length: perplexity on your text, and retrieval; one table, one report.

    The same command again continues where it stopped; with more models, tasks or lengths it adds them.

    Args:
        models: Folders of Hugging Face causal models, or names on the hub.
        config: What to measure.
        out: Directory of the run; by default runs/measure, or one with a hash in its name where that holds other measurements.
        fresh: Start over: remove the measurements that the directory holds.
        json: Print the rows as JSON instead of the tables.
    """
    from longitude.runs.progress import Progress

    with Progress() as bar:
        bar.update("reading the text and the configurations", 0)
        from longitude.measure import report, run, to_frame
        from longitude.measure.plan import plan

        if out is not None:
            run.require_place(out)
        planned = plan(config, models)
        out = out or run.place_of(planned, Path("runs/measure"), fresh)
        bar.total = bar.lines = sum(len(planned.units(subject)) for subject in planned.subjects)
        results = run.measure(planned, out, bar, fresh)
    path = report.write_report(results)
    if json:
        print_json(to_frame(results.rows))
    else:
        from longitude.report.table import show

        show(*report.terminal(results), f"report: {path}")
    finite = all(row.value is not None or row.count == 0 for row in results.rows)
    return DONE if finite and not results.failures else FAILURES
