"""`longitude report`."""

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
    markdown: bool = False,
    latex: bool = False,
    comparisons: bool = False,
) -> int:
    """Write the report of saved results again, or print their tables.

    Args:
        run: Directory of a study or a measurement.
        json: Print the rows as JSON instead of the table.
        csv: Print the findings of every encoding at every length as CSV.
        markdown: Print the tables as Markdown: values with intervals, comparisons.
        latex: Print the same tables as LaTeX.
        comparisons: With --csv: print the comparison of every two encodings at every length, not the values.
    """
    from longitude.measure.run import is_measured, read_results

    if run.is_dir() and is_measured(run):
        if csv or markdown or latex or comparisons:
            raise UsageError(
                "--csv, --markdown, --latex and --comparisons",
                "a study",
                f"measurements in {run}",
                "--json prints rows",
            )
        from longitude.cli import measure

        measure.show(read_results(run), json)
        return DONE
    from longitude.study import tables
    from longitude.study.analysis import analyse

    if json + csv + markdown + latex > 1:
        raise ValueError("--json, --csv, --markdown and --latex are forms of one output; choose one")
    if comparisons and not csv:
        raise ValueError("--comparisons is of --csv; add --csv, or leave it out: the other forms have them")
    if not (csv or markdown or latex):
        return show(run, json)
    analysis = analyse(run)
    if csv:
        print(tables.csv((tables.every_comparison if comparisons else tables.every_finding)(analysis)), end="")
    else:
        print((tables.latex if latex else tables.markdown)(analysis), end="")
    return DONE


def show(run: Any, json: bool) -> int:
    """Write the report of a study, a path or a `Run` with models; print its table and its three lines, or its rows."""
    from longitude.measure import to_frame
    from longitude.report.table import show as display, width
    from longitude.study.analysis import analyse
    from longitude.study.report import HEADED, headed, part_tables, summary_lines, table, write_report
    from longitude.study.results import is_kept

    analysis = analyse(run)
    kept = is_kept(analysis.run.path)
    path = None if kept else write_report(analysis)
    if json:
        print_json(to_frame([row for part in analysis.run.parts for row in part.rows]))
        return DONE
    places = [] if kept else [f"{'Report':<{HEADED}}{path}"]
    if analysis.run.config.data == ("stdlib",) and not kept:
        places.append(headed("Next", "longitude study --data YOUR_TEXT/ --encodings rope alibi t5"))
    display(table(analysis, width()), *part_tables(analysis), summary_lines(analysis), *places)
    return DONE
