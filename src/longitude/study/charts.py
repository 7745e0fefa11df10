"""The figures of a study. One Altair definition of each gives the live chart of the report, the SVG and the PNG.

A reader of the page picks a label with the parameter `picked`: lines of other labels fade. Labels stand at the ends of
their lines, so that no figure needs a legend, and a colour belongs to a label in all figures of a study.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import altair as alt

from longitude.measure.rows import Row
from longitude.study.results import Run
from longitude.study.statistics import Finding, findings, percent, span, state

# Okabe and Ito's colours, distinct for colour-blind readers, less yellow and black, the light ones darkened so that
# words in them can be read on white. A second round of them is dashed, a third dotted, and labels show it, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b85a92", "#c98a00", "#46a3da", "#6b6b6b")
DASHES = ([1, 0], [7, 3], [2, 2])
SAMPLES = ("—", "--", "··")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
INK, QUIET, LINE = "#1d2733", "#5b6673", "#e4e8ec"
HEIGHT = 380
NAMES = ("by-length", "by-position", "by-length-sliding", "training")
FIRST = 16
"""Positions below are not drawn: with so little context every model is bad, and the axis would show little else."""


@dataclass(frozen=True)
class Figure:
    """name: of its files. title and caption: for readers, plain text. alt: what the picture shows, in words."""

    name: str
    title: str
    caption: str
    alt: str
    chart: Any  # an alt.LayerChart

    def sized(self, width: int | str) -> Any:
        """The chart at a width in pixels, or "container"."""
        return self.chart.properties(width=width)


def name_of(method: str) -> str:
    """The figure of losses by length."""
    return {"non-overlapping": "by-length", "sliding": "by-length-sliding"}[method]


def figures(run: Run) -> list[Figure]:
    """All figures that the run has numbers for, the main one first."""
    made = [by_length(run, method) for method in run.methods]
    return [figure for figure in (*made[:1], by_position(run), *made[1:], training(run)) if figure is not None]


def by_length(run: Run, method: str) -> Figure | None:
    """Bits per byte by window length, one line per label, bands for the 95 % intervals of the change."""
    found = [each for each in findings(run, method) if each.value is not None]
    if not found:
        return None
    points = [_with_band(each, found, run.reference) for each in found]
    lengths = sorted({each.length for each in found})
    domain = _domain([bound for point in points for bound in (point["from"], point["value"], point["to"])])
    x = alt.X(
        "length:Q",
        title="Window length in bytes",
        scale=alt.Scale(type="log", base=2, domain=_widened(lengths, run.train_length), nice=False, padding=14),
        axis=alt.Axis(values=lengths, format="d", grid=False),
    )
    y = _y("value:Q", "Bits per byte, lower is better", domain)
    base = alt.Chart(alt.Data(values=points))
    bounds = {"y": alt.Y("from:Q"), "y2": alt.Y2("to:Q"), "color": _colour(run)}
    band = base.mark_area().encode(x, opacity=_faded(0.16, 0.03), **bounds)
    bars = base.mark_rule(strokeWidth=1.2).encode(x, opacity=_faded(0.7, 0.05), **bounds)
    line = base.mark_line(strokeWidth=2.4).encode(x, y, **_marks(run))
    dots = base.mark_point(size=46, filled=True).encode(x, y, color=_colour(run), opacity=_faded(1, 0.12))
    tooltip = [
        alt.Tooltip("label:N", title="encoding"),
        alt.Tooltip("length:Q", title="window, bytes", format="d"),
        alt.Tooltip("value:Q", title="bits per byte", format=".3f"),
        alt.Tooltip("interval:N", title="95% interval"),
        alt.Tooltip("change:N", title=f"change from {run.reference}"),
        alt.Tooltip("span:N", title="95% interval, paired"),
        alt.Tooltip("documents:Q", title="documents"),
        alt.Tooltip("seeds:Q", title="seeds"),
    ]
    layers = [
        *_rule(run, x, "length"),
        band,
        bars,
        line,
        dots,
        _touch(base, x, y, tooltip),
        _ends(run, points, "length", domain),
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
        caption=f"Every byte is scored once, in windows {laid}. {bands}; the dashed line marks the length "
        "of the training windows.",
        alt=f"Line chart of bits per byte against window lengths of {lengths[0]} to {lengths[-1]} bytes, one line for "
        "each encoding; the table below holds the numbers.",
        chart=_layered(layers),
    )


def _with_band(found: Finding, others: list[Finding], reference: int) -> dict[str, Any]:
    """A finding as a point, with the band around it: the interval of its change, which starts at the reference.

    The interval of the value itself, in the tooltip, is mostly how documents differ, and alike for all encodings. It is
    the band only where nothing can change: one length. Without any interval the band is the point."""
    start = next((each.value for each in others if each.label == found.label and each.length == reference), None)
    low = high = found.value
    if start is not None and found.change_low is not None and found.change_high is not None:
        low, high = start * (1 + found.change_low), start * (1 + found.change_high)
    elif len({each.length for each in others}) == 1 and found.low is not None:
        low, high = found.low, found.high
    words = {
        "interval": _interval(found.low, found.high),
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
    domain = _domain([point["value"] for point in points])
    x = alt.X(
        "position:Q",
        title=f"Position in a window of {longest} bytes",
        scale=alt.Scale(type="log", base=2, domain=[FIRST, longest], nice=False, padding=14),
        axis=alt.Axis(values=[2**k for k in range(4, longest.bit_length())], format="d", grid=False),
    )
    y = _y("value:Q", "Bits per byte, lower is better", domain)
    base = alt.Chart(alt.Data(values=points))
    several = len(run.config["seeds"]) > 1
    tooltip = [
        alt.Tooltip("label:N", title="encoding"),
        alt.Tooltip("from:N", title="positions"),
        alt.Tooltip("value:Q", title="bits per byte", format=".3f"),
        alt.Tooltip("spread:N", title="range of seeds" if several else "95% interval"),
        alt.Tooltip("seeds:Q", title="seeds"),
    ]
    line = base.mark_line(strokeWidth=2.2).encode(x, y, **_marks(run))
    dots = base.mark_point(size=14, filled=True).encode(x, y, color=_colour(run), opacity=_faded(1, 0.12))
    layers = [
        *_rule(run, x, "position"),
        line,
        dots,
        _touch(base, x, y, tooltip),
        _ends(run, points, "position", domain),
    ]
    return Figure(
        name="by-position",
        title="Where in the window the loss arises",
        caption=f"The same losses at {longest} bytes, averaged by position in the window: a model that holds goes on "
        f"falling or stays level right of the dashed line. Positions below {FIRST} are not drawn.",
        alt=f"Line chart of bits per byte by position in windows of {longest} bytes, one line per encoding.",
        chart=_layered(layers),
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
        "spread": _interval(rows[0].low, rows[0].high) if alone else _interval(min(values), max(values)),
        "seeds": len(rows),
    }


def training(run: Run) -> Figure | None:
    """Training loss by tokens, lightly smoothed, one line per cell."""
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
    most = max(point["tokens"] for point in points)
    domain = _domain(
        [p["value"] for p in points if p["tokens"] > 0.05 * most]
    )  # the fall of the first steps leaves the picture at the top
    x = alt.X(
        "tokens:Q",
        title="Training tokens (bytes)",
        scale=alt.Scale(domain=[0, most], nice=False),
        axis=alt.Axis(format="~s", grid=False, tickCount=6),
    )
    y = _y("value:Q", "Bits per byte, lower is better", domain)
    base = alt.Chart(alt.Data(values=points))
    tooltip = [
        alt.Tooltip("cell:N", title="model"),
        alt.Tooltip("step:Q", title="step", format="d"),
        alt.Tooltip("tokens:Q", title="tokens", format=",d"),
        alt.Tooltip("value:Q", title="bits per byte", format=".3f"),
        alt.Tooltip("state:N", title="the run"),
    ]
    line = base.mark_line(strokeWidth=1.6, clip=True).encode(x, y, detail="cell:N", **_marks(run))
    layers = [line, _touch(base, x, y, tooltip, clip=True), _ends(run, points, "tokens", domain)]
    return Figure(
        name="training",
        title="Training",
        caption=f"Loss on the training windows of {run.train_length} bytes"
        + (f", a moving average of {width} steps" if width > 1 else "")
        + ". All encodings of a seed read the same bytes in the same order; the first steps lie above the picture.",
        alt="Line chart of training loss in bits per byte against training tokens, one line per model.",
        chart=_layered(layers),
    )


# ---- parts ----------------------------------------------------------------------------------------------------------


def colour_of(run: Run, label: str) -> str:
    return COLOURS[run.labels.index(label) % len(COLOURS)]


def round_of(run: Run, label: str) -> int:
    """Which round of the colours a label is in: the index of its dash."""
    return run.labels.index(label) // len(COLOURS) % len(DASHES)


def _colour(run: Run) -> alt.Color:
    colours = [colour_of(run, label) for label in run.labels]
    return alt.Color("label:N", scale=alt.Scale(domain=run.labels, range=colours), legend=None)


def _marks(run: Run) -> dict[str, Any]:
    """Colour, dash and fading of a line."""
    dashes = [DASHES[round_of(run, label)] for label in run.labels]
    dash = alt.StrokeDash("label:N", scale=alt.Scale(domain=run.labels, range=dashes), legend=None)
    return {"color": _colour(run), "strokeDash": dash, "opacity": _faded(1, 0.12)}


def _faded(full: float, faded: float) -> Any:
    """An opacity that falls when another label is picked."""
    return alt.condition("picked == '' || datum.label == picked", alt.value(full), alt.value(faded))


def _y(field: str, title: str, domain: list[float]) -> alt.Y:
    axis = alt.Axis(titleAngle=0, titleAlign="left", titleAnchor="end", titleX=-34, titleY=-14, tickCount=6)
    return alt.Y(field, title=title, scale=alt.Scale(domain=domain, nice=False, zero=False), axis=axis)


def _rule(run: Run, x: alt.X, field: str) -> list[alt.Chart]:
    """The training length, named."""
    base = alt.Chart(alt.Data(values=[{field: run.train_length, "words": f"trained at {run.train_length}"}]))
    rule = base.mark_rule(strokeDash=[4, 4], color=QUIET, strokeWidth=1).encode(x)
    words = base.mark_text(align="left", dx=6, y=3, color=QUIET, fontSize=12).encode(x, text="words:N")
    return [rule, words]


def _touch(base: alt.Chart, x: alt.X, y: alt.Y, tooltip: list[alt.Tooltip], clip: bool = False) -> alt.Chart:
    """Large unseen points: what a pointer finds."""
    return base.mark_point(size=380, filled=True, opacity=0, clip=clip, aria=False).encode(x, y, tooltip=tooltip)


def _ends(run: Run, points: list[dict], field: str, domain: list[float]) -> alt.Chart:
    """Each label at the last point of its line, moved apart where they would overlap."""
    last: dict[str, dict] = {}
    for point in points:
        if point["label"] not in last or point[field] >= last[point["label"]][field]:
            last[point["label"]] = point

    def named(point: dict) -> str:
        sample = f"{SAMPLES[round_of(run, point['label'])]} " if len(run.labels) > len(COLOURS) else ""
        return sample + point.get("end", point["label"])

    far = max(point[field] for point in last.values())
    gap = 15 / HEIGHT * (domain[1] - domain[0])
    ends = []
    for place in {point[field] for point in last.values()}:
        here = sorted((p for p in last.values() if p[field] == place), key=lambda point: point["value"])
        above = 0.0 if place == far else gap  # a line that stops early: its label must not lie on the others
        heights = _apart([point["value"] + above for point in here], gap)
        up = max(0.0, domain[0] + gap / 2 - heights[0])  # off the axis
        ends += [{**p, "name": named(p), "at": height + up} for p, height in zip(here, heights, strict=True)]
    text = alt.Chart(alt.Data(values=ends)).mark_text(align="left", dx=9, fontSize=13, fontWeight=600, limit=150)
    return text.encode(alt.X(f"{field}:Q"), alt.Y("at:Q"), text="name:N", color=_colour(run), opacity=_faded(1, 0.25))


def _apart(values: list[float], gap: float) -> list[float]:
    """Ascending values moved as little as needed for `gap` between neighbours: clusters keep their mean."""
    clusters: list[list[float]] = []  # of [sum of (value - its offset in the cluster), count]
    for value in values:
        clusters.append([value, 1])
        while len(clusters) > 1:
            (above, many), (below, few) = clusters[-1], clusters[-2]
            if above / many >= below / few + few * gap:
                break
            clusters[-2:] = [[below + above - many * few * gap, few + many]]
    return [total / count + i * gap for total, count in clusters for i in range(int(count))]


def _layered(layers: list[alt.Chart]) -> Any:
    chart = alt.layer(*layers).add_params(alt.param(name="picked", value=""))
    return chart.properties(
        height=HEIGHT,
        padding={"left": 6, "right": 6, "top": 26, "bottom": 6},
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    ).configure(
        font=FONT,
        background="white",
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            labelColor=QUIET, titleColor=QUIET, labelFontSize=12, titleFontSize=12, titleFontWeight="normal",
            titlePadding=10, gridColor=LINE, domain=False, tickColor=LINE, labelPadding=6,
        ),
        axisX=alt.AxisConfig(domain=True, domainColor="#b6bec7", tickColor="#b6bec7", labelFlush=False),
    )  # fmt: skip


def _domain(values: Iterable[float]) -> list[float]:
    """The range of the values and a little more, so that no mark lies on the edge."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1
    return [low - room, high + room]


def _widened(lengths: list[int], train_length: int) -> list[int]:
    low, high = min(*lengths, train_length), max(*lengths, train_length)
    return [low, high] if low < high else [low // 2 or 1, high * 2]


def _interval(low: float | None, high: float | None) -> str:
    return "none" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _moving_average(values: list[float], width: int) -> list[float]:
    """Of `width` values around each, fewer at the ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
