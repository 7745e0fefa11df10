"""`longitude report`."""

from pathlib import Path
from typing import Annotated

import tyro

from longitude.cli.shared import DONE, print_json


def report(run: Annotated[Path, tyro.conf.Positional], json: bool = False) -> int:
    """Build the report of a study again, from its saved results alone.

    Args:
        run: Directory of a study.
        json: Print the rows as JSON instead of the table.
    """
    if not (run / "study.json").is_file():
        raise ValueError(f"{run} holds no study: expected a directory with study.json, as `longitude study` writes")
    return show(run, json)


def show(run: Path, json: bool) -> int:
    """Write the report of a study; print its table and conclusion, or its rows."""
    from longitude.measure import to_frame
    from longitude.report.table import show as display
    from longitude.study.analysis import analyse, conclusion
    from longitude.study.report import table, write_report

    analysis = analyse(run)
    path = write_report(analysis)
    if json:
        print_json(to_frame(analysis.run.rows))
        return DONE
    display(table(analysis), conclusion(analysis), f"report: {path}")
    return DONE
