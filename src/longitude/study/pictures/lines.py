"""Parts of the figures of a study: lines, labels at their ends, the training length, tooltips.

A reader of the page chooses labels with the parameter `picked`, a list: where it names some, the others are not drawn. Labels
stand at the ends of their lines, so that no figure needs a legend, and a color belongs to a label in all figures of a study.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from longitude.report.figure import EDGE, GREY, apart, color_of, dashes_of, themed
from longitude.report.wording import capital
from longitude.study.results import Run

BLIND = [4, 4]
"""The dash of blind controls."""
HEIGHT = 380
ENDS = "ends"
"""Prefix of the names of layers with labels at the ends of lines. page.js has it, too."""
SPARSE = {"labelOverlap": "greedy", "labelSeparation": 4}
"""Axis options that omit some numbers on narrow screens."""
LOG = " (log scale)"
"""Suffix of axis titles; a page removes it if its reader chooses a linear axis."""
PICKED = "length(picked) === 0 || indexof(picked, datum.label) >= 0"


def line_chart(
    run: Run,
    points: list[dict[str, Any]],
    x: alt.X,
    y: alt.Y,
    fields: dict[str, tuple[str, ...]],
    *below: alt.Chart,
    width: float,
    dots: int = 0,
    seeds: list[dict[str, Any]] | None = None,
    levels: dict[str, float] | None = None,
    bands: bool = False,
) -> Any:
    """Lines, in which labels can be picked.

    points: each with label, value and the field of x. fields: of the tooltip, with type -> title, and a format for numbers.
    below: layers under the lines. width: of lines. dots: their size, 0 for none. seeds: points of single seeds, as `points`.
    levels: dotted level lines, with their names at the right of the plot.
    bands: from "from" to "to" of a point, if it has them.
    """
    field, labels = x["shorthand"].removesuffix(":Q"), run.labels
    colors = [*map(color_of, labels)]
    color = alt.Color("label:N", scale=alt.Scale(domain=labels, range=colors), legend=None)
    dash = alt.StrokeDash("label:N", scale=alt.Scale(domain=labels, range=dashes(run)), legend=None)
    base = of_labels(points)
    layers = [*training_length(run, x, field), *below]
    for value in (levels or {}).values():
        layers.append(dotted(value, y))
    if bands:
        bounds = {"y": alt.Y("from:Q"), "y2": alt.Y2("to:Q"), "color": color}
        both = of_labels([point for point in points if point["from"] is not None])
        layers.append(both.mark_area(opacity=0.15, aria=False).encode(x, **bounds))
        layers.append(both.mark_rule(strokeWidth=1.2, opacity=0.7, aria=False).encode(x, **bounds))
    layers.append(base.mark_line(strokeWidth=width).encode(x, y, color=color, strokeDash=dash))
    if seeds:
        layers.append(of_labels(seeds).mark_point(size=30, strokeWidth=1.2, aria=False).encode(x, y, color=color))
    if dots:
        layers.append(base.mark_point(size=dots, filled=True, opacity=1).encode(x, y, color=color))
    undefined = [alt.Undefined]
    tooltip = [alt.Tooltip(name, title=title, format=(form or undefined)[0]) for name, (title, *form) in fields.items()]
    large = base.mark_point(size=380, filled=True, opacity=0, aria=False)  # invisible, easy to point at
    names = ends(run, points, field, y["scale"]["domain"], color, levels or {})
    layers += [large.encode(x, y, tooltip=tooltip), *names]
    chart = alt.layer(*layers).add_params(alt.param(name="picked", value=[]))
    padding = {"left": 6, "right": 6, "top": 26, "bottom": 6}
    autosize = alt.AutoSizeParams(type="fit-x", contains="padding")
    chart = chart.properties(height=HEIGHT, padding=padding, autosize=autosize)
    axis_of_lengths = alt.AxisConfig(domain=True, domainColor=EDGE, tickColor=EDGE, labelFlush=False)
    return themed(chart, {"titlePadding": 10, "labelPadding": 6}, axisX=axis_of_lengths)


def dashes(run: Run) -> list[Sequence[int]]:
    """The dash of each label's line; blind controls have their own."""
    return [
        BLIND if run.is_blind(label) else dash for label, dash in zip(run.labels, dashes_of(run.labels), strict=True)
    ]


