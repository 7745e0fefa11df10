"""`longitude bench`."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import tyro

from longitude.bench.config import BenchConfig
from longitude.cli.shared import DONE, FAILURES, INTERRUPTED, print_json, stderr_console


def bench(
    config: Annotated[BenchConfig, tyro.conf.arg(name="")],
    out: Path = Path("runs/bench.json"),
    set: bool = False,
    json: bool = False,
) -> int:
    """Time and memory of encodings by backend and length, beside plain attention and other libraries; table, JSON, chart.

    Args:
        config: What to measure.
        out: The JSON; the chart stands beside it as .svg and .html.
        set: Measure the targets of this project instead, a fixed set of comparisons: under ten minutes on two quiet cores.
        json: Print the JSON instead of the table.
    """
    from longitude.bench.config import checked, checked_for_set, require_place

    config = checked_for_set(config) if set else checked(config)
    require_place(out)
    console = stderr_console()
    with console.status("loading") if console.is_terminal else nullcontext():
        from longitude.bench import report, run

    with run.Progress(console) as progress:
        try:
            measured = run.run(config, set, progress)
        except KeyboardInterrupt:
            print("longitude: interrupted; nothing was written", file=sys.stderr)
            return INTERRUPTED
    run.write(out, measured)
    if json:
        print_json(measured)
    else:
        from rich.console import Console

        shown = Console()
        for part in report.parts(measured):
            shown.print(part, highlight=False, markup=False)
        shown.print(f"chart: {out.with_suffix('.html')}", highlight=False, markup=False, soft_wrap=True)
    return FAILURES if report.failures(measured) else DONE
