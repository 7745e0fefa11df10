"""The figures of a metric by length, one line per label: losses, or exact answers with the line of solved lengths."""

from collections.abc import Iterator
from typing import Any

import altair as alt

from longitude.report.figure import GREY, Figure
from longitude.report.wording import percent
from longitude.study.analysis import Analysis
from longitude.study.answers import SOLVED, between as between_percent
from longitude.study.criterion import Finding
from longitude.study.losses import span
from longitude.study.pictures import MAIN, PICTURES, lines
from longitude.study.results import Run

STYLE: dict[str, Any] = {"width": 2.4, "dots": 46, "bands": True}


@PICTURES.register("by-length")
def by_length(analysis: Analysis) -> Iterator[Figure]:
    """One figure per method."""
    draw = answers_by_length if analysis.run.task.kind == "answers" else losses_by_length
    for method, findings in analysis.findings.items():
        if found := [each for each in findings if each.value is not None]:
            yield draw(analysis.run, found, method)


def name_of(method: str) -> str:
    """Of the figure of a method."""
    return f"{MAIN}-sliding" if method == "sliding" else MAIN


def losses_by_length(run: Run, found: list[Finding], method: str) -> Figure:
    """Bands for the 95 % intervals of the change."""
    points = [_with_band(each, found, run.reference) for each in found]
    lengths = sorted({each.length for each in found})
    domain = lines.domain_of([bound for point in points for bound in (point["from"], point["value"], point["to"])])
    fields = {
        "label:N": ("encoding",),
        "length:Q": ("window, bytes", "d"),
        "value:Q": (run.task.words, ".3f"),
        "interval:N": ("95% interval",),
        "change:N": (f"change from {run.reference}",),
        "span:N": ("95% interval, paired",),
        "documents:Q": ("documents",),
        "seeds:Q": ("seeds",),
    }
    x = _x_axis(run, lengths, "Window length in bytes", type="log", base=2)
    y = lines.y_axis(lines.axis_title(run), domain)
    sliding, stride = method == "sliding", run.config.stride
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
        chart=lines.line_chart(run, points, x, y, fields, **STYLE),
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
        "interval": lines.between(found.low, found.high),
        "change": percent(found.change) or "–",
        "span": span(found) or "–",
    }
    return found._asdict() | words | {"from": low, "to": high}


def answers_by_length(run: Run, found: list[Finding], method: str) -> Figure:
    """Bands for the 95 % intervals of the share of exact answers."""
    points = [each._asdict() | {"interval": between_percent(each), "from": each.low, "to": each.high} for each in found]
    lengths, task, domain = sorted({each.length for each in found}), run.task, [-0.03, 1.03]
    fields = {
        "label:N": ("encoding",),
        "length:Q": (task.unit, "d"),
        "value:Q": ("exact answers", ".1%"),
        "interval:N": ("95% interval",),
        "documents:Q": ("examples",),
        "seeds:Q": ("seeds",),
    }
    y = lines.y_axis(
        lines.axis_title(run), domain, format="%", values=[0, 0.25, 0.5, 0.75, SOLVED, 1], labelOverlap=False
    )
    solved = alt.Chart(alt.Data(values=[{"value": SOLVED}])).mark_rule(color=GREY, strokeWidth=1, opacity=0.6).encode(y)
    x = _x_axis(run, lengths, f"Length in {task.unit}")
    over = "examples and seeds" if any(each.seeds > 1 for each in found) else "examples"
    return Figure(
        name=name_of(method),
        title="Exact answers by length",
        caption="An answer counts when every symbol and its end are right, as the model writes it by itself, taking the "
        f"likeliest symbol each time. Bands are 95% intervals over {over}; the dashed line marks the longest training "
        f"examples, the level line {SOLVED:.0%}, from where a length is solved.",
        alt=f"Line chart of the share of exact answers against lengths of {lengths[0]} to {lengths[-1]} {task.unit}, one line "
        "for each encoding; the table below holds the numbers.",
        chart=lines.line_chart(run, points, x, y, fields, solved, **STYLE),
    )


def _x_axis(run: Run, lengths: list[int], title: str, **scale: Any) -> alt.X:
    low, high = min(*lengths, run.train_length), max(*lengths, run.train_length)
    domain = [low, high] if low < high else [low // 2 or 1, high * 2]
    return lines.x_axis("length", title, {"domain": domain, "padding": 14, **scale}, values=lengths, format="d")
