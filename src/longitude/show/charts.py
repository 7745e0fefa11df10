"""Drawings as Altair charts: SVG, PNG and HTML files."""

from typing import Any

import altair as alt

from longitude.report.figure import EDGE, GREY, Figure, colour_of, dash_of, themed
from longitude.show.drawing import Drawing, Grid, Lines

HEIGHT = 320


def figure(drawing: Drawing, prefix: str = "") -> Figure:
    """The drawing as a figure of a page.

    Args:
        drawing: What to draw.
        prefix: Of its name, where several things are drawn side by side.
    """
    chart, kind = (_lines(drawing), "Line chart") if isinstance(drawing, Lines) else (_grid(drawing), "Heat map")
    return Figure(
        name=f"{prefix}{drawing.name}",
        title=drawing.title,
        caption=drawing.caption,
        alt=f"{kind}: {drawing.title}. {drawing.caption}",
        chart=chart,
        table=drawing.frame,
    )


def _lines(drawing: Lines) -> Any:
    names = [*drawing.lines]
    colours, dashes = ([style(i) for i in range(len(names))] for style in (colour_of, dash_of))
    legend = None if len(names) == 1 else alt.Legend(title=None, orient="bottom", columns=4, symbolLimit=0)
    x = alt.X(
        "x:Q",
        title=drawing.x,
        scale=alt.Scale(type="symlog" if drawing.log_x else "linear", nice=False),
        axis=alt.Axis(grid=False, labelOverlap="greedy", **({"values": _ticks(drawing)} if drawing.log_x else {})),
    )
    y = alt.Y(
        "y:Q",
        title=drawing.y,
        scale=alt.Scale(type="log" if drawing.log_y else "linear", zero=False, nice=False),
        axis=alt.Axis(tickCount=6),
    )
    base = alt.Chart(alt.InlineData(values=drawing.frame.to_dict("records")))
    line = base.mark_line(strokeWidth=1.8).encode(
        x,
        y,
        color=alt.Color("line:N", scale=alt.Scale(domain=names, range=colours), legend=legend, sort=None),
        strokeDash=alt.StrokeDash("line:N", scale=alt.Scale(domain=names, range=dashes), legend=legend, sort=None),
        tooltip=["line:N", "x:Q", alt.Tooltip("y:Q", format=".4g")],
    )
    layers: list[Any] = []
    for words, at in drawing.levels.items():
        rule = alt.Chart(alt.InlineData(values=[{"y": at, "words": words}]))
        layers.append(rule.mark_rule(strokeDash=[4, 4], color=GREY).encode(y="y:Q"))
        layers.append(rule.mark_text(align="left", dy=-6, color=GREY).encode(x=alt.value(6), y="y:Q", text="words:N"))
    for words, at in drawing.marks.items():
        rule = alt.Chart(alt.InlineData(values=[{"x": at, "words": words}]))
        layers.append(rule.mark_rule(strokeDash=[4, 4], color=GREY).encode(x="x:Q"))
        layers.append(rule.mark_text(align="left", dx=4, color=GREY).encode(x="x:Q", y=alt.value(8), text="words:N"))
    chart = alt.layer(line, *layers).properties(height=HEIGHT, title=drawing.title)
    return themed(chart, axisX=alt.AxisConfig(domain=True, domainColor=EDGE))


def _ticks(drawing: Lines) -> list[int]:
    longest = max(max(x) for x, _ in drawing.lines.values())
    return [0, *(4**k for k in range(12) if 4**k <= longest)]


def _grid(drawing: Grid) -> Any:
    rows, columns = list(drawing.rows), list(drawing.columns)
    step = columns[1] - columns[0] if len(columns) > 1 else 1
    frame = drawing.frame.assign(to=lambda each: each["x"] + step)
    base = alt.Chart(alt.InlineData(values=frame.dropna().to_dict("records")))
    few = alt.Axis(grid=False, labelOverlap="greedy", ticks=False)
    diverges = frame["value"].min() < 0 < frame["value"].max()
    colour = alt.Scale(scheme="blueorange" if diverges else "viridis", **({"domainMid": 0} if diverges else {}))
    chart = base.mark_rect().encode(
        alt.X("x:Q", title=drawing.x, scale=alt.Scale(nice=False, zero=False), axis=few),
        alt.X2("to:Q"),
        alt.Y("row:N", title=drawing.y, sort=rows, scale=alt.Scale(paddingInner=0, paddingOuter=0), axis=few),
        color=alt.Color("value:Q", title=None, scale=colour),
        tooltip=["row:N", "x:Q", alt.Tooltip("value:Q", format=".4g")],
    )
    return themed(chart.properties(height=min(HEIGHT, max(90, 24 * len(rows))), title=drawing.title))
