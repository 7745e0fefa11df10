"""The figures of a measurement: bits per byte by length and by position, and the grid of lengths and depths."""

from dataclasses import dataclass
from typing import Any

import altair as alt

from longitude.measure import retrieval
from longitude.measure.rows import Row
from longitude.measure.run import Results

# Okabe and Ito's colours, distinct for colour-blind readers.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#b85a92", "#c98a00", "#46a3da", "#6b6b6b"]
FIRST = 16
"""Positions below are not drawn: with so little context every model is bad."""


@dataclass(frozen=True)
class Figure:
    """name: in the page. title, caption: plain text. chart: of Altair."""

    name: str
    title: str
    caption: str
    chart: Any


def figures(results: Results) -> list[Figure]:
    """All figures that the run has numbers for."""
    rows = [row for row in results.rows if row.value is not None]
    grids = dict.fromkeys(row.task for row in rows if retrieval.depth_of(row) is not None)
    made = [_by_length(results, rows), _by_position(results, rows), *(_grid(results, rows, task) for task in grids)]
    return [figure for figure in made if figure is not None]


def _by_length(results: Results, rows: list[Row]) -> Figure | None:
    method = next((m for m in ("non-overlapping", "sliding") if any(row.method == m for row in rows)), None)
    if method is None:
        return None
    points = [
        {"model": row.label, "length": row.length, "value": row.value, "low": row.low or row.value, "high": row.high or row.value}
        for row in rows
        if row.method == method
    ]  # fmt: skip
    lengths = sorted({point["length"] for point in points})
    x = alt.X(
        "length:Q", title="window length, tokens", scale=alt.Scale(type="log", base=2), axis=alt.Axis(values=lengths)
    )
    return Figure(
        "by-length",
        "Loss by window length",
        f"Bits per byte, {method} windows, lower is better; bands are 95 % intervals over documents.",
        _lines(results, points, x),
    )


def _by_position(results: Results, rows: list[Row]) -> Figure | None:
    rows = [row for row in rows if row.method == "per-position" and (row.position_from or 0) >= FIRST]
    points = [
        {
            "model": row.label,
            "position": ((row.position_from or 0) * (row.position_to or 1)) ** 0.5,
            "from": row.position_from,
            "to": row.position_to,
            "value": row.value,
            "low": row.low or row.value,
            "high": row.high or row.value,
        }
        for row in rows
    ]
    if not points:
        return None
    x = alt.X("position:Q", title="position in the window, tokens", scale=alt.Scale(type="log", base=2))
    return Figure(
        "by-position",
        "Loss by position",
        "Bits per byte of the targets at each position of the longest window, from position 16 on.",
        _lines(results, points, x),
    )


def _lines(results: Results, points: list[dict[str, Any]], x: alt.X) -> Any:
    colour = alt.Color(
        "model:N",
        sort=results.labels,
        scale=alt.Scale(domain=results.labels, range=[COLOURS[i % len(COLOURS)] for i in range(len(results.labels))]),
        legend=alt.Legend(title=None, orient="top", labelLimit=400, symbolOpacity=1),
    )
    base = alt.Chart(alt.Data(values=points))
    y = alt.Y("value:Q", title="bits per byte", scale=alt.Scale(zero=False))
    names = ["model:N", *(f"{name}:Q" for name in points[0] if name not in ("model", "position"))]
    layers = [
        base.mark_area(opacity=0.15).encode(x, alt.Y("low:Q", title="bits per byte"), alt.Y2("high:Q"), colour),
        base.mark_line().encode(x, y, colour),
        base.mark_point(filled=True, size=45).encode(x, y, colour, tooltip=names),
    ]
    return alt.layer(*layers).properties(height=340)


def _grid(results: Results, rows: list[Row], task: str) -> Figure:
    """A panel per model; a square per length and depth."""
    panels = []
    for label in results.labels:
        own = [row for row in rows if row.task == task and row.label == label and retrieval.depth_of(row) is not None]
        if not own:
            continue
        grid = retrieval.heat_map(own)
        points = [
            {"length": int(length), "depth": float(depth), "score": None if value != value else float(value)}
            for length in grid.columns
            for depth, value in zip(grid.index, grid[length].astype(float), strict=True)
        ]
        base = alt.Chart(alt.Data(values=points), title=label).encode(
            alt.X("length:O", title="length, tokens", axis=alt.Axis(labelAngle=0)), alt.Y("depth:O", title="depth")
        )
        score = alt.Color("score:Q", scale=alt.Scale(domain=[0, 1], scheme="viridis"), legend=alt.Legend(format="%"))
        dark = alt.condition("datum.score < 0.6", alt.value("white"), alt.value("black"))
        tooltip = ["length:O", "depth:O", alt.Tooltip("score:Q", format=".0%")]
        square = base.mark_rect().encode(score, tooltip=tooltip)
        words = base.mark_text().encode(text=alt.Text("score:Q", format=".0%"), color=dark)
        panels.append((square + words).properties(width=alt.Step(64), height=alt.Step(34)))
    chosen = retrieval.TASKS[task]
    caption = (
        f"{chosen.metric.capitalize()} by length and by where the needle stands, 0 first and 1 last: {chosen.summary}."
    )
    return Figure(f"grid-{task}", f"Retrieval: {task}", caption, alt.concat(*panels, columns=2))
