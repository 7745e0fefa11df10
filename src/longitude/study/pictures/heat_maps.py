"""The heat maps of answers: right symbols by length and place, exact answers by length and distance."""

from collections.abc import Callable, Iterator
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from longitude.measure.rows import Row
from longitude.report.figure import PAPER, Figure, themed
from longitude.report.wording import capital, papers
from longitude.study.analysis import Analysis
from longitude.study.pictures import PICTURES, lines
from longitude.study.results import Run

COLUMNS = 40
"""Number of places up to which each has a column; of more, places between two powers of two share a column."""
WRITTEN = 8
"""Columns up to which the numbers are written into the squares."""


@PICTURES.register("by-length-and-position")
def by_length_and_position(analysis: Analysis) -> Iterator[Figure]:
    """Heat map of right symbols by place in the answer; for losses, `by_position` draws the longest window."""
    run = analysis.run
    if run.task.kind == "losses":
        return

    def place_of(row: Row) -> tuple[int, int] | None:  # symbols of an answer count from 1
        return None if row.position_from is None else (row.position_from + 1, (row.position_to or 0) + 1)

    if len(cells := _cells(run, place_of)):
        gap = " The gap is at the training length." if _edge(run, cells) else ""
        yield Figure(
            name="by-length-and-position",
            title=_finding(run, cells, "right symbols"),
            caption="The share of symbols that are right, all seeds together, by the length of an example and by the place of "
            f"the symbol in the answer. After a wrong symbol the model continues with its own.{gap}",
            alt="Heat maps of the share of right symbols by length and place in the answer, one for each encoding.",
            chart=_maps(run, cells, "place in the answer", "right symbols"),
            resizes=False,
            table=_table(cells),
        )


@PICTURES.register("by-distance")
def by_distance(analysis: Analysis) -> Iterator[Figure]:
    """Heat map of exact answers, for tasks with distances."""
    run = analysis.run
    cells = _cells(run, lambda row: None if row.distance is None else (row.distance, row.distance + 1))
    if len(cells):
        yield Figure(
            name="by-distance",
            title=_finding(run, cells, "exact answers"),
            caption="The share of exact answers, all seeds together, by the length of an example and by how far what it asks for "
            "lies before the question.",
            alt="Heat maps of the share of exact answers by length and distance, one for each encoding.",
            chart=_maps(run, cells, "distance", "exact answers", edge=False),
            resizes=False,
            table=_table(cells),
        )


def _cells(run: Run, place_of: Callable[[Row], tuple[int, int] | None]) -> Any:
    """Squares of the rows with a place (first, one after the last); seeds and places in the same square are pooled."""
    rows = [(row, place) for row in run.rows if row.value is not None and (place := place_of(row)) is not None]
    cells = [(row.label, row.length, *place, row.count or 1, row.value) for row, place in rows]
    frame: Any = pd.DataFrame(cells, columns=pd.Index(("label", "length", "from", "to", "count", "value")))
    octaves = frame["to"].max() - frame["from"].min() > COLUMNS or bool((frame["to"] - frame["from"] > 1).any())
    if octaves:
        frame["from"] = 2 ** np.floor(np.log2(frame["from"].clip(lower=1))).astype(int)
    frame["value"] *= frame["count"]
    groups: Any = frame.groupby(["label", "length", "from"], as_index=False)
    cells: Any = groups.agg({"to": "max", "count": "sum", "value": "sum"})
    cells["value"] = (cells["value"] / cells["count"]).round(4)
    if octaves:  # a row of the least of several distances
        cells.loc[cells["to"] == cells["from"] + 1, "to"] = 2 * cells["from"]
    start, stop = cells["from"], cells["to"]
    cells["place"] = [str(a) if a + 1 == b else f"{a} to {b - 1}" for a, b in zip(start, stop, strict=True)]
    cells["left"], cells["right"] = (start, stop) if octaves else (start - 0.5, stop - 0.5)
    cells["middle"] = np.sqrt(cells["left"] * cells["right"]) if octaves else start
    return cells


