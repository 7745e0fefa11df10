"""`longitude report`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, print_json
from longitude.errors import UsageError

EXAMPLES = """  longitude report runs/study
  longitude report runs/study --csv"""


def report(
    run: Annotated[Path, tyro.conf.Positional],
    json: bool = False,
    csv: bool = False,
    all: bool = False,
    comparisons: bool = False,
) -> int:
    """Write the report of saved results again, or print their tables.

    Args:
        run: Directory of a study or a measurement.
        json: Print the rows as JSON instead of the table.
        csv: Print encoding, length, value, the ends of its 95% interval, change and verdict as CSV.
        all: With --csv: print every method and every column.
        comparisons: With --csv: print the comparison of every two encodings at every length, not the values.
    """
    from longitude.measure.run import is_measured, read_results

    if run.is_dir() and is_measured(run):
        if csv or comparisons:
            got = f"measurements in {run}"
            raise UsageError("--csv and --comparisons", "a study", got, "--json prints rows")
        from longitude.cli import measure

        measure.show(read_results(run), json)
        return DONE
    from longitude.study import tables
    from longitude.study.analysis import analyse

    if json and csv:
        raise ValueError("--json and --csv are forms of one output; choose one")
    if (comparisons or all) and not csv or comparisons and all:
        raise ValueError("--comparisons and --all are two forms of --csv; add --csv and one of them, or leave both out")
    if not csv:
        return show(run, json)
    analysis = analyse(run, numbers_only=True)
    rows = tables.every_comparison if comparisons else tables.findings if all else tables.short_findings
    print(tables.csv(rows(analysis)), end="")
    return DONE


def show(run: Any, json: bool) -> int:
    """Write the report of a study, a path or a `Run` with models; print its table and its three lines, or its rows."""
    from longitude.measure import to_frame
    from longitude.report.table import show as display, width
    from longitude.study.analysis import analyse
    from longitude.study.report import HEADED, summary_lines, table, write_report
    from longitude.study.results import is_kept

    analysis = analyse(run)
    kept = is_kept(analysis.run.path)
    path = None if kept else write_report(analysis)
    if json:
        print_json(to_frame(analysis.run.rows))
        return DONE
    places = [] if kept else [f"{'Report':<{HEADED}}{path}"]
    display(table(analysis, width()), summary_lines(analysis), *places, *_next(analysis))
    return DONE


def _next(analysis: Any) -> Iterator[str]:
    """What to do with the result of a study."""
    from longitude.statistics.estimates import UNCLEAR
    from longitude.study.criterion import SEEDS
    from longitude.study.report import headed

    config, path = analysis.run.config, analysis.run.path
    if config.data == ("stdlib",):
        yield headed("Next", "longitude study --data YOUR_TEXT/ --out runs/mine")
    elif len(config.seeds) < SEEDS:
        yield headed("Next", "Add seeds: the same command with --seeds 0 1 2.")
    elif any(finding.verdict == UNCLEAR for finding in analysis.main):
        yield headed("Next", f"Train longer: the same command with --steps {2 * config.steps}. Or add --seeds.")
    else:
        yield headed("Next", f"longitude report {path} --csv")
