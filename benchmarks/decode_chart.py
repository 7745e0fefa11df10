"""The chart of decoding: time of a step above, bytes of the cache below, over the context; colors for the growth."""

import math
from typing import Any

import altair as alt

from charts import chart_title, styled
from longitude.report.figure import COLORS, apart
from longitude.report.wording import count

COLOR = {"O(1)": COLORS[2], "O(log N)": COLORS[0], "O(N)": COLORS[1]}
HEIGHT, WIDTH, LETTERS = 330, 560, 15


def chart(measured: dict[str, Any]) -> Any:
    """Both axes are logarithmic. Behind each name: the exponent."""
    lines = {line["label"]: line for line in measured["lines"]}
    points = [
        {
            "label": row["label"],
            "growth": lines[row["label"]]["growth"],
            "context": row["context"],
            "ms": row["seconds"] * 1e3,
            "low": row["seconds_low"] * 1e3,
            "high": row["seconds_high"] * 1e3,
            "megabytes": row["cache_bytes"] / 1e6,
            "bytes": row["bytes_per_token"],
        }
        for row in measured["rows"]
    ]
    panels = [
        _panel(points, "ms", "Milliseconds per token", {label: line["time_exponent"] for label, line in lines.items()}),
        _panel(
            points, "megabytes", "Megabytes of cache", {label: line["memory_exponent"] for label, line in lines.items()}
        ),
    ]
    first = measured["rows"][0]
    title = chart_title(
        "What a generated token costs behind a context",
        [
            f"One step of a small decoder, {count(first['threads'], 'thread')}, medians of {first['turns']} turns in one "
            "process; bars are quartiles.",
            "Behind each name: p, where it grows as N^p, fitted to the longest contexts.",
        ],
    )
    return styled(alt.vconcat(*panels, spacing=26).resolve_scale(color="shared").properties(title=title))


def _panel(points: list[dict[str, Any]], field: str, title: str, exponents: dict[str, float | None]) -> Any:
    contexts = sorted({point["context"] for point in points})
    values = [point[field] for point in points]
    domain = [min(values) / 1.25, max(values) * 1.25]
    x = alt.X(
        "context:Q",
        title="Tokens in the cache",
        scale=alt.Scale(type="log", base=2, domain=[contexts[0], max(contexts[-1], contexts[0] + 1)], nice=False),
        axis=alt.Axis(values=contexts, format="d", grid=False),
    )
    above = {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleX": -34, "titleY": -14}
    scale = alt.Scale(type="log", domain=domain, nice=False)
    y = alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(values=ticks(domain), format="~g", **above))
    color = alt.Color(
        "growth:N",
        title="cache grows as",
        scale=alt.Scale(domain=[*COLOR], range=[*COLOR.values()]),
        legend=alt.Legend(orient="bottom", symbolType="stroke", symbolStrokeWidth=3, symbolOpacity=1),
    )
    tooltip = [
        alt.Tooltip("label:N", title="mixer"),
        alt.Tooltip("growth:N", title="its cache"),
        alt.Tooltip("context:Q", title="tokens", format=",d"),
        alt.Tooltip("ms:Q", title="milliseconds", format=".2f"),
        alt.Tooltip("megabytes:Q", title="megabytes", format=".3f"),
        alt.Tooltip("bytes:Q", title="bytes per token", format=",.0f"),
    ]
    base = alt.Chart(alt.Data(values=points)).encode(x, color=color)
    last = [point for point in points if point["context"] == contexts[-1]]
    names = alt.Chart(alt.Data(values=ends(last, field, domain, exponents))).encode(color=color)
    layers = [
        base.mark_line(strokeWidth=2).encode(y, detail="label:N"),
        base.mark_point(filled=True, size=34, opacity=1).encode(y, tooltip=tooltip),
        names.mark_text(align="left", fontSize=12, fontWeight=600).encode(
            x=alt.value(WIDTH + 30), y="at:Q", text="name:N"
        ),
        names.mark_rule(strokeWidth=0.8, opacity=0.5).encode(
            x=alt.value(WIDTH + 5), x2=alt.value(WIDTH + 27), y=alt.Y(f"{field}:Q"), y2="at:Q"
        ),
    ]
    if field == "ms":
        layers.insert(1, base.mark_rule(strokeWidth=1.4, opacity=0.5).encode(alt.Y("low:Q"), y2="high:Q"))
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def ends(
    points: list[dict[str, Any]], field: str, domain: list[float], exponents: dict[str, float | None]
) -> list[dict[str, Any]]:
    """Names with exponents at the ends of lines, moved apart on the logarithmic axis."""
    ordered = sorted(points, key=lambda point: point[field])
    low, high = (math.log(end) for end in domain)
    heights = apart([math.log(point[field]) for point in ordered], LETTERS / HEIGHT * (high - low))
    shift = max(0.0, low - heights[0]) - max(0.0, heights[-1] - high)

    def name(label: str) -> str:
        p = exponents[label]
        return label if p is None else f"{label}  {round(p, 2) + 0.0:.2f}"  # and no -0.00

    return [{**point, "name": name(point["label"]), "at": math.exp(y + shift)} for point, y in zip(ordered, heights)]


def ticks(domain: list[float]) -> list[float]:
    decades = math.log10(domain[1] / domain[0])
    steps = (1,) if decades > 2 else (1, 2, 5) if decades > 0.7 else (1, 2, 3, 4, 5, 7)
    return [tick for e in range(-6, 6) for m in steps if domain[0] <= (tick := m * 10.0**e) <= domain[1]]
