"""`longitude report`."""

from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, print_json

EXAMPLES = """  longitude report runs/study
  longitude report runs/study runs/mine --csv"""


def report(
    run: Annotated[tuple[Path, ...], tyro.conf.Positional],
    json: bool = False,
    csv: bool = False,
    markdown: bool = False,
    latex: bool = False,
    comparisons: bool = False,
) -> int:
    """Write the report of saved results again, or compare several studies.

    Args:
        run: Directory of a study or a measurement, or of several studies. If studies cannot be compared, the command raises an
            error that names the difference.
        json: Print the rows as JSON instead of the table.
        csv: Print what was found of every encoding at every length as CSV.
        markdown: Print the tables as Markdown: values with intervals, comparisons.
        latex: Print the same tables of one study as LaTeX.
        comparisons: With --csv: print the comparison of every two encodings at every length, not the values.
    """
    if not run:
        raise ValueError("expected the directory of a study, or several: longitude report runs/study")
    from longitude.measure.run import is_measured, read_results

    if len(run) == 1 and run[0].is_dir() and is_measured(run[0]):
        if csv or markdown or latex:
            raise ValueError(
                f"--csv, --markdown and --latex are of studies, and {run[0]} has measurements; --json prints its rows"
            )
        from longitude.cli import measure

        measure.show(read_results(run[0]), json)
        return DONE
    from longitude.study.results import is_study

    for each in run:
        if not is_study(each):
            raise ValueError(f"{each} has no study: expected a directory that `longitude study` wrote")
    if json + csv + markdown + latex > 1:
        raise ValueError("--json, --csv, --markdown and --latex are forms of one output; choose one")
    first, *others = run
    if comparisons and (others or not csv):
        raise ValueError(
            "--comparisons is of --csv of one study; add --csv, or leave it out: the other forms have them"
        )
    if others and latex:
        raise ValueError("--latex is of one study; give one, or --markdown for several side by side")
    if others:
        return compare(run, json, csv, markdown)
    from longitude.study import tables
    from longitude.study.analysis import analyse

    if not (csv or markdown or latex):
        return show(first, json)
    analysis = analyse(first)
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


def compare(runs: tuple[Path, ...], json: bool, csv: bool, markdown: bool) -> int:
    """Print studies side by side; nothing is written."""
    from longitude.report.table import show as display
    from longitude.study import tables
    from longitude.study.compare import side_by_side
    from longitude.study.report import differences_table, studies_table

    found = side_by_side(runs)
    criterion = next(iter(found.analyses.values())).criterion
    if json:
        print_json(found.frame)
    elif csv:
        print(tables.csv(found.frame), end="")
    elif markdown:
        parts = [found.sentence, tables.as_markdown(found.heads, found.lines)]
        print("\n\n".join([*parts, *([tables.comparisons(found.comparisons, criterion)] if found.comparisons else [])]))
    else:
        display(
            studies_table(found), *(["", differences_table(found), ""] if found.comparisons else []), found.sentence
        )
    return DONE
