"""The page of claims, docs/claims.md, and its charts, docs/claims/*.svg, made from the results in benchmarks/results/claims.

PYTHONPATH=benchmarks python docs/make_claims.py            # write them
PYTHONPATH=benchmarks python docs/make_claims.py --check    # exit code 1 where one is not what this would write
"""

import sys
from html import escape, unescape
from pathlib import Path

from claims.base import list_claims
from claims.evidence import KEPT, Evidence
from claims.page import Chart, charts, page
from draw_verdicts import VERDICTS
from longitude.report.figure import save

PAGE = Path(__file__).with_name("claims.md")
FOLDER = PAGE.with_suffix("")
WIDTH = 640
"""Of a chart, in pixels."""
BEGIN, END = "<metadata>", "</metadata>"


def made(root: Path = KEPT) -> tuple[str, dict[str, Chart]]:
    """The page and its charts by name."""
    evidence = Evidence(root)
    judged = [claim.judged(evidence) for claim in list_claims()]
    drawn = charts(judged, evidence)
    return page(judged, evidence, drawn), drawn


def write(text: str, drawn: dict[str, Chart], path: Path = PAGE) -> None:
    """The page, and the charts in the folder of its name, each with its numbers inside; charts of before are removed."""
    path.write_text(text, encoding="utf-8")
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, chart in drawn.items():
        svg = folder / f"{name}.svg"
        save(chart.figure.sized(WIDTH), svg)
        drawing = svg.read_text(encoding="utf-8").rstrip().removesuffix("</svg>")
        svg.write_text(f"{drawing}{BEGIN}{escape(chart.numbers)}{END}</svg>\n", encoding="utf-8")


def numbers_in(svg: Path) -> str:
    """The numbers that a chart was drawn from."""
    return unescape(svg.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0])


def differing(text: str, drawn: dict[str, Chart], path: Path = PAGE) -> list[str]:
    """Files that are not what `write` would write: the page by its text, charts by their numbers."""
    found = [] if path.exists() and path.read_text(encoding="utf-8") == text else [path.name]
    there = {svg.stem: numbers_in(svg) for svg in path.with_suffix("").glob("*.svg")}
    expected = {name: chart.numbers for name, chart in drawn.items()}
    return found + [f"{name}.svg" for name in {**there, **expected} if there.get(name) != expected.get(name)]


def main() -> int:
    """Write, or with --check compare."""
    result = made()
    if "--check" not in sys.argv[1:]:
        write(*result)
        VERDICTS.write()
        return 0
    found = differing(*result)
    print("\n".join(found) or "docs/claims.md is what the results say")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
