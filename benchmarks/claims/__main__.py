"""Claims with their verdicts, from the committed results or from a folder of studies that are run here first.

PYTHONPATH=benchmarks python -m claims                      # the verdicts of the committed results
PYTHONPATH=benchmarks python -m claims runs/claims --run    # run the studies, or go on with them, then judge them
PYTHONPATH=benchmarks python -m claims runs/claims --plan   # how long that takes
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from claims import series
from claims.base import claims_of
from claims.evidence import KEPT, Evidence
from claims.page import charts, page
from claims.tables import frame, table
from longitude.cli.shared import DONE, FAILURES, INTERRUPTED, WRONG_USE, print_json
from longitude.report.table import show, table as plain_table
from longitude.runs.progress import Progress
from longitude.study.config import StudyConfig, option
from longitude.study.execution import Execution

MANY_MODELS = 2**16  # more than run at once: an executor then names all its workers


def verdicts(
    folder: Annotated[Path, tyro.conf.Positional] = KEPT,
    only: tuple[str, ...] = (),
    run: bool = False,
    plan: bool = False,
    fresh: bool = False,
    json: bool = False,
    csv: bool = False,
    markdown: bool = False,
    config: Annotated[StudyConfig, tyro.conf.arg(name="")] = StudyConfig(),  # noqa: B008 - frozen
    execution: Annotated[Execution, tyro.conf.arg(name="")] = Execution(),  # noqa: B008 - frozen
    given: Annotated[tuple[str, ...], tyro.conf.Fixed, tyro.conf.SuppressFixed] = (),
) -> int:
    """Print every claim with its verdict, from the results in a folder.

    Args:
        folder: Where the studies are; by default the committed results.
        only: Claims to judge; docs/claims.md has their names.
        run: Run the studies of the claims in the folder first, or continue them.
        plan: Run nothing; print how long the studies take.
        fresh: With --run: remove what the folder holds, and start over.
        json: Print a row for each statement as JSON.
        csv: Print a row for each statement as CSV.
        markdown: Print the page of claims as Markdown.
        config: With --run: options for all studies; those that decide what a study asks are its preset's.
        execution: With --run: where the models are trained.
        given: Options on the command line.
    """
    if (run or plan) and folder == KEPT:
        raise ValueError(f"expected a folder for the studies, got that of the committed results: {KEPT}")
    if json + csv + markdown > 1:
        raise ValueError("--json, --csv and --markdown are three forms of one output; choose one")
    complete = True
    if run or plan:
        options = {name: getattr(config, name) for name in StudyConfig.__dataclass_fields__ if option(name) in given}
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin lose much as soon as anything else runs
        complete = _run(folder, only, options, execution, fresh, plan, json)
        if plan:
            return DONE
    evidence = Evidence(folder)
    judged = [claim.judged(evidence) for claim in claims_of(only)]
    if json:
        print_json(frame(judged))
    elif csv:
        print(frame(judged).to_csv(index=False), end="")
    elif markdown:
        print(page(judged, evidence, charts(judged, evidence)), end="")
    else:
        show(table(judged))
    return DONE if complete else FAILURES


def _run(
    root: Path, names: Sequence[str], options: dict[str, Any], execution: Execution, fresh: bool, plan: bool, json: bool
) -> bool:
    """Run the studies, after saying how long that takes, or say only that; returns whether all models are done."""
    found = series.members(root, names, options, fresh)
    with Progress() as bar:
        times = [
            series.time_of(member, fresh, lambda label, done, total: bar.update(f"a few steps of {label}", done, total))
            for member in found
        ]
    if plan and json:
        print_json([time._asdict() for time in times])
        return True
    workers = max(getattr(execution.of(member.config, MANY_MODELS), "workers", 1) for member in found)
    hours = sum(time.seconds for time in times) / 3600
    title = f"about {hours / workers:.1f} hours, {workers} models at once"
    made = plain_table("study", "models to train", "hours of work", "estimate", title=title)
    for time in times:
        made.add_row(time.study, str(time.models), f"{time.seconds / 3600:.2f}", time.source)
    if plan:
        show(made)
        return True
    series.begin(root, options, fresh)
    with Progress() as bar:
        bar.console.print(made)
        return series.run_series(found, execution.of, fresh, bar.update_each, bar.note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    given = tuple(word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--"))
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    try:
        return tyro.cli(partial(verdicts, given=given), args=arguments, config=config)
    except ValueError as error:
        print(f"claims: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("claims: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
