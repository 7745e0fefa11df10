"""The figures of a study. One Altair definition of each gives the live chart of the report, the SVG and the PNG."""

import math
from typing import Any

import altair as alt

from longitude.measure.rows import Row
from longitude.report.figure import Figure
from longitude.study import answer_charts
from longitude.study.drawing import (
    between,
    colour,
    domain_of,
    ends,
    faded,
    layered,
    marks,
    touch,
    training_length,
    widened,
    y_axis,
)
from longitude.study.results import Run
from longitude.study.statistics import Finding, findings, percent, span, state

FIRST = 16
"""Positions below are not drawn: with so little context every model is bad, and the axis would show little else."""


def name_of(method: str) -> str:
    """The figure of losses by length."""
    return "by-length-sliding" if method == "sliding" else "by-length"


def figures(run: Run) -> list[Figure]:
    """All figures that the run has numbers for, the main one first."""
    draw = answer_charts.by_length if run.task.kind == "answers" else by_length
    made = [draw(run, method) for method in run.methods]
    return [figure for figure in (*made[:1], by_position(run), *made[1:], training(run)) if figure is not None]


def by_length(run: Run, method: str) -> Figure | None:
    """Losses by window length, one line per label, bands for the 95 % intervals of the change."""
    found = [each for each in findings(run, method) if each.value is not None]
    if not found:
        return None
    points = [_with_band(each, found, run.reference) for each in found]
    lengths = sorted({each.length for each in found})
    domain = domain_of([bound for point in points for bound in (point["from"], point["value"], point["to"])])
    x = alt.X(
        "length:Q",
        title="Window length in bytes",
        scale=alt.Scale(type="log", base=2, domain=widened(lengths, run.train_length), nice=False, padding=14),
        axis=alt.Axis(values=lengths, format="d", grid=False),
    )
    y = y_axis("value:Q", axis_title(run), domain)
    base = alt.Chart(alt.Data(values=points))
    bounds = {"y": alt.Y("from:Q"), "y2": alt.Y2("to:Q"), "color": colour(run)}
    band = base.mark_area().encode(x, opacity=faded(0.16, 0.03), **bounds)
    bars = base.mark_rule(strokeWidth=1.2).encode(x, opacity=faded(0.7, 0.05), **bounds)
    line = base.mark_line(strokeWidth=2.4).encode(x, y, **marks(run))
    dots = base.mark_point(size=46, filled=True).encode(x, y, color=colour(run), opacity=faded(1, 0.12))
    tooltip = [
        alt.Tooltip("label:N", title="encoding"),
        alt.Tooltip("length:Q", title="window, bytes", format="d"),
        alt.Tooltip("value:Q", title=run.task.words, format=".3f"),
        alt.Tooltip("interval:N", title="95% interval"),
        alt.Tooltip("change:N", title=f"change from {run.reference}"),
        alt.Tooltip("span:N", title="95% interval, paired"),
        alt.Tooltip("documents:Q", title="documents"),
        alt.Tooltip("seeds:Q", title="seeds"),
    ]
    layers = [
        *training_length(run, x, "length"),
        band,
        bars,
        line,
        dots,
        touch(base, x, y, tooltip),
        ends(run, points, "length", domain),
    ]
    sliding, stride = method == "sliding", run.config["stride"]
    laid = "laid end to end"
    if sliding:
        laid = f"that move by {stride} bytes" if stride else "that move by half their length"
    over = "documents and seeds" if any(each.seeds > 1 for each in found) else "documents"
    bands = "One document gives no interval"
    if found[0].documents > 1:
        of = f"the change from {run.reference}, paired," if len(lengths) > 1 else "the value"
        bands = f"Bands are 95% intervals of {of} over {over}"
    return Figure(
        name=name_of(method),
        title="Loss by window length" + (", sliding windows" if sliding else ""),
        caption=f"Every {run.task.loss_unit} is scored once, in windows {laid}. {bands}; the dashed line marks the length "
        "of the training windows.",
        alt=f"Line chart of {run.task.words} against window lengths of {lengths[0]} to {lengths[-1]} bytes, one line for "
        "each encoding; the table below holds the numbers.",
        chart=layered(layers),
    )


def _with_band(found: Finding, others: list[Finding], reference: int) -> dict[str, Any]:
    """A finding as a point, with the band around it: the interval of its change, which starts at the reference.

    The interval of the value itself, in the tooltip, is mostly how documents differ, and alike for all encodings. It is
    the band only where nothing can change: one length. Without any interval the band is the point.
    """
    start = next((each.value for each in others if each.label == found.label and each.length == reference), None)
    low = high = found.value
    if start is not None and found.change_low is not None and found.change_high is not None:
        low, high = start * (1 + found.change_low), start * (1 + found.change_high)
    elif len({each.length for each in others}) == 1 and found.low is not None:
        low, high = found.low, found.high
    words = {
        "interval": between(found.low, found.high),
        "change": percent(found.change) or "–",
        "span": span(found) or "–",
    }
    return found._asdict() | words | {"from": low, "to": high}


