"""A text whose pieces are colored by a number, in a panel for each model: where in a text a model's loss is high."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from longitude.report.figure import GREY, INK, PAPER, RED, Figure, themed

COLUMNS, WIDE = 32, 64
"""Letters or cells per row, with three panels or more and with fewer: powers of two, so that most training lengths end a row."""
LETTER, LINE = (6, 10), 13
"""Width and size of a letter and height of a row, in pixels."""
CELL = 6
"""Height of a row of cells without letters, in pixels."""
MOST = 8192
"""Letters or cells of a picture at most: an SVG of half a megabyte. Longer texts have several pieces in a cell and no letters."""
ROWS = 64
"""Rows of a panel up to which it has letters: a taller one is not seen at a glance."""
SMOOTH = {"byte": 33, "token": 9}
"""Pieces that a color averages over, about a row: the loss of single bytes jumps between 0 and 10 bits."""
LIGHT = 0.7  # share of the scale from which on letters in the color of the page stand out more than dark ones
STEP = 0.25  # colors differ by a quarter of a bit: neighbours of one color are one rectangle
MONO = "DejaVu Sans Mono, Menlo, Courier New, monospace"  # letters 0.6 of their size wide
SIGNS = str.maketrans({"\n": "↵", "\r": "↵", "\t": "→"})


class Panel(NamedTuple):
    """A text under a model.

    Attributes:
        pieces: The text of each byte or token [n].
        values: A number of each [n], in bits.
        mark: How many of them are within the training length.
        label: The label by which a reader of a study selects the panel.
    """

    pieces: Sequence[str]
    values: np.ndarray
    mark: int
    label: str

    @property
    def means(self) -> tuple[float, float | None]:
        """Mean within the training length, and mean after it; the mean of all and None if there is nothing after it."""
        if self.mark >= len(self.values):
            return float(self.values.mean()), None
        return float(self.values[: self.mark].mean()), float(self.values[self.mark :].mean())

    @property
    def summary(self) -> str:
        """The means in words, as in "2.61 bits before, 4.37 after"."""
        before, after = self.means
        return f"{before:.2f} bits" if after is None else f"{before:.2f} bits before, {after:.2f} after"


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A text colored by a number of each piece.

    Attributes:
        caption: Which text it is.
        unit: Unit of a piece, "byte" or "token".
        panels: Name of a model -> the text under it.
    """

    caption: str
    unit: str
    panels: Mapping[str, Panel]

    @property
    def columns(self) -> int:
        """Letters, or cells, of a row."""
        return COLUMNS if len(self.panels) > 2 else WIDE

    @property
    def lettered(self) -> bool:
        """Whether the text can be read; a long one has cells of several pieces."""
        letters = [sum(map(len, panel.pieces)) for panel in self.panels.values()]
        return max(letters) <= self.columns * ROWS and sum(letters) <= MOST

    @property
    def share(self) -> int:
        """Pieces per cell, if there are no letters."""
        longest = max(len(panel.pieces) for panel in self.panels.values())
        return math.ceil(longest / min(self.columns * ROWS, MOST // len(self.panels)))

    @property
    def words(self) -> str:
        """The caption, and the meaning of colors, cells, line and numbers."""
        cell = "" if self.lettered else f" A cell is {self.share} {self.unit}{'s' * (self.share > 1)}."
        mean = f"mean bits per {self.unit}"
        ends = any(panel.means[1] is not None for panel in self.panels.values())
        line = f"The line marks the training length. Numbers: {mean} before and after it."
        whole = any(panel.means[1] is None for panel in self.panels.values())
        line += " A model without a line was trained at this length or a longer one." * whole
        numbers = line if ends else f"Numbers: {mean}."
        scale = f"on one scale, which starts at the mean loss{' before the line' * ends}"
        colors = f"Colors: the mean over {SMOOTH[self.unit]} {self.unit}s, {scale}."
        return f"{self.caption} More red means higher loss.{cell} {numbers} {colors}"

    @property
    def title(self) -> str:
        """Title with the lowest and the highest mean loss beyond the training length."""
        means = {name: panel.means for name, panel in self.panels.items()}
        after = {name: bits for name, (_, bits) in means.items() if bits is not None and math.isfinite(bits)}
        marks = {self.panels[name].mark for name in after}
        if len(marks) != 1:
            return "One text, colored by the loss of each model"
        low, high = (choose(after, key=lambda name: after[name]) for choose in (min, max))
        start = f"Loss on one text after {self.unit} {marks.pop()}"
        if low == high:
            return f"{start}: {after[low]:.2f} bits for {low}, {means[low][0]:.2f} before"
        return f"{start}: {after[low]:.2f} bits for {low}, {after[high]:.2f} for {high}"

    def smoothed(self, panel: Panel) -> np.ndarray:
        """The values to color: a centered moving mean, over fewer values at the ends."""
        return np.asarray(pd.Series(panel.values).rolling(SMOOTH[self.unit], center=True, min_periods=1).mean())

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the color scale, in half bits: the mean within the training length, and the 95th percentile."""
        begins = np.array([panel.means[0] for panel in self.panels.values()])
        values = np.concatenate([*map(self.smoothed, self.panels.values())])
        begins, values = (numbers[np.isfinite(numbers)] for numbers in (begins, values))  # a model may be broken
        low = math.floor(2 * begins.mean()) / 2 if len(begins) else 0.0
        return low, max(low + 1, math.ceil(2 * np.percentile(values, 95)) / 2 if len(values) else 0.0)

    def rows(self, panel: Panel) -> Iterator["Row"]:
        """The rows of a panel, from top to bottom."""
        smooth = self.smoothed(panel)
        if self.lettered:
            letters = [(letter, i) for i, piece in enumerate(panel.pieces) for letter in piece]
        else:
            letters = [(" ", i) for i in range(0, len(panel.pieces), self.share)]
        for start in range(0, len(letters), self.columns):
            row = letters[start : start + self.columns]
            yield Row("".join(letter for letter, _ in row), [i for _, i in row], smooth[[i for _, i in row]])


class Row(NamedTuple):
    """Letters of a row, the index of the piece of each, and the value that colors it."""

    text: str
    pieces: list[int]
    values: np.ndarray


def figure(passage: Passage) -> Figure:
    """The passage as a figure of a page."""
    return Figure(
        name="one-text",
        title=passage.title,
        caption=passage.words,
        alt=alternative(passage),
        chart=themed(chart(passage)).properties(usermeta={"panel": passage.columns * LETTER[0] + 24}),
        resizes=False,
    )


def alternative(passage: Passage) -> str:
    """Alternative text: the caption, and the means of each panel."""
    summaries = "; ".join(f"{name}: {panel.summary}" for name, panel in passage.panels.items())
    return f"A text colored by loss: {passage.title}. {passage.words} {summaries}."


# ---- the chart -------------------------------------------------------------------------------------------------------
def chart(passage: Passage) -> Any:
    """The panels side by side, in the size of their letters."""
    low, high = passage.ends
    ends: dict[str, Any] = {"gradientLength": 160, "values": [low, high], "format": ".3~g"}
    legend = alt.Legend(title=f"bits per {passage.unit}", orient="top", **ends)
    scale = alt.Scale(domain=[low, high], range=[PAPER, RED], clamp=True, interpolate="lab")
    color = alt.Color("v:Q", scale=scale, legend=legend)
    rows = {name: [*passage.rows(panel)] for name, panel in passage.panels.items()}
    tallest = max(map(len, rows.values()))
    panels = [_panel(passage, name, rows[name], tallest, color, low + LIGHT * (high - low)) for name in passage.panels]
    return alt.concat(*panels, columns=min(3, len(panels)), spacing=8)


def _panel(passage: Passage, name: str, rows: Sequence[Row], tallest: int, color: alt.Color, light: float) -> Any:
    """light: numbers above it have letters in the color of the page."""
    panel, height = passage.panels[name], LINE if passage.lettered else CELL
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, passage.columns], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[tallest, 0], nice=False))
    base = _flat([cell for place, row in enumerate(rows) for cell in _cells(row, place)], "x", "to", "y", "v")
    base = base.transform_calculate(below="datum.y + 1")
    layers = [base.mark_rect(aria=False, stroke=None).encode(x, y, x2="to:Q", y2="below:Q", color=color)]
    if passage.lettered:
        runs = [run for place, row in enumerate(rows) for run in _runs(row, place, light)]
        text = _flat(runs, "x", "y", "t", "dark").transform_calculate(middle="datum.y + 0.5")
        marks = {"align": "left", "baseline": "middle", "font": MONO, "fontSize": LETTER[1], "aria": False}
        ink = alt.condition("datum.dark", alt.value(PAPER), alt.value(INK))
        layers.append(text.mark_text(**marks).encode(x, alt.Y("middle:Q", axis=None), text="t:N", color=ink))
    place = place_of(passage, panel)
    if place is not None:
        layers += _rule(panel, passage.columns, *place, x, y)
    title = alt.TitleParams(name, subtitle=panel.summary, subtitleColor=GREY, anchor="start", offset=8)
    sizes: dict[str, Any] = {"width": passage.columns * LETTER[0], "height": tallest * height}
    return alt.layer(*layers, title=title).properties(**sizes, description=panel.label)


def _flat(records: Sequence[Mapping[str, Any]], *keys: str) -> Any:
    """A chart whose data are the columns of these records, which take less space."""
    columns = {key: [record[key] for record in records] for key in keys}
    return alt.Chart(alt.InlineData(values=[columns])).transform_flatten([*keys])


def _cells(row: Row, place: int) -> Iterator[dict[str, Any]]:
    """Neighbours of one color as one cell."""
    colors = np.round(row.values / STEP) * STEP
    edges = [0, *(i for i in range(1, len(colors)) if colors[i] != colors[i - 1]), len(colors)]
    for start, stop in pairwise(edges):
        if np.isfinite(colors[start]):
            yield {"x": start, "to": stop, "y": place, "v": float(colors[start])}


def _runs(row: Row, place: int, light: float) -> Iterator[dict[str, Any]]:
    """Letters without a gap that have one ink."""
    blanks = [letter.isspace() and letter not in "\n\r\t" for letter in row.text]
    inks = [(blank, bool(value > light)) for blank, value in zip(blanks, row.values, strict=True)]
    at = 0
    for (blank, dark), run in groupby(inks):
        length = len(list(run))
        if not blank:
            yield {"x": at, "y": place, "t": row.text[at : at + length].translate(SIGNS), "dark": dark}
        at += length


def place_of(passage: Passage, panel: Panel) -> tuple[int, int] | None:
    """(row, column) of the first piece after the training length; None if all are within."""
    if panel.mark >= len(panel.pieces):
        return None
    before = sum(map(len, panel.pieces[: panel.mark])) if passage.lettered else math.ceil(panel.mark / passage.share)
    return divmod(before, passage.columns)


def _rule(panel: Panel, columns: int, row: int, column: int, x: alt.X, y: alt.Y) -> list[Any]:
    """The line at the end of the training length, with the length at its left."""
    corners = [(0, row + 1), (column, row + 1), (column, row), (columns, row)] if column else [(0, row), (columns, row)]
    points = [{"i": i, "x": x_, "y": y_} for i, (x_, y_) in enumerate(corners)]
    line = alt.Chart(alt.InlineData(values=points)).mark_line(color=INK, strokeWidth=2, aria=False)
    number = alt.Chart(alt.InlineData(values=[points[0] | {"words": str(panel.mark)}]))
    number = number.mark_text(align="right", dx=-3, color=INK, fontSize=10, fontWeight=600)
    return [line.encode(x, y, order="i:O"), number.encode(x, y, text="words:N")]
