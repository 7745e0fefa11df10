"""The chart of a sweep: time over plain attention, a row of dots per encoding and a panel per pass; 1 is free."""

from typing import Any

import altair as alt

from longitude.bench.rows import Row
from longitude.report.figure import COLORS, GREY, INK, themed
from longitude.report.wording import count

STEP, WIDTH = 19, 330


def chart(measured: dict[str, Any]) -> Any:
    """An Altair chart of a document."""
    rows = [Row(**row) for row in measured["rows"]]
    points = [point(row) for row in rows if row.ratio is not None]
    domain = ratio_domain([each[end] for each in points for end in ("ratio", "low", "high")])
    passes = list(dict.fromkeys(each["pass"] for each in points))
    panels = [_panel(points, passed, domain, first=passed == passes[0]) for passed in passes]
    first = rows[0]
    words = f"{first.batch} x {first.heads} heads x {first.head_dim}, {first.dtype}, {count(first.threads, 'thread')}"
    below = f"1 is free. {words}; medians of {first.turns} turns in one process, bars are quartiles."
    title = chart_title("Time of attention with a position encoding, over plain causal attention", below)
    return styled(alt.hconcat(*panels, spacing=18).properties(title=title))


def point(row: Row) -> dict[str, Any]:
    named = row.name if row.asked in ("", "auto") else f"{row.name} ({row.backend})"
    return {
        "name": named,
        "backend": row.backend,
        "pass": row.passed,
        "length": str(row.length),
        "ratio": row.ratio,
        "low": row.ratio_low,
        "high": row.ratio_high,
        "ms": (row.seconds or 0) * 1e3,
        "memory": "not measured" if row.memory_beyond_mib is None else f"{row.memory_beyond_mib:.0f} MiB",
    }


def _panel(points: list[dict[str, Any]], passed: str, domain: list[float], first: bool) -> Any:
    """Panel of encodings from fast to slow, by the last pass at the longest length."""
    last = {each["name"]: each["ratio"] for each in points}
    names = sorted(last, key=lambda name: last[name])
    lengths = sorted({each["length"] for each in points}, key=int)
    y, x = name_axis("name", names, 190, labels=first), ratio_axis(passed, domain)
    colors, circles = alt.Scale(domain=lengths, range=list(COLORS)), alt.Legend(orient="bottom", symbolType="circle")
    color = alt.Color("length:N", title="length", sort=lengths, scale=colors, legend=circles)
    numbers = [alt.Tooltip(f"{name}:Q", format=".2f") for name in ("ratio", "low", "high", "ms")]
    tooltip = ["name:N", "backend:N", "length:N", *numbers, "memory:N"]
    base = alt.Chart(alt.Data(values=[each for each in points if each["pass"] == passed]))
    one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(color=INK, strokeWidth=1.4).encode(x=alt.X("one:Q"))
    bars = base.mark_rule(strokeWidth=1.4, opacity=0.6).encode(alt.X("low:Q"), y, x2="high:Q", color=color)
    dots = base.mark_circle(size=62, opacity=0.95).encode(x, y, color=color, tooltip=tooltip)
    return alt.layer(one, bars, dots).properties(width=WIDTH, height=STEP * len(names))


# ---- shared by the charts of benchmarks/ -----------------------------------------------------------------------------
def ratio_domain(ratios: list[float]) -> list[float]:
    return [min(0.9, *ratios) / 1.05, max(2.0, *ratios) * 1.1]


def ratio_axis(title: str, domain: list[float]) -> alt.X:
    """Logarithmic axis of ratios."""
    ticks = [m * 10.0**e for e in range(-2, 4) for m in (1, 1.5, 2, 5) if m != 1.5 or e == 0]
    ticks = [tick for tick in ticks if domain[0] <= tick <= domain[1]]
    axis = alt.Axis(values=ticks, format="~g", titleAnchor="start", titleColor=INK)
    return alt.X("ratio:Q", title=title, scale=alt.Scale(type="log", domain=domain, nice=False), axis=axis)


def name_axis(field: str, names: list[str], limit: int, labels: bool = True) -> alt.Y:
    axis = alt.Axis(labels=labels, labelFontSize=12, labelColor=INK, labelLimit=limit, ticks=False, grid=True)
    return alt.Y(f"{field}:N", sort=names, title=None, scale=alt.Scale(domain=names), axis=axis)


def chart_title(title: str, subtitle: str | list[str]) -> alt.TitleParams:
    letters = {"fontSize": 15, "color": INK, "subtitleColor": GREY, "subtitleFontSize": 12}
    return alt.TitleParams(title, subtitle=subtitle, anchor="start", offset=14, **letters)


def styled(chart: Any) -> Any:
    """Apply the common colors and lettering to a chart, with space for wider fonts."""
    letters = {"labelFontSize": 12, "titleFontWeight": "normal", "columnPadding": 30}
    legend = alt.LegendConfig(labelColor=INK, titleColor=GREY, **letters)
    return themed(chart, padding={"left": 60, "right": 60, "top": 10, "bottom": 10}, legend=legend)