def of_labels(points: list[dict[str, Any]]) -> alt.Chart:
    """A layer of points with a label, which a reader may choose by label."""
    return alt.Chart(alt.InlineData(values=points)).transform_filter(PICKED)


def x_axis(field: str, title: str, scale: dict[str, Any], **ticks: Any) -> alt.X:
    """Without a grid; scale: of alt.Scale."""
    axis = alt.Axis(grid=False, **SPARSE, **ticks)
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(nice=False, **scale), axis=axis)


def y_axis(title: str, domain: list[float], **ticks: Any) -> alt.Y:
    """Vertical axis of the field `value`; its title is above the axis."""
    axis = alt.Axis(titleAngle=0, titleAlign="left", titleAnchor="end", titleX=-34, titleY=-14, tickCount=6, **ticks)
    return alt.Y("value:Q", title=title, scale=alt.Scale(domain=domain, nice=False, zero=False), axis=axis)


def training_length(run: Run, x: alt.X, field: str) -> list[alt.Chart]:
    """The training length, named."""
    base = alt.Chart(alt.Data(values=[{field: run.train_length, "words": f"trained at {run.train_length}"}]))
    rule = base.mark_rule(strokeDash=[4, 4], color=GREY, strokeWidth=1).encode(x)
    words = base.mark_text(align="left", dx=6, y=3, color=GREY, fontSize=12).encode(x, text="words:N")
    return [rule, words]


def ends(
    run: Run, points: list[dict], field: str, domain: list[float], color: alt.Color, levels: dict[str, float]
) -> list[alt.Chart]:
    """Each label at the last point of its line, and the names of levels, moved apart if they would overlap.

    A page omits these layers on narrow screens, by their name.
    """
    last: dict[str, dict] = {}
    for point in points:
        if point["label"] not in last or point[field] >= last[point["label"]][field]:
            last[point["label"]] = point
    names = run.names
    last = {label: point | {"name": names[label]} for label, point in last.items()}
    far = max(point[field] for point in last.values())
    last |= {f"level {words}": {field: far, "value": value, "name": words} for words, value in levels.items()}
    gap = 15 / HEIGHT * (domain[1] - domain[0])
    ends = []
    for place in {point[field] for point in last.values()}:
        here = sorted((p for p in last.values() if p[field] == place), key=lambda point: point["value"])
        above = 0.0 if place == far else gap  # a line that stops early: its label must not lie on the others
        heights = apart([point["value"] + above for point in here], gap)
        up = max(0.0, domain[0] + gap / 2 - heights[0])  # off the axis
        ends += [{**p, "at": height + up} for p, height in zip(here, heights, strict=True)]
    place = {"x": alt.X(f"{field}:Q"), "y": alt.Y("at:Q"), "text": "name:N"}
    style: dict[str, Any] = {"align": "left", "limit": 240}
    text = of_labels([end for end in ends if "label" in end]).mark_text(fontSize=13, fontWeight=600, dx=9, **style)
    layers = [text.encode(**place, color=color)]
    if levels:
        base = alt.Chart(alt.InlineData(values=[end for end in ends if "label" not in end]))
        layers.append(base.mark_text(fontSize=12, color=GREY, dx=18, **style).encode(**place))
    return [layer.properties(name=f"{ENDS}-{i}") for i, layer in enumerate(layers)]


def dotted(value: float, y: alt.Y) -> alt.Chart:
    """A level line."""
    base = alt.Chart(alt.Data(values=[{"value": value}]))
    return base.mark_rule(strokeDash=[1, 3], color=GREY, strokeWidth=1.4).encode(y)


def domain_of(values: Iterable[float]) -> list[float]:
    """The range of the values and a little more, so that no mark lies on the edge."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.1
    return [low - margin, high + margin]


def axis_title(run: Run) -> str:
    """Bits per byte, lower is better."""
    better = "lower" if run.task.kind == "losses" else "higher"
    return f"{capital(run.task.words)}, {better} is better"


def between(low: float | None, high: float | None) -> str:
    """2.550 to 2.612, for a tooltip."""
    return "none" if low is None or high is None else f"{low:.3f} to {high:.3f}"
