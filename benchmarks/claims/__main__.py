"""Claims with their verdicts, from the committed results or from a folder of studies that are run here first.

PYTHONPATH=benchmarks python -m claims                      # the verdicts of the committed results
PYTHONPATH=benchmarks python -m claims runs/claims --run    # run the studies, or go on with them, then judge them
PYTHONPATH=benchmarks python -m claims runs/claims --plan   # how long that takes
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from claims import series
from claims.base import claims_of
from claims.evidence import KEPT, Evidence
from claims.tables import frame, table
from longitude.cli.shared import DONE, FAILURES, INTERRUPTED, WRONG_USE
from longitude.report.table import show


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every claim with its verdict; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="With --run or --plan, further options are those of `longitude study`, for every study.",
    )  # fmt: skip
    parser.add_argument("folder", nargs="?", type=Path, default=KEPT, help="by default the committed results")
    parser.add_argument("--only", nargs="+", default=[], metavar="CLAIM", help="docs/claims.md has the names")
    parser.add_argument("--run", action="store_true", help="run the studies of the claims first, or continue them")
    parser.add_argument("--plan", action="store_true", help="print how long each study takes, and run nothing")
    parser.add_argument(
        "--keep", action="store_true", help="commit what was run: write it to benchmarks/results/claims"
    )
    parser.add_argument("--csv", action="store_true", help="a row for each statement")
    asked, options = parser.parse_known_args(arguments)
    if options and not (asked.run or asked.plan):
        parser.error(f"unknown without --run: {' '.join(options)}")
    try:
        if (asked.run or asked.plan or asked.keep) and asked.folder == KEPT:
            raise ValueError(f"expected a folder for the studies, got that of the committed results: {KEPT}")
        complete = True
        if asked.run or asked.plan:
            complete = series.run(asked.only, asked.folder, [*options, *["--plan"] * asked.plan])
        if asked.keep:
            print(*series.keep(asked.only, asked.folder), sep="\n")
        if not asked.plan:
            evidence = Evidence(asked.folder)
            judged = [claim.judged(evidence) for claim in claims_of(asked.only)]
            if asked.csv:
                print(frame(judged).to_csv(index=False), end="")
            else:
                show(table(judged))
    except ValueError as error:
        print(f"claims: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("claims: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED
    return DONE if complete else FAILURES


if __name__ == "__main__":
    sys.exit(main())
