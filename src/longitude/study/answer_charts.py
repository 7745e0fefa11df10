"""The figure of exact answers by length: up is good, and the line of solved lengths is drawn."""

from typing import Any

import altair as alt

from longitude.report.figure import GREY, Figure
from longitude.study.answers import SOLVED, between
from longitude.study.drawing import (
    colour,
    ends,
    faded,
    layered,
    marks,
    touch,
    training_length,
    widened,
    y_axis,
)
from longitude.study.judge import Finding
from longitude.study.results import Run
from longitude.study.statistics import findings

DOMAIN = [-0.03, 1.03]


def by_length(run: Run, method: str) -> Figure | None:
    """Share of exact answers by length, one line per label, bands for the 95 % intervals."""
    found = [each for each in findings(run, method) if each.value is not None]
    if not found:
        return None
    points = [_point(each) for each in found]
    lengths, task = sorted({each.length for each in found}), run.task
    x = alt.X(
        "length:Q",
        title=f"Length in {task.unit}",
        scale=alt.Scale(domain=widened(lengths, run.train_length), nice=False, padding=14),
        axis=alt.Axis(values=lengths, format="d", grid=False),
    )
    ticks = {"format": "%", "values": [0, 0.25, 0.5, 0.75, SOLVED, 1], "labelOverlap": False}
    y = y_axis("value:Q", "Exact answers, higher is better", DOMAIN, **ticks)
    base = alt.Chart(alt.Data(values=points))
    bounds = {"y": alt.Y("low:Q"), "y2": alt.Y2("high:Q"), "color": colour(run)}
    band = base.mark_area().encode(x, opacity=faded(0.12, 0.02), **bounds)
    bars = base.mark_rule(strokeWidth=1.2).encode(x, opacity=faded(0.7, 0.05), **bounds)
    line = base.mark_line(strokeWidth=2.4).encode(x, y, **marks(run))
    dots = base.mark_point(size=46, filled=True).encode(x, y, color=colour(run), opacity=faded(1, 0.12))
    solved = alt.Chart(alt.Data(values=[{"value": SOLVED}])).mark_rule(color=GREY, strokeWidth=1, opacity=0.6).encode(y)
    tooltip = [
        alt.Tooltip("label:N", title="encoding"),
        alt.Tooltip("length:Q", title=task.unit, format="d"),
        alt.Tooltip("value:Q", title="exact answers", format=".1%"),
        alt.Tooltip("interval:N", title="95% interval"),
        alt.Tooltip("documents:Q", title="examples"),
        alt.Tooltip("seeds:Q", title="seeds"),
    ]
    layers = [
        *training_length(run, x, "length"),
        solved,
        band,
        bars,
        line,
        dots,
        touch(base, x, y, tooltip),
        ends(run, points, "length", DOMAIN),
    ]
    over = "examples and seeds" if any(each.seeds > 1 for each in found) else "examples"
    return Figure(
        name="by-length",
        title="Exact answers by length",
        caption="An answer counts when every symbol and its end are right, as the model writes it by itself, taking the "
        f"likeliest symbol each time. Bands are 95% intervals over {over}; the dashed line marks the longest training "
        f"examples, the level line {SOLVED:.0%}, from where a length is solved.",
        alt=f"Line chart of the share of exact answers against lengths of {lengths[0]} to {lengths[-1]} {task.unit}, one line "
        "for each encoding; the table below holds the numbers.",
        chart=layered(layers),
    )


def _point(found: Finding) -> dict[str, Any]:
    return found._asdict() | {"interval": between(found)}
