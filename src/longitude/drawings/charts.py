"""Drawings as Altair charts: SVG and PNG files."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import altair as alt

from longitude.drawings.drawing import Drawing, Grid, Lines, are_labels, ticks, valued
from longitude.report.figure import (
    COLORS,
    DASHES,
    EDGE,
    GREY,
    WIDTH,
    Figure,
    color_of,
    dashes_of,
    described,
    ordered,
    save,
    svg_of,
    themed,
)
from longitude.report.wording import brief
from longitude.runs.files import atomic

HEIGHT = 300
SUFFIXES = (".svg", ".png")


def require_place(out: Path, suffixes: Sequence[str] = SUFFIXES) -> None:
    """ValueError unless pictures can be written there."""
    if out.suffix not in suffixes:
        raise ValueError(f"{out}: expected a name that ends in {' or '.join(suffixes)}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.parent}; make it first")


def write(out: Path, drawings: Sequence[Drawing]) -> None:
    """Write all drawings, at least one, stacked to a file: SVG or PNG, by its suffix."""
    require_place(out)
    if out.suffix == ".png":
        save(_stacked(drawings), out)
    else:
        with atomic(out) as unfinished:
            unfinished.write_text(svg(drawings), encoding="utf-8")


def svg(drawings: Sequence[Drawing]) -> str:
    """The drawings, one below the other, with words that screen readers read."""
    texts = "; ".join(drawing.title for drawing in drawings), " ".join(map(alternative, drawings))
    return described(svg_of(_stacked(drawings)), *texts)


def _stacked(drawings: Sequence[Drawing]) -> Any:
    whole = alt.vconcat(*map(_captioned, drawings), spacing=40)
    whole = whole.resolve_scale(color="independent", strokeDash="independent")
    return _themed(whole.properties(padding=10))


def figure(drawing: Drawing) -> Figure:
    """The drawing as a figure of a page."""
    table = drawing.frame
    if isinstance(drawing, Lines) and len(drawing.lines) > 1:
        table = table.pivot_table(index="x", columns="line", values="y", sort=False).sort_index().reset_index()
    numbers = table.map(lambda cell: "" if cell != cell else brief(cell) if isinstance(cell, int | float) else cell)
    return Figure(
        name=drawing.name,
        title=drawing.title,
        caption=drawing.caption,
        alt=alternative(drawing),
        chart=_themed(_chart(drawing)),
        axes=("x",) if isinstance(drawing, Lines) and drawing.far else (),
        table=numbers.rename(columns={"x": drawing.x, "y": drawing.y, "row": drawing.y}),
    )


def alternative(drawing: Drawing) -> str:
    """Alternative text of a drawing: its title and caption, and the first and last point of each curve."""
    if isinstance(drawing, Grid):
        return f"Heat map: {drawing.title}. {drawing.caption}"
    ends = []
    for name, line in drawing.frame.groupby("line", sort=False):
        first, last = line.iloc[0], line.iloc[-1]
        start, end = (f"{brief(point['y'])} at {brief(point['x'])}" for point in (first, last))
        ends.append(f"{name} from {start} to {end}")
    return f"Line chart: {drawing.title}. {drawing.caption} {'; '.join(ends)}."


def _themed(chart: Any) -> Any:
    return themed(chart, axisX=alt.AxisConfig(domain=True, domainColor=EDGE), axisY=alt.AxisConfig(titlePadding=14))


def _chart(drawing: Drawing) -> Any:
    return _grid(drawing) if isinstance(drawing, Grid) else _lines(cast(Lines, drawing))


def _captioned(drawing: Drawing) -> Any:
    """The chart of a file, below its title and caption."""
    subtitle: Any = textwrap.wrap(drawing.caption, 115)  # readers' fonts may be wider than the font of the layout
    place: dict[str, Any] = {"anchor": "start", "frame": "group", "subtitleColor": GREY, "offset": 12}
    return _chart(drawing).properties(title=alt.TitleParams(drawing.title, subtitle=subtitle, **place), width=WIDTH)


# ---- curves ----------------------------------------------------------------------------------------------------------
def _lines(drawing: Lines) -> Any:
    names, frame = [*drawing.lines], cast(Any, drawing.frame)
    if are_labels(names):
        colors, dashes = [*map(color_of, names)], dashes_of(names)
    elif len(names) > 1 and all(name.startswith("head ") for name in names):
        colors, dashes = ordered(len(names)), [DASHES[0]] * len(names)
    else:
        colors = [COLORS[place % len(COLORS)] for place in range(len(names))]
        dashes = [DASHES[place // len(COLORS) % len(DASHES)] for place in range(len(names))]
    columns = max(1, min(4, 110 // max(map(len, names))))
    legend = alt.Legend(title=None, orient="bottom", columns=columns, symbolLimit=0, labelLimit=700)
    legend = None if len(names) == 1 else legend
    low, high = float(frame["x"].min()), float(frame["x"].max())
    dotted = len(frame) <= 16
    dots: dict[str, Any] = {"point": alt.OverlayMarkDef(size=30)} if dotted else {}
    room: dict[str, Any] = {"padding": 6} if dotted else {}  # pixels, for whole dots at the edges
    places = ticks(low, high, "offsets" if drawing.log_x else "linear")
    scale = alt.Scale(type="symlog" if drawing.log_x else "linear", domain=[low, high], nice=False, **room)
    axis = alt.Axis(grid=False, labelOverlap="greedy", values=places)
    x = alt.X("x:Q", title=drawing.x_title, scale=scale, axis=axis)
    bottom: dict[str, Any] = {} if drawing.floor is None else {"domainMin": drawing.floor}
    at: dict[str, Any] = {"values": ticks(frame["y"].min(), frame["y"].max(), "log")} if drawing.log_y else {}
    scale = alt.Scale(nice=False, **({"type": "log"} if drawing.log_y else {"zero": False}), **bottom, **room)
    y = alt.Y("y:Q", title=drawing.y, scale=scale, axis=alt.Axis(tickCount=6, **at))
    base = alt.Chart(alt.InlineData(values=_short(frame, "y").to_dict("records")))
    color = alt.Color("line:N", scale=alt.Scale(domain=names, range=colors), legend=legend, sort=None)
    dash = alt.StrokeDash("line:N", scale=alt.Scale(domain=names, range=dashes), legend=legend, sort=None)
    tooltip = ["line:N", "x:Q", alt.Tooltip("y:Q", format=".4g")]
    line = base.mark_line(strokeWidth=1.8, clip=True, **dots)
    line = line.encode(x, y, color=color, strokeDash=dash, tooltip=tooltip)
    marks = {label: at for label, at in drawing.marks.items() if low <= at <= high}
    levels = [_rule("y", label, at, y, x=alt.value(WIDTH)) for label, at in drawing.levels.items()]
    rules = [_rule("x", label, at, x, y=alt.value(8)) for label, at in marks.items()]
    return alt.layer(line, *(layer for pair in [*levels, *rules] for layer in pair)).properties(height=HEIGHT)


def _short(frame: Any, column: str) -> Any:
    """The table with a column rounded to five digits, which is enough for a picture."""
    return frame.assign(**{column: [float(f"{value:.5g}") for value in frame[column]]})


def _rule(axis: str, label: str, at: float, encoded: Any, **place: Any) -> tuple[Any, Any]:
    """A dashed line over the picture, and its words."""
    base = alt.Chart(alt.InlineData(values=[{axis: at, "words": valued(label, at)}]))
    shift: dict[str, Any] = {"dy": -6} if axis == "y" else {"dx": 4}
    text = base.mark_text(align="right" if axis == "y" else "left", color=GREY, **shift)
    rule = base.mark_rule(strokeDash=[4, 4], color=GREY)
    return rule.encode(encoded), text.encode(encoded, text="words:N", **place)


# ---- grids -----------------------------------------------------------------------------------------------------------
def _grid(drawing: Grid) -> Any:
    rows, columns = list(drawing.rows), list(drawing.columns)
    first, last = (columns[1] - columns[0], columns[-1] - columns[-2]) if len(columns) > 1 else (1, 1)
    overlapping = [*(column + 0.1 * last for column in columns[1:]), columns[-1] + last]  # without seams
    frame = _short(cast(Any, drawing.frame), "value")
    for name, places in (("from", columns), ("to", overlapping)):  # a cell has its number at its middle
        frame[name] = frame["x"].map(dict(zip(columns, (place - first / 2 for place in places), strict=True)))
    span = [columns[0] - first / 2, columns[-1] + last - first / 2]
    base = alt.Chart(alt.InlineData(values=frame.dropna().to_dict("records")))
    few = alt.Axis(grid=False, labelOverlap="greedy", ticks=False, tickMinStep=1)
    diverges = frame["value"].min() < 0 < frame["value"].max()
    least: dict[str, Any] = {} if drawing.floor is None else {"domainMin": drawing.floor, "clamp": True}
    middle: dict[str, Any] = {"domainMid": 0} if diverges else {}
    scale = alt.Scale(scheme="blueorange" if diverges else "viridis", **least, **middle)
    chart = base.mark_rect(aria=False).encode(
        alt.X("from:Q", title=drawing.x, scale=alt.Scale(domain=span, nice=False, clamp=True), axis=few),
        alt.X2("to:Q"),
        alt.Y("row:N", title=drawing.y, sort=rows, scale=alt.Scale(paddingInner=0, paddingOuter=0), axis=few),
        color=alt.Color(
            "value:Q", title=None, scale=scale, legend=alt.Legend(gradientLength=min(160, 14 * len(rows) + 40))
        ),
        tooltip=["row:N", "x:Q", alt.Tooltip("value:Q", format=".4g")],
    )
    return chart.properties(height=min(HEIGHT, max(90, 24 * len(rows))))