def by_position(run: Run) -> Figure | None:
    """Bits per byte by position in the longest window, mean over seeds."""
    rows = [row for row in run.rows if row.method == "per-position" and row.value is not None]
    rows = [row for row in rows if (row.position_to or 0) > FIRST]
    longest = max((row.window or 0 for row in rows), default=0)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.window == longest:
            groups.setdefault((row.label, row.position_from, row.position_to), []).append(row)
    if not groups:
        return None
    points = [_at_positions(*key, rows=group) for key, group in groups.items()]
    domain = domain_of([point["value"] for point in points])
    x = alt.X(
        "position:Q",
        title=f"Position in a window of {longest} bytes",
        scale=alt.Scale(type="log", base=2, domain=[FIRST, longest], nice=False, padding=14),
        axis=alt.Axis(values=[2**k for k in range(4, longest.bit_length())], format="d", grid=False),
    )
    y = y_axis("value:Q", axis_title(run), domain)
    base = alt.Chart(alt.Data(values=points))
    several = len(run.config["seeds"]) > 1
    tooltip = [
        alt.Tooltip("label:N", title="encoding"),
        alt.Tooltip("from:N", title="positions"),
        alt.Tooltip("value:Q", title=run.task.words, format=".3f"),
        alt.Tooltip("spread:N", title="range of seeds" if several else "95% interval"),
        alt.Tooltip("seeds:Q", title="seeds"),
    ]
    line = base.mark_line(strokeWidth=2.2).encode(x, y, **marks(run))
    dots = base.mark_point(size=14, filled=True).encode(x, y, color=colour(run), opacity=faded(1, 0.12))
    layers = [
        *training_length(run, x, "position"),
        line,
        dots,
        touch(base, x, y, tooltip),
        ends(run, points, "position", domain),
    ]
    return Figure(
        name="by-position",
        title="Where in the window the loss arises",
        caption=f"The same losses at {longest} bytes, averaged by position in the window: a model that holds goes on "
        f"falling or stays level right of the dashed line. Positions below {FIRST} are not drawn.",
        alt=f"Line chart of bits per byte by position in windows of {longest} bytes, one line per encoding.",
        chart=layered(layers),
    )


def _at_positions(label: str, start: int, stop: int, rows: list[Row]) -> dict[str, Any]:
    """The rows of all seeds as one point, in the middle of its positions on a logarithmic axis that counts from 1."""
    values = [row.value for row in rows if row.value is not None]
    alone = len(rows) == 1
    return {
        "label": label,
        "position": math.sqrt((start + 1) * stop),
        "from": f"{start} to {stop - 1}",
        "value": sum(values) / len(values),
        "spread": between(rows[0].low, rows[0].high) if alone else between(min(values), max(values)),
        "seeds": len(rows),
    }


def training(run: Run) -> Figure | None:
    """Training loss by targets, lightly smoothed, one line per cell."""
    points, width = [], 1
    for cell in run.cells:
        losses = cell.losses
        width = 2 * round(len(losses) / 80) + 1
        smooth = _moving_average([entry["loss"] / math.log(2) for entry in losses], width)
        chosen = range(0, len(losses), max(1, len(losses) // 100))
        chosen = sorted({*chosen, len(losses) - 1} - {-1})
        name = f"{cell.label}, seed {cell.seed}"
        points += [
            {
                "label": cell.label,
                "cell": name,
                "tokens": losses[i]["tokens"],
                "step": losses[i]["step"],
                "value": smooth[i],
                "state": state(cell),
                "end": cell.label if cell.status == "done" else f"{cell.label}: {cell.status}",
            }
            for i in chosen
        ]
    if not points:
        return None
    unit, text = run.task.loss_unit, not run.task.generated
    most = max(point["tokens"] for point in points)
    domain = domain_of(
        [p["value"] for p in points if p["tokens"] > 0.05 * most]
    )  # the fall of the first steps leaves the picture at the top
    x = alt.X(
        "tokens:Q",
        title=f"Training tokens ({unit}s)",
        scale=alt.Scale(domain=[0, most], nice=False),
        axis=alt.Axis(format="~s", grid=False, tickCount=6),
    )
    y = y_axis("value:Q", f"Bits per {unit}, lower is better", domain)
    base = alt.Chart(alt.Data(values=points))
    tooltip = [
        alt.Tooltip("cell:N", title="model"),
        alt.Tooltip("step:Q", title="step", format="d"),
        alt.Tooltip("tokens:Q", title="tokens", format=",d"),
        alt.Tooltip("value:Q", title=f"bits per {unit}", format=".3f"),
        alt.Tooltip("state:N", title="the run"),
    ]
    line = base.mark_line(strokeWidth=1.6, clip=True).encode(x, y, detail="cell:N", **marks(run))
    layers = [line, touch(base, x, y, tooltip, clip=True), ends(run, points, "tokens", domain)]
    on = f"windows of {run.train_length} bytes" if text else f"examples of up to {run.train_length} {run.task.unit}"
    read = "read the same bytes" if text else "see the same examples"
    return Figure(
        name="training",
        title="Training",
        caption=f"Loss on the training {on}"
        + (f", a moving average of {width} steps" if width > 1 else "")
        + f". All encodings of a seed {read} in the same order; the first steps lie above the picture.",
        alt=f"Line chart of training loss in bits per {unit} against training tokens, one line per model.",
        chart=layered(layers),
    )


def axis_title(run: Run) -> str:
    """Bits per byte, lower is better"""
    return f"{run.task.words[0].upper()}{run.task.words[1:]}, lower is better"


def _moving_average(values: list[float], width: int) -> list[float]:
    """Of `width` values around each, fewer at the ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
