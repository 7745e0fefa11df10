"""The figure of quality against throughput."""

from collections.abc import Iterator

import altair as alt

from longitude.report.figure import Figure, apart, colour_of, themed
from longitude.study.analysis import Analysis
from longitude.study.pictures import PICTURES, lines

HEIGHT = 300


@PICTURES.register("throughput")
def throughput(analysis: Analysis) -> Iterator[Figure]:
    """A point for each label: the metric at the training length and at the longest, by training tokens per second."""
    run = analysis.run
    ends = {run.reference, run.lengths[-1]}
    seconds = {
        label: [trial.training_seconds for trial in run.of(label) if trial.status == "done" and trial.training_seconds]
        for label in run.labels
    }
    points = [
        {
            "label": each.label,
            "length": each.length,
            "value": each.value,
            "tokens": run.tokens(each.label) / (sum(times) / len(times)),
            "models": len(times),
        }
        for each in analysis.main
        if each.length in ends and each.value is not None and (times := seconds[each.label])
    ]
    if len({point["label"] for point in points}) < 2:
        return
    labels = [label for label in run.labels if any(point["label"] == label for point in points)]
    colours = alt.Scale(domain=labels, range=[colour_of(run.labels.index(label)) for label in labels])
    colour = alt.Color("label:N", scale=colours, legend=None)
    share = ".0%" if run.task.kind == "answers" else ".2f"
    rates = [point["tokens"] for point in points]
    x = lines.x_axis(
        "tokens",
        f"Training throughput, {run.task.loss_unit}s per second",
        {"domain": [0.9 * min(rates), 1.15 * max(rates)]},
        format="~s",
        tickCount=6,
    )
    y = lines.y_axis(lines.axis_title(run), lines.domain_of([point["value"] for point in points]), format=share)
    base = lines.of_labels(points)
    tooltip = [
        alt.Tooltip("label:N", title="encoding"),
        alt.Tooltip("length:Q", title=run.task.unit),
        alt.Tooltip("value:Q", title=run.task.words, format=share),
        alt.Tooltip("tokens:Q", title="training throughput", format=".3s"),
        alt.Tooltip("models:Q", title="models timed"),
    ]
    shape = alt.Shape(
        "length:N",
        legend=None,
        scale=alt.Scale(domain=sorted(ends), range=["circle", "triangle-up"][: len(ends)]),
    )
    dots = base.mark_point(size=90, filled=True, opacity=1).encode(x, y, colour, shape, tooltip=tooltip)
    link = base.mark_line(strokeWidth=1, opacity=0.5).encode(x, y, colour)
    last = sorted((p for p in points if p["length"] == run.lengths[-1]), key=lambda point: point["value"])
    low, high = y["scale"]["domain"]
    heights = apart([point["value"] for point in last], gap := 15 / HEIGHT * (high - low))
    up = max(0.0, low + gap / 2 - heights[0]) if last else 0.0  # off the axis
    named = [{**point, "at": height + up} for point, height in zip(last, heights, strict=True)]
    words = lines.of_labels(named).mark_text(align="left", dx=9, fontSize=13, fontWeight=600, limit=150)
    chart = alt.layer(link, dots, words.encode(x, alt.Y("at:Q"), colour, text="label:N")).add_params(
        alt.param(name="picked", value=[])
    )
    table = lines.table_of(points, "label", "length", lambda each: f"{each['value']:{share}}")
    by_label = {point["label"]: f"{point['tokens']:,.0f}" for point in points}
    table.insert(1, f"{run.task.loss_unit}s per second", [by_label[label] for label in table["label"]])
    marks = [f"{length} ({words})" for length, words in zip(sorted(ends), ("circles", "triangles"), strict=False)]
    yield Figure(
        name="throughput",
        title="Quality and throughput",
        caption=f"{run.task.words.capitalize()} at {' and '.join(marks)} {run.task.unit} against "
        f"{run.task.loss_unit}s trained on per second on the machine of this study, as timed while it ran: other work on it "
        "shows here, so small differences mean nothing.",
        alt=f"Scatter chart of {run.task.words} against training throughput, one colour for each encoding.",
        table=table,
        chart=themed(chart.properties(height=HEIGHT, padding={"left": 6, "right": 6, "top": 26, "bottom": 6})),
    )
