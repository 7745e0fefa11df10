"""The page, written into one file."""

from pathlib import Path
from typing import Any

from longitude.explore.drawn import drawn
from longitude.explore.families import tables
from longitude.report.figure import COLOURS
from longitude.report.page import write_page

SCRIPTS = (
    "formulas.js",
    "chart.js",
    "state.js",
    "rotations.js",
    "config.js",
    "panels.js",
    "errata.js",
    "drawn.js",
    "dropped.js",
)
"""In the order in which they need each other."""


def write(path: str | Path) -> None:
    """Write the page: one HTML file that needs no network.

    Args:
        path: The file; one that exists is replaced.

    Raises:
        ValueError: Its folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(
            f"{path}: expected a file in a folder that exists, and there is no {path.parent}; make it first"
        )
    write_page(path, "longitude.explore", "explore.html.j2", [], scripts=SCRIPTS, colours=COLOURS, ahead=ahead())


def ahead() -> dict[str, Any]:
    """What the page holds of the classes: numbers that no short formula gives."""
    return {"encodings": drawn(), "configs": tables()}
