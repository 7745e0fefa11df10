"""The chart of what was measured: time over plain attention, one line of dots per encoding, 1 is free."""

from __future__ import annotations

from typing import Any

import altair as alt

from longitude.bench.rows import Row, counted
from longitude.bench.target import score_of
from longitude.report.figure import COLOURS, FONT, GREY as QUIET, GRID as LINE, INK

STEP, WIDTH = 19, 330
OWN, PEER = "Longitude", "other ways"
WITHIN, BEYOND = "Longitude, within", "Longitude, beyond"


def chart(measured: dict[str, Any]) -> Any:
    """An Altair chart of a document."""
    rows = [Row(**row) for row in measured["rows"]]
    return by_target(rows, measured["targets"]) if "targets" in measured else by_length(rows)


def by_length(rows: list[Row]) -> Any:
    """Ratio by encoding, a dot per length, a panel per pass."""
    drawn = [row for row in rows if row.ratio is not None]
    lengths = sorted({row.length for row in drawn})
    passes = list(dict.fromkeys(row.passed for row in drawn))
    points = [_point(row) for row in drawn]
    names = _sorted_names(points)
    domain = _domain([point[end] for point in points for end in ("ratio", "low", "high")])
    panels = [
        _panel([p for p in points if p["pass"] == passed], passed, names, lengths, domain, first=n == 0)
        for n, passed in enumerate(passes)
    ]
    first = rows[0]
    words = f"{first.batch} x {first.heads} heads x {first.head_dim}, {first.dtype}, {counted(first.threads)}"
    title = alt.TitleParams(
        "Time of attention with a position encoding, over plain causal attention",
        subtitle=f"1 is free. {words}; medians of {first.turns} turns in one process, bars are quartiles.",
        anchor="start", fontSize=15, color=INK, subtitleColor=QUIET, subtitleFontSize=12, offset=14,
    )  # fmt: skip
    return configured(alt.hconcat(*panels, spacing=18).properties(title=title))


def by_target(rows: list[Row], targets: list[dict[str, Any]]) -> Any:
    """A line per target: what may not be exceeded, our measurements, those of others, and the worst of ours in words."""
    limits = {target["name"]: target for target in targets}
    names = list(limits)
    points = []
    for row in rows:
        score = score_of(row)
        if row.kind != "plain" and score is not None and score > 0:
            whose = PEER if row.kind == "peer" else WITHIN if score <= limits[row.group]["limit"] else BEYOND
            points.append(_point(row) | {"target": row.group, "whose": whose, "ratio": score})
    domain = _domain([*(point["ratio"] for point in points), *(target["limit"] for target in targets)])
    lines = [
        {
            "target": target["name"],
            "limit": target["limit"],
            "words": "-" if target["measured"] is None else f"{target['measured']:.2f}",
            "at most": f"≤ {target['limit']:.2f} of {target['of']}",
        }
        for target in targets
    ]
    y = alt.Y(
        "target:N",
        sort=names,
        title=None,
        scale=alt.Scale(domain=names),
        axis=alt.Axis(labelFontSize=12, labelColor=INK, labelLimit=360, ticks=False, grid=True),
    )
    x = alt.X(
        "ratio:Q",
        title="times what it is compared with",
        scale=alt.Scale(type="log", domain=domain, nice=False),
        axis=alt.Axis(values=_ticks(domain), format="~g", titleAnchor="start", titleColor=INK),
    )
    kinds = [WITHIN, BEYOND, PEER]
    colour = alt.Color(
        "whose:N",
        title=None,
        scale=alt.Scale(domain=kinds, range=[COLOURS[0], COLOURS[1], "#9aa3ad"]),
        legend=alt.Legend(orient="bottom", symbolType="circle"),
    )
    shape = alt.Shape("whose:N", scale=alt.Scale(domain=kinds, range=["circle", "circle", "diamond"]), legend=None)
    tooltip = [
        alt.Tooltip("name:N"),
        alt.Tooltip("backend:N"),
        alt.Tooltip("pass:N"),
        alt.Tooltip("length:N"),
        alt.Tooltip("ratio:Q", format=".2f"),
        alt.Tooltip("ms:Q", title="milliseconds", format=".1f"),
    ]
    base, data = alt.Chart(alt.Data(values=points)), alt.Chart(alt.Data(values=lines))
    dots = base.mark_point(filled=True, size=52, opacity=0.75).encode(x, y, color=colour, shape=shape, tooltip=tooltip)
    limit = data.mark_tick(thickness=2.5, size=STEP * 0.8, color=INK).encode(alt.X("limit:Q"), y)
    worst = data.mark_text(align="right", fontSize=12, fontWeight=600, color=INK)
    worst = worst.encode(y, text="words:N", x=alt.value(2 * WIDTH + 44))
    promise = data.mark_text(align="left", fontSize=12, color=QUIET)
    promise = promise.encode(y, text="at most:N", x=alt.value(2 * WIDTH + 56))
    first = next((row for row in rows if row.seconds is not None), rows[0])
    title = alt.TitleParams(
        "What was promised, and what it costs",
        subtitle=f"Bars: at most this much, promised. Dots: measured, {counted(first.threads)}, medians of turns in one "
        "process. Numbers: the worst of ours.",
        anchor="start", fontSize=15, color=INK, subtitleColor=QUIET, subtitleFontSize=12, offset=14,
    )  # fmt: skip
    made = alt.layer(dots, limit, worst, promise).properties(width=2 * WIDTH, height=(STEP + 4) * len(names))
    return configured(made.properties(title=title))


