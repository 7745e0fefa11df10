"""The figures of a study: functions registered in PICTURES, imported when the first figure is drawn."""

from longitude.registry import Registry
from longitude.report.figure import Figure
from longitude.study.analysis import Analysis

PICTURES = Registry("picture", "longitude.study.pictures.PICTURES", ("longitude.study.pictures",))
MAIN = "by-length"
ORDER = (MAIN, "by-position", "one-text")
"""Order of figures in a page; others follow."""


def figures(analysis: Analysis) -> list[Figure]:
    """All figures that a run has numbers for, in their order."""
    made = [figure for draw in PICTURES.values() for figure in draw(analysis)]
    return sorted(made, key=lambda figure: ORDER.index(figure.name) if figure.name in ORDER else len(ORDER))
