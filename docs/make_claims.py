"""The page of claims, docs/claims.md, made from the results in benchmarks/results/claims; and the site's page for each claim.

PYTHONPATH=benchmarks python docs/make_claims.py            # write docs/claims.md and benchmarks/claims/statements.csv
"""

from collections.abc import Iterator
from pathlib import Path

from claims import page
from claims.base import list_claims
from claims.evidence import KEPT, Evidence
from claims.tables import definitions
from longitude.report.figure import save

PAGE = Path(__file__).with_name("claims.md")
STATEMENTS = Path(page.__file__).with_name("statements.csv")
"""What benchmarks/claims/again.ipynb computes again."""
WIDTH = 640
"""Width of a chart, in pixels."""


def index() -> str:
    """The text of docs/claims.md."""
    evidence = Evidence(KEPT)
    return page.index([claim.judged(evidence) for claim in list_claims()])


def pages(folder: Path) -> Iterator[tuple[str, str]]:
    """("claims/2a-alibi-holds", its Markdown), ... for the site; their charts are written to its folder of claims."""
    evidence = Evidence(KEPT)
    judged = [claim.judged(evidence) for claim in list_claims()]
    drawn = page.charts(judged, evidence)
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in drawn.items():
        save(chart.figure.sized(WIDTH), folder / f"{name}.svg")
    yield from ((f"claims/{name}", text) for name, text in page.pages(judged, evidence, drawn))


def main() -> None:
    """Write both."""
    PAGE.write_text(index(), encoding="utf-8")
    STATEMENTS.write_text(definitions(list_claims()).to_csv(index=False), encoding="utf-8")


if __name__ == "__main__":
    main()