def _point(row: Row) -> dict[str, Any]:
    named = row.name if row.asked in ("", "auto") else f"{row.name} ({row.backend})"
    return {
        "name": named,
        "whose": PEER if row.kind == "peer" else OWN,
        "backend": row.backend,
        "pass": row.passed,
        "length": str(row.length),
        "ratio": row.ratio,
        "low": row.ratio_low,
        "high": row.ratio_high,
        "ms": (row.seconds or 0) * 1e3,
        "memory": "not measured" if row.memory_beyond_mib is None else f"{row.memory_beyond_mib:.0f} MiB",
    }


def _sorted_names(points: list[dict[str, Any]]) -> list[str]:
    """Ours from cheap to dear, by the last pass at the longest length, then the peers likewise."""
    last = {(point["whose"], point["name"]): point["ratio"] for point in points}
    return [name for _, name in sorted(last, key=lambda key: (key[0] == PEER, last[key]))]


def _panel(
    points: list[dict[str, Any]], passed: str, names: list[str], lengths: list[int], domain: list[float], first: bool
) -> Any:
    base = alt.Chart(alt.Data(values=points))
    y = alt.Y(
        "name:N",
        sort=names,
        title=None,
        scale=alt.Scale(domain=names),
        axis=alt.Axis(labels=first, labelFontSize=12, labelColor=INK, labelLimit=190, ticks=False, grid=True),
    )
    scale = alt.Scale(type="log", domain=domain, nice=False)
    x = alt.X(
        "ratio:Q",
        title=passed,
        scale=scale,
        axis=alt.Axis(values=_ticks(domain), format="~g", titleAnchor="start", titleColor=INK),
    )
    colour = alt.Color(
        "length:N",
        title="length",
        sort=[str(length) for length in lengths],
        scale=alt.Scale(domain=[str(length) for length in lengths], range=list(COLOURS)),
        legend=alt.Legend(orient="bottom", symbolType="circle"),
    )
    shape = alt.Shape(
        "whose:N",
        title=None,
        scale=alt.Scale(domain=[OWN, PEER], range=["circle", "diamond"]),
        legend=alt.Legend(orient="bottom"),
    )
    tooltip = [
        alt.Tooltip("name:N", title="encoding"),
        alt.Tooltip("backend:N"),
        alt.Tooltip("length:N"),
        alt.Tooltip("ratio:Q", title="over plain attention", format=".2f"),
        alt.Tooltip("low:Q", title="lower quartile", format=".2f"),
        alt.Tooltip("high:Q", title="upper quartile", format=".2f"),
        alt.Tooltip("ms:Q", title="milliseconds", format=".1f"),
        alt.Tooltip("memory:N", title="memory beyond plain"),
    ]
    one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(color=INK, strokeWidth=1.4).encode(x=alt.X("one:Q"))
    bars = base.mark_rule(strokeWidth=1.4, opacity=0.6).encode(alt.X("low:Q"), y, x2="high:Q", color=colour)
    dots = base.mark_point(filled=True, size=62, opacity=0.95).encode(x, y, color=colour, shape=shape, tooltip=tooltip)
    return alt.layer(one, bars, dots).properties(width=WIDTH, height=STEP * len(names))


def _domain(ratios: list[float]) -> list[float]:
    return [min(0.9, *ratios) / 1.05, max(2.0, *ratios) * 1.1]


def _ticks(domain: list[float]) -> list[float]:
    steps = [m * 10.0**e for e in range(-2, 4) for m in (1, 2, 5)]
    return [step for step in [*steps, 1.5] if domain[0] <= step <= domain[1]]


def configured(made: Any) -> Any:
    """The house's look."""
    return made.configure(
        font=FONT,
        background="white",
        padding={"left": 60, "right": 60, "top": 10, "bottom": 10},  # readers without our font have wider letters
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            labelColor=QUIET, titleColor=QUIET, labelFontSize=12, titleFontSize=12, titleFontWeight="normal",
            gridColor=LINE, domain=False, tickColor=LINE,
        ),
        legend=alt.LegendConfig(
            labelColor=INK, titleColor=QUIET, labelFontSize=12, titleFontWeight="normal", columnPadding=30,
        ),
    )  # fmt: skip