def _finding(run: Run, cells: Any, words: str) -> str:
    """The best and the worst label at the longest length: "Right symbols at 1,024 bytes: ALiBi 93%, RoPE 12%"."""
    longest = cells[cells["length"] == cells["length"].max()]
    totals = longest.assign(right=longest["value"] * longest["count"]).groupby("label")[["right", "count"]].sum()
    shares = (totals["right"] / totals["count"]).sort_values(ascending=False)
    names, ends = papers(run.labels), dict.fromkeys((shares.index[0], shares.index[-1]))
    at = f"{capital(words)} at {longest['length'].iloc[0]:,} {run.task.unit}"
    return f"{at}: {', '.join(f'{names[label]} {shares[label]:.0%}' for label in ends)}"


def _edge(run: Run, cells: Any) -> float | None:
    """Last place of the training length; None unless places before and after it are drawn."""
    trained = cells["length"] <= run.train_length
    edge = cells["right"][trained].max()
    return float(edge) if trained.any() and (cells["right"] > edge).any() else None


def _maps(run: Run, cells: Any, places: str, words: str, edge: bool = True) -> Any:
    """A panel for each label; lighter is better."""
    left, right = cells["left"].min(), cells["right"].max()
    octaves = float(left).is_integer()
    ticks = [2**k for k in range(64) if left <= 2**k <= right] if octaves else alt.Undefined
    scale: dict[str, Any] = {"type": "log", "base": 2} if octaves else {"zero": False}
    axis = alt.Axis(format="d", values=ticks, tickMinStep=1, grid=False, labelFlush=False, **lines.SPARSE)
    x = alt.X("left:Q", title=places, scale=alt.Scale(domain=[left, right], nice=False, **scale), axis=axis)
    legend = alt.Legend(title=f"{words}, higher is better", format=".0%", orient="top", tickCount=4)
    color = alt.Color("value:Q", legend=legend, scale=alt.Scale(domain=[0, 1], scheme="viridis"))
    tooltip = [
        alt.Tooltip("label:N", title="encoding"),
        alt.Tooltip("length:O", title=f"length, {run.task.unit}"),
        alt.Tooltip("place:N", title=places),
        alt.Tooltip("value:Q", title=words, format=".1%"),
        alt.Tooltip("count:Q", title="measured", format=",d"),
    ]
    panels, names = [], papers(run.labels)
    for label in filter(set(cells["label"]).__contains__, run.labels):
        squares = lines.of_labels(cells[cells["label"] == label].to_dict("records"))
        squares = squares.encode(alt.Y("length:O", title=f"length, {run.task.unit}"))
        marks = squares.mark_rect(stroke=PAPER, strokeWidth=1, aria=False)
        layers = [marks.encode(x, color, x2="right:Q", tooltip=tooltip)]
        if cells["from"].nunique() <= WRITTEN:
            ink = alt.condition("datum.value < 0.5", alt.value("#fff"), alt.value("#000"))
            number = alt.Text("value:Q", format=".0%")
            layers.append(squares.mark_text(aria=False).encode(alt.X("middle:Q"), text=number, color=ink))
        if edge and (at := _edge(run, cells)):
            rule = alt.Chart(alt.InlineData(values=[{"left": at}])).mark_rule(color=PAPER, strokeWidth=4, aria=False)
            layers.append(rule.encode(x))
        panel = alt.layer(*layers, title=names[label])
        panels.append(panel.properties(width=320, height=alt.Step(30), description=label))
    chart = alt.concat(*panels, columns=min(2, len(panels))).add_params(alt.param(name="picked", value=[]))
    return themed(chart)


def _table(cells: Any) -> pd.DataFrame:
    """A line for each label and length."""
    places = cells.sort_values("to").drop_duplicates("from", keep="last").sort_values("from")
    wide = cells.pivot(index=["label", "length"], columns="from", values="value").reindex(columns=places["from"])
    wide = wide.map(lambda value: "" if pd.isna(value) else f"{value:.0%}")
    return wide.rename(columns=dict(zip(places["from"], places["place"], strict=True))).reset_index()
