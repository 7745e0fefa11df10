"""`longitude report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, print_json


def report(
    run: Annotated[tuple[Path, ...], tyro.conf.Positional],
    json: bool = False,
    csv: bool = False,
    markdown: bool = False,
) -> int:
    """Build the report of a study again, from its saved results alone; or put several studies side by side; or judge claims.

    Args:
        run: Directory of a study, or several; what cannot be compared is refused with what differs. Or the directory of the
            studies of --preset claims: then claims with their verdicts are printed.
        json: Print the rows as JSON instead of the table.
        csv: Print what was found of every encoding at every length as CSV.
        markdown: Print the tables as Markdown: values with intervals, comparisons.
    """
    if not run:
        raise ValueError("expected the directory of a study, or several: longitude report runs/study")
    claims = len(run) == 1 and holds_claims(run[0])
    for each in () if claims else run:
        if not (each / "study.json").is_file():
            raise ValueError(
                f"{each} holds no study: expected a directory with study.json, as `longitude study` writes"
            )
    if json + csv + markdown > 1:
        raise ValueError("--json, --csv and --markdown are three forms of one output; choose one")
    first, *others = run
    if claims:
        return judge(first, (), json, csv, markdown)
    if others:
        return compare(run, json, csv, markdown)
    from longitude.study import tables
    from longitude.study.analysis import analyse
    from longitude.study.kept import is_kept, read_kept

    of = read_kept(first) if is_kept(first) else first
    if not (csv or markdown):
        return show(of, json)
    analysis = analyse(of)
    print(tables.csv(tables.findings(analysis)) if csv else tables.markdown(analysis), end="")
    return DONE


def holds_claims(root: Path) -> bool:
    """Whether a folder holds studies that claims are judged on, and is none itself."""
    from longitude.study.presets import list_presets

    names = [name.removeprefix("claims/") for name in list_presets() if name.startswith("claims/")]
    return not (root / "study.json").is_file() and any((root / name / "study.json").is_file() for name in names)


def judge(root: Path, claims: Sequence[str] = (), json: bool = False, csv: bool = False, markdown: bool = False) -> int:
    """Print claims with their verdicts on the studies of a folder; by default all."""
    from longitude.claims.base import claims_of
    from longitude.claims.evidence import Evidence
    from longitude.claims.page import charts, page
    from longitude.claims.tables import frame, table
    from longitude.report.table import show as display

    evidence = Evidence(root)
    judged = [claim.judged(evidence) for claim in claims_of(claims)]
    if json:
        print_json(frame(judged))
    elif csv:
        print(frame(judged).to_csv(index=False), end="")
    elif markdown:
        print(page(judged, evidence, charts(judged, evidence)), end="")
    else:
        display(table(judged))
    return DONE


def show(run: Any, json: bool) -> int:
    """Write the report of a study, a path or a `Run` with models; print its table and conclusion, or its rows."""
    from longitude.measure import to_frame
    from longitude.report.table import show as display
    from longitude.study.analysis import analyse, conclusion
    from longitude.study.kept import is_kept
    from longitude.study.report import table, write_report

    analysis = analyse(run)
    kept = is_kept(analysis.run.path)
    path = None if kept else write_report(analysis)
    if json:
        print_json(to_frame(analysis.run.rows))
        return DONE
    display(table(analysis), conclusion(analysis), *([] if kept else [f"report: {path}"]))
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
