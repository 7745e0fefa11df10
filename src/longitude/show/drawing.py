"""Drawings as data: numbers with their words, which a terminal, a file and a page draw each in its own way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Curves over one axis.

    Attributes:
        name: Of its file and its place in a page.
        title: What is drawn.
        caption: What it means, in a sentence or two.
        x: Title of the horizontal axis.
        y: Of the vertical one.
        lines: Name -> (x [n], y [n]); numbers that are not finite are left out.
        log_x: Whether the horizontal axis is logarithmic; 0 has a place on it.
        log_y: Likewise of the vertical axis, whose numbers are then above 0.
        marks: Words -> a place on the horizontal axis that a line marks.
        levels: Words -> a place on the vertical axis.
    """

    name: str
    title: str
    caption: str
    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)

    @property
    def frame(self) -> pd.DataFrame:
        """Columns line, x, y: what is drawn."""
        parts = [pd.DataFrame({"line": name, "x": x, "y": y}) for name, (x, y) in self.lines.items()]
        whole = pd.concat(parts, ignore_index=True)
        return whole[np.isfinite(whole["y"])].reset_index(drop=True)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Numbers of rows and columns, as shades.

    Attributes:
        values: [rows, columns]; what is not finite stays empty.
        rows: Names of the rows, from above.
        columns: Numbers of the columns, ascending.
    """

    name: str
    title: str
    caption: str
    x: str
    y: str
    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[float]

    @property
    def frame(self) -> pd.DataFrame:
        """Columns row, x, value."""
        rows, columns = np.meshgrid(np.arange(len(self.rows)), np.asarray(self.columns), indexing="ij")
        names = np.asarray(self.rows)[rows.ravel()]
        return pd.DataFrame({"row": names, "x": columns.ravel(), "value": np.asarray(self.values, float).ravel()})


Drawing = Lines | Grid
