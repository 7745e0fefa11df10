"""The heat map of exact answers by length and distance."""

from collections.abc import Iterator
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from longitude.report.figure import PAPER, Figure, themed
from longitude.report.wording import papers
from longitude.study.analysis import Analysis
from longitude.study.pictures import PICTURES, lines
from longitude.study.results import Run

WRITTEN = 8
"""Columns up to which the numbers are written into the squares."""


@PICTURES.register("by-distance")
def by_distance(analysis: Analysis) -> Iterator[Figure]:
    """Heat map of exact answers, for tasks with distances."""
    run, cells = analysis.run, _cells(analysis.run)
    if len(cells):
        wide = cells.pivot(index=["label", "length"], columns="from", values="value")
        wide = wide.map(lambda value: "" if pd.isna(value) else f"{value:.0%}")
        yield Figure(
            name="by-distance",
            title=_finding(run, cells),
            caption="The share of exact answers, all seeds together, by the length of an example and by how far what it asks for "
            "lies before the question.",
            alt="Heat maps of the share of exact answers by length and distance, one for each encoding.",
            chart=_maps(run, cells),
            resizes=False,
            table=wide.rename(columns=_place).reset_index(),
        )


def _cells(run: Run) -> Any:
    """Squares of the rows with a distance, pooled over seeds and from each power of two to the next."""
    rows = [row for row in run.rows if row.value is not None and row.distance is not None]
    columns = pd.Index(("label", "length", "from", "count", "value"))
    frame: Any = pd.DataFrame([(r.label, r.length, r.distance, r.count or 1, r.value) for r in rows], columns=columns)
    frame["from"] = 2 ** np.floor(np.log2(frame["from"].clip(lower=1).astype(float))).astype(int)
    frame["value"] *= frame["count"]
    cells = frame.groupby(["label", "length", "from"], as_index=False).sum()
    cells["value"] = (cells["value"] / cells["count"]).round(4)
    cells["to"], cells["place"] = 2 * cells["from"], cells["from"].map(_place)
    cells["middle"] = np.sqrt(cells["from"] * cells["to"])
    return cells


def _place(first: int) -> str:
    """The distances of a column."""
    return "1" if first == 1 else f"{first} to {2 * first - 1}"


def _finding(run: Run, cells: Any) -> str:
    """The best and the worst label at the longest length: "Exact answers at 1,024 symbols: ALiBi 93%, RoPE 12%"."""
    longest = cells[cells["length"] == cells["length"].max()]
    totals = longest.assign(right=longest["value"] * longest["count"]).groupby("label")[["right", "count"]].sum()
    shares = (totals["right"] / totals["count"]).sort_values(ascending=False)
    names, ends = papers(run.labels), dict.fromkeys((shares.index[0], shares.index[-1]))
    at = f"Exact answers at {longest['length'].iloc[0]:,} {run.task.unit}"
    return f"{at}: {', '.join(f'{names[label]} {shares[label]:.0%}' for label in ends)}"


def _maps(run: Run, cells: Any) -> Any:
    """A panel for each label; lighter is better."""
    left, right = int(cells["from"].min()), int(cells["to"].max())
    ticks = [2**k for k in range(64) if left <= 2**k <= right]
    axis = alt.Axis(format="d", values=ticks, grid=False, labelFlush=False, **lines.SPARSE)
    scale = alt.Scale(domain=[left, right], nice=False, type="log", base=2)
    x = alt.X("from:Q", title="distance", scale=scale, axis=axis)
    legend = alt.Legend(title="exact answers, higher is better", format=".0%", orient="top", tickCount=4)
    color = alt.Color("value:Q", legend=legend, scale=alt.Scale(domain=[0, 1], scheme="viridis"))
    tooltip = [
        alt.Tooltip("label:N", title="encoding"),
        alt.Tooltip("length:O", title=f"length, {run.task.unit}"),
        alt.Tooltip("place:N", title="distance"),
        alt.Tooltip("value:Q", title="exact answers", format=".1%"),
        alt.Tooltip("count:Q", title="measured", format=",d"),
    ]
    panels, names = [], papers(run.labels)
    for label in filter(set(cells["label"]).__contains__, run.labels):
        squares = lines.of_labels(cells[cells["label"] == label].to_dict("records"))
        squares = squares.encode(alt.Y("length:O", title=f"length, {run.task.unit}"))
        marks = squares.mark_rect(stroke=PAPER, strokeWidth=1, aria=False)
        layers = [marks.encode(x, color, x2="to:Q", tooltip=tooltip)]
        if cells["from"].nunique() <= WRITTEN:
            ink = alt.condition("datum.value < 0.5", alt.value("#fff"), alt.value("#000"))
            number = alt.Text("value:Q", format=".0%")
            layers.append(squares.mark_text(aria=False).encode(alt.X("middle:Q"), text=number, color=ink))
        panel = alt.layer(*layers, title=names[label])
        panels.append(panel.properties(width=320, height=alt.Step(30), description=label))
    chart = alt.concat(*panels, columns=min(2, len(panels))).add_params(alt.param(name="picked", value=[]))
    return themed(chart)
