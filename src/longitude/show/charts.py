"""Drawings as Altair charts: SVG, PNG and HTML files."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import altair as alt

from longitude.report.figure import EDGE, GREY, WIDTH, Figure, colour_of, dash_of, described, save, themed
from longitude.runs.files import atomic
from longitude.show.drawing import Drawing, Grid, Lines, number, ticks, valued

HEIGHT = 300


def write(out: Path, parts: Sequence[tuple[str, Iterable[tuple[str, str]]]], drawings: Sequence[Drawing]) -> None:
    """Write all drawings to a file, by its suffix: SVG or PNG, stacked; HTML includes the text.

    Args:
        out: The file.
        parts: (title, (head, text) pairs) of each subject.
        drawings: The drawings, at least one.
    """
    if out.suffix == ".html":
        from longitude.report.page import write_page

        title = ", ".join(name for name, _ in parts)
        figures = [figure(drawing) for drawing in drawings]
        write_page(out, "longitude.show", "show.html.j2", figures, title=title, parts=[(n, [*w]) for n, w in parts])
        return
    charts = [_chart(drawing, captioned=True).properties(width=WIDTH) for drawing in drawings]
    whole = alt.vconcat(*charts, spacing=40).resolve_scale(color="independent", strokeDash="independent")
    save(_themed(whole.properties(padding=10)), out)
    if out.suffix == ".svg":
        words = "; ".join(drawing.title for drawing in drawings), " ".join(map(alternative, drawings))
        picture = described(out.read_text(encoding="utf-8"), *words)
        with atomic(out) as unfinished:
            unfinished.write_text(picture, encoding="utf-8")


def figure(drawing: Drawing) -> Figure:
    """The drawing as a figure of a page."""
    table = drawing.frame
    if isinstance(drawing, Lines) and len(drawing.lines) > 1:
        table = table.pivot_table(index="x", columns="line", values="y", sort=False).sort_index().reset_index()
    numbers = table.map(lambda cell: "" if cell != cell else number(cell) if isinstance(cell, int | float) else cell)
    return Figure(
        name=drawing.name,
        title=drawing.title,
        caption=drawing.caption,
        alt=alternative(drawing),
        chart=_themed(_chart(drawing)),
        table=numbers.rename(columns={"x": drawing.x, "y": drawing.y, "row": drawing.y}),
    )


def alternative(drawing: Drawing) -> str:
    """Alternative text of a drawing: its title and caption, and the first and last point of each curve."""
    if isinstance(drawing, Grid):
        return f"Heat map: {drawing.title}. {drawing.caption}"
    ends = []
    for name, own in drawing.frame.groupby("line", sort=False):
        first, last = own.iloc[0], own.iloc[-1]
        ends.append(
            f"{name} from {number(first['y'])} at {number(first['x'])} to {number(last['y'])} at {number(last['x'])}"
        )
    return f"Line chart: {drawing.title}. {drawing.caption} {'; '.join(ends)}."


def _themed(chart: Any) -> Any:
    return themed(chart, axisX=alt.AxisConfig(domain=True, domainColor=EDGE), axisY=alt.AxisConfig(titlePadding=14))


def _chart(drawing: Drawing, captioned: bool = False) -> Any:
    chart = _lines(drawing) if isinstance(drawing, Lines) else _grid(drawing)
    if not captioned:
        return chart
    words: Any = textwrap.wrap(drawing.caption, 115)  # readers' letters are wider than those it is laid out with
    return chart.properties(
        title=alt.TitleParams(
            drawing.title, subtitle=words, anchor="start", frame="group", subtitleColor=GREY, offset=12
        )
    )


# ---- curves ----------------------------------------------------------------------------------------------------------
def _lines(drawing: Lines) -> Any:
    names, frame = [*drawing.lines], cast(Any, drawing.frame)
    colours, dashes = ([style(i) for i in range(len(names))] for style in (colour_of, dash_of))
    columns = max(1, min(4, 110 // max(map(len, names))))
    legend = (
        None
        if len(names) == 1
        else alt.Legend(title=None, orient="bottom", columns=columns, symbolLimit=0, labelLimit=700)
    )
    low, high = float(frame["x"].min()), float(frame["x"].max())
    dotted = len(frame) <= 16
    dots: dict[str, Any] = {"point": alt.OverlayMarkDef(size=30)} if dotted else {}
    room: dict[str, Any] = {"padding": 6} if dotted else {}  # pixels, for whole dots at the edges
    x = alt.X(
        "x:Q",
        title=f"{drawing.x} (log scale)" if drawing.log_x else drawing.x,
        scale=alt.Scale(type="symlog" if drawing.log_x else "linear", domain=[low, high], nice=False, **room),
        axis=alt.Axis(
            grid=False, labelOverlap="greedy", values=ticks(low, high, "offsets" if drawing.log_x else "linear")
        ),
    )
    bottom: dict[str, Any] = {} if drawing.floor is None else {"domainMin": drawing.floor}
    at: dict[str, Any] = {"values": ticks(frame["y"].min(), frame["y"].max(), "log")} if drawing.log_y else {}
    y = alt.Y(
        "y:Q",
        title=drawing.y,
        scale=alt.Scale(type="log" if drawing.log_y else "linear", zero=False, nice=False, **bottom, **room),
        axis=alt.Axis(tickCount=6, **at),
    )
    base = alt.Chart(alt.InlineData(values=_short(frame, "y").to_dict("records")))
    line = base.mark_line(strokeWidth=1.8, clip=True, **dots).encode(
        x,
        y,
        color=alt.Color("line:N", scale=alt.Scale(domain=names, range=colours), legend=legend, sort=None),
        strokeDash=alt.StrokeDash("line:N", scale=alt.Scale(domain=names, range=dashes), legend=legend, sort=None),
        tooltip=["line:N", "x:Q", alt.Tooltip("y:Q", format=".4g")],
    )
    marks = {words: at for words, at in drawing.marks.items() if low <= at <= high}
    levels = [_rule("y", words, at, y, x=alt.value(WIDTH)) for words, at in drawing.levels.items()]
    rules = [_rule("x", words, at, x, y=alt.value(8)) for words, at in marks.items()]
    return alt.layer(line, *(layer for pair in [*levels, *rules] for layer in pair)).properties(
        height=HEIGHT, title=drawing.title
    )


def _short(frame: Any, column: str) -> Any:
    """With five digits of its numbers, which a picture does not exceed."""
    return frame.assign(**{column: [float(f"{value:.5g}") for value in frame[column]]})


def _rule(axis: str, words: str, at: float, encoded: Any, **place: Any) -> tuple[Any, Any]:
    """A dashed line over the picture, and its words."""
    base = alt.Chart(alt.InlineData(values=[{axis: at, "words": valued(words, at)}]))
    shift: dict[str, Any] = {"dy": -6} if axis == "y" else {"dx": 4}
    return (
        base.mark_rule(strokeDash=[4, 4], color=GREY).encode(encoded),
        base.mark_text(align="right" if axis == "y" else "left", color=GREY, **shift).encode(
            encoded, text="words:N", **place
        ),
    )


# ---- grids -----------------------------------------------------------------------------------------------------------
def _grid(drawing: Grid) -> Any:
    rows, columns = list(drawing.rows), list(drawing.columns)
    last = columns[-1] - columns[-2] if len(columns) > 1 else 1
    overlapping = [*(each + 0.1 * last for each in columns[1:]), columns[-1] + last]  # without seams
    ends = dict(zip(columns, overlapping, strict=True))
    frame = _short(cast(Any, drawing.frame), "value").assign(to=lambda each: each["x"].map(ends))
    base = alt.Chart(alt.InlineData(values=frame.dropna().to_dict("records")))
    few = alt.Axis(grid=False, labelOverlap="greedy", ticks=False, tickMinStep=1)
    diverges = frame["value"].min() < 0 < frame["value"].max()
    least: dict[str, Any] = {} if drawing.floor is None else {"domainMin": drawing.floor, "clamp": True}
    middle: dict[str, Any] = {"domainMid": 0} if diverges else {}
    scale = alt.Scale(scheme="blueorange" if diverges else "viridis", **least, **middle)
    chart = base.mark_rect(aria=False).encode(
        alt.X("x:Q", title=drawing.x, scale=alt.Scale(nice=False, zero=False), axis=few),
        alt.X2("to:Q"),
        alt.Y("row:N", title=drawing.y, sort=rows, scale=alt.Scale(paddingInner=0, paddingOuter=0), axis=few),
        color=alt.Color(
            "value:Q", title=None, scale=scale, legend=alt.Legend(gradientLength=min(160, 14 * len(rows) + 40))
        ),
        tooltip=["row:N", "x:Q", alt.Tooltip("value:Q", format=".4g")],
    )
    return chart.properties(height=min(HEIGHT, max(90, 24 * len(rows))), title=drawing.title)
