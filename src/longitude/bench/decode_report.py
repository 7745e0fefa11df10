"""The steps of decoding, shown: a table, and one chart with time above and memory below."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import altair as alt
from rich.table import Table

from longitude.bench.config import BenchConfig
from longitude.bench.decode import GROWTHS, LAYERS, PIECE, TAIL, WIDTH, Line, Step
from longitude.bench.figures import configured
from longitude.bench.report import headed
from longitude.bench.rows import counted
from longitude.report.figure import COLOURS, GREY as QUIET, INK, apart

PROTOCOL = (
    f"A decoder of {LAYERS} layers, {WIDTH} wide, random weights, float32, one sequence. Each cache is filled by a prefill in "
    f"pieces of {PIECE} tokens. Each turn takes one step, a token in and logits out, with every label behind every context, in "
    "one process; the first turn is not counted, and a turn makes each context one token longer. seconds: the median of a step. "
    "ratio: to the step of the same label behind `against` tokens in the same turn, its median and quartiles over turns. "
    "cache_bytes: the memory behind every tensor of the cache, room to grow into included, before the first step. Exponents: p "
    f"of N^p, fitted to the contexts from the longest over {TAIL} on."
)


def document(config: BenchConfig, lines: list[Line], steps: list[Step]) -> dict[str, Any]:
    """Everything that was measured, as plain data."""
    return headed(config, PROTOCOL) | {
        "lines": [asdict(line) for line in lines],
        "rows": [step.as_dict() for step in steps],
    }


def of(measured: dict[str, Any]) -> tuple[list[Line], list[Step]]:
    """The lines and steps of a document."""
    rows = [{name: value for name, value in row.items() if name != "bytes_per_token"} for row in measured["rows"]]
    return [Line(**line) for line in measured["lines"]], [Step(**row) for row in rows]


# ---- for the terminal ------------------------------------------------------------------------------------------------
def parts(measured: dict[str, Any]) -> list[Any]:
    """A document for the terminal."""
    lines, steps = of(measured)
    first = steps[0]
    heading = (
        f"one step of decoding behind a context; {LAYERS} layers, {WIDTH} wide, {counted(first.threads)}, {first.clock} time, "
        f"medians of {first.turns}"
    )
    time = table(lines, steps, "milliseconds", lambda step: f"{step.seconds * 1e3:.2f}", "time_exponent")
    memory = table(lines, steps, "cache, MB", lambda step: _short(step.cache_bytes / 1e6), "memory_exponent")
    return [
        heading, time, memory,
        f"p of N^p: fitted to the contexts from the longest over {TAIL} on; O(...): of the cache, as the mixer declares it",
    ]  # fmt: skip


def failures(measured: dict[str, Any]) -> bool:
    """Whether something could not be timed: nothing is left out, so what fails is an error."""
    return False


def table(lines: list[Line], steps: list[Step], what: str, cell: Callable[[Step], str], exponent: str) -> Table:
    """A line per label, by growth: a cell behind each context, and the exponent; of time, the last over `against`, too."""
    contexts = sorted({step.context for step in steps})
    of_time = exponent == "time_exponent"
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column(what, no_wrap=True)
    for heading in ("", *map(str, contexts), *([f"/{steps[0].against}"] if of_time else []), "N^p"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for growth in GROWTHS:
        for line in lines:
            if line.growth != growth:
                continue
            own = {step.context: step for step in steps if step.label == line.label}
            ratio = own[contexts[-1]].ratio
            over = [] if not of_time else ["" if ratio is None else f"{ratio:.2f}"]
            cells = [cell(own[context]) for context in contexts]
            shown.add_row(line.label, growth, *cells, *over, _power(getattr(line, exponent)))
    shown.add_row()
    return shown


def _short(megabytes: float) -> str:
    return f"{megabytes:.3f}" if megabytes < 1 else f"{megabytes:.3g}"


def _power(exponent: float | None) -> str:
    return "" if exponent is None else f"{round(exponent, 2) + 0.0:.2f}"  # and no -0.00


# ---- the chart -------------------------------------------------------------------------------------------------------
COLOUR = dict(zip(GROWTHS, (COLOURS[2], COLOURS[0], COLOURS[1]), strict=True))
HEIGHT, WIDE, LETTERS = 330, 560, 15


def chart(measured: dict[str, Any]) -> Any:
    """Time of a step above, bytes of the cache below, over the context; both axes logarithmic, colours for the growth."""
    lines, steps = of(measured)
    growth = {line.label: line.growth for line in lines}
    points = [
        {
            "label": step.label,
            "growth": growth[step.label],
            "context": step.context,
            "ms": step.seconds * 1e3,
            "low": step.seconds_low * 1e3,
            "high": step.seconds_high * 1e3,
            "megabytes": step.cache_bytes / 1e6,
            "bytes": step.bytes_per_token,
        }
        for step in steps
    ]
    exponents = {
        "ms": {line.label: line.time_exponent for line in lines},
        "megabytes": {line.label: line.memory_exponent for line in lines},
    }
    panels = [
        _panel(points, "ms", "Milliseconds per token", exponents["ms"], "low"),
        _panel(points, "megabytes", "Megabytes of cache", exponents["megabytes"]),
    ]
    first = steps[0]
    title = alt.TitleParams(
        "What a generated token costs behind a context",
        subtitle=[
            f"One step of a decoder of {LAYERS} layers, {WIDTH} wide, {counted(first.threads)}, medians of {first.turns} turns "
            "in one process; bars are quartiles.",
            f"Behind each name: p, where it grows as N^p, fitted to the contexts from the longest over {TAIL} on.",
        ],
        anchor="start", fontSize=15, color=INK, subtitleColor=QUIET, subtitleFontSize=12, offset=14,
    )  # fmt: skip
    return configured(alt.vconcat(*panels, spacing=26).resolve_scale(color="shared").properties(title=title))


def _panel(
    points: list[dict[str, Any]], field: str, title: str, exponents: dict[str, float | None], low: str | None = None
) -> Any:
    contexts = sorted({point["context"] for point in points})
    domain = _domain([point[field] for point in points])
    x = alt.X(
        "context:Q",
        title="Tokens in the cache",
        scale=alt.Scale(type="log", base=2, domain=[contexts[0], max(contexts[-1], contexts[0] + 1)], nice=False),
        axis=alt.Axis(values=contexts, format="d", grid=False),
    )
    y = alt.Y(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(type="log", domain=domain, nice=False),
        axis=alt.Axis(
            values=_ticks(domain),
            format="~g",
            titleAngle=0,
            titleAlign="left",
            titleAnchor="end",
            titleX=-34,
            titleY=-14,
        ),
    )
    colour = alt.Color(
        "growth:N",
        title="cache grows as",
        scale=alt.Scale(domain=list(GROWTHS), range=[COLOUR[growth] for growth in GROWTHS]),
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
    base = alt.Chart(alt.Data(values=points))
    layers = [base.mark_line(strokeWidth=2).encode(x, y, color=colour, detail="label:N")]
    if low is not None:
        layers.append(base.mark_rule(strokeWidth=1.4, opacity=0.5).encode(x, alt.Y("low:Q"), y2="high:Q", color=colour))
    layers.append(base.mark_point(filled=True, size=34, opacity=1).encode(x, y, color=colour, tooltip=tooltip))
    ends = _ends([point for point in points if point["context"] == contexts[-1]], field, domain, exponents)
    far = alt.value(WIDE + 30)
    text = alt.Chart(alt.Data(values=ends)).mark_text(align="left", fontSize=12, fontWeight=600)
    layers.append(text.encode(x=far, y=alt.Y("at:Q"), text="name:N", color=colour))
    leader = alt.Chart(alt.Data(values=ends)).mark_rule(strokeWidth=0.8, opacity=0.5)
    layers.append(
        leader.encode(x=alt.value(WIDE + 5), x2=alt.value(WIDE + 27), y=alt.Y(f"{field}:Q"), y2="at:Q", color=colour)
    )
    return alt.layer(*layers).properties(width=WIDE, height=HEIGHT)


def _ends(
    points: list[dict[str, Any]], field: str, domain: list[float], exponents: dict[str, float | None]
) -> list[dict[str, Any]]:
    """Names with exponents at the ends of lines, moved apart on the logarithmic axis."""
    ordered = sorted(points, key=lambda point: point[field])
    low, high = (math.log(end) for end in domain)
    gap = LETTERS / HEIGHT * (high - low)
    heights = apart([math.log(point[field]) for point in ordered], gap)
    shift = max(0.0, low - heights[0]) - max(0.0, heights[-1] - high)
    return [
        {
            **point,
            "name": f"{point['label']}  {_power(exponents[point['label']])}".rstrip(),
            "at": math.exp(height + shift),
        }
        for point, height in zip(ordered, heights, strict=True)
    ]


def _domain(values: list[float]) -> list[float]:
    return [min(values) / 1.25, max(values) * 1.25]


def _ticks(domain: list[float]) -> list[float]:
    wide = math.log10(domain[1] / domain[0])
    steps = [
        m * 10.0**e
        for e in range(-6, 6)
        for m in ((1,) if wide > 2 else (1, 2, 5) if wide > 0.7 else (1, 2, 3, 4, 5, 7))
    ]
    return [step for step in steps if domain[0] <= step <= domain[1]]
