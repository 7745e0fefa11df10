"""What the charts of targets and of decoding share, and their files."""

from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from longitude.bench.rows import Row
from longitude.report.figure import GREY, INK, save, themed
from longitude.report.page import vega_notice
from longitude.runs.files import atomic, write_json

STEP = 19
"""Height of a row, in pixels."""


def write(out: Path, measured: dict[str, Any], chart: Any) -> None:
    """Write the JSON, and the chart as .svg and as a self-contained page, each atomically."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, measured)
    save(chart, out.with_suffix(".svg"))
    with atomic(out.with_suffix(".html")) as unfinished:
        page = vl_convert.vegalite_to_html(chart.to_dict(), bundle=True)
        unfinished.write_text(page.replace("<head>", f"<head>\n<!--\n{vega_notice()}-->", 1), encoding="utf-8")


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
