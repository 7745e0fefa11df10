"""The page of a measurement, one HTML file that needs nothing else and no network, and its tables on the terminal."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from longitude.measure import retrieval
from longitude.measure.config import SAME_TARGETS
from longitude.measure.rows import Row
from longitude.measure.run import ANSWERS, REPORT, Results
from longitude.measure.tables import Cell, by_position, effective, sentences, tables, wrong_answers
from longitude.report.figure import COLORS, Figure, themed, write_page
from longitude.report.table import table as rows_of
from longitude.report.wording import legible


def write_report(results: Results) -> Path:
    """Write report.html into the run directory, whole or not at all; returns its path."""
    path = results.path / REPORT
    write_page(
        path,
        "longitude.measure",
        "report.html.j2",
        figures(results),
        results=results,
        tables=tables(results),
        sentences=sentences(results),
        effective=effective(results),
        wrong=wrong_answers(results),
        definition=retrieval.DEFINITION,
        protocol=_protocol(results),
    )
    return path


def _protocol(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """The question in readable form, and the protocol of the rows."""
    about = results.question
    text = dict(about["text"] or {})
    for model in about["models"].values():
        if model["unit"]:
            text[f"read by {model['label']}"] = f"{model['documents']} {model['unit']}"
    columns = ("bos", "truncation", "weighting", "dtype", "backend", "prefill", "commit")
    rows = {name: sorted({str(getattr(row, name)) for row in results.rows if getattr(row, name)}) for name in columns}
    models = {model["label"]: f"{path}, {model['positions']}" for path, model in about["models"].items()}
    machine = {**about["machine"], "device": about["device"], "asked": about["at"]}
    parts = {"Models": models, "Text": text, "Options": about["configuration"], "Rows": rows, "Machine": machine}
    return [(name, legible(values)) for name, values in (parts | {"Versions": about["versions"]}).items() if values]


def terminal(results: Results) -> Iterator[Any]:
    """Tables and sentences for `longitude.report.table.show`."""
    from rich.text import Text

    def text(cell: Cell) -> Text:
        below = f"\n{cell.interval}" if cell.interval else ""
        return Text.assemble((cell.value, "bold" if cell.trained else ""), (below, "dim"))

    for table in tables(results):
        heads = ("model", "positions", "trained at", *map(str, table.lengths))
        rows = [(*about, *map(text, cells)) for *about, cells in table.lines]
        yield rows_of(*heads, rows=rows, words=2, title=table.title, caption=f"{table.caption}\n")
    if profile := by_position(results):
        longest, places = profile
        rows = [(f"{first} to {last}", *values) for (first, last), values in places.items()]
        yield rows_of(
            "positions", *results.labels, rows=rows, title=f"perplexity by position, windows of {longest} tokens"
        )
        yield ""
    if lengths := effective(results):
        yield "effective length: " + ", ".join(f"{label} {length or 'none'}" for label, length in lengths.items())
        yield retrieval.DEFINITION
        yield ""
    if results.answers:
        yield f"answers: {results.path / ANSWERS}"
    yield from sentences(results)


# ---- charts ----------------------------------------------------------------------------------------------------------
FIRST = 16
"""Positions below are not drawn: with so little context every model is bad."""


def figures(results: Results) -> list[Figure]:
    """All figures that the run has numbers for."""
    rows = [row for row in results.rows if row.value is not None and (row.task != "text" or row.metric != "perplexity")]
    ways = ([row for row in rows if row.method == way] for way in ("non-overlapping", "sliding", SAME_TARGETS))
    flat = next(filter(None, ways), [])
    by_position = [row for row in rows if row.method == "per-position" and (row.position_from or 0) >= FIRST]
    drawn: list[Figure] = []
    if flat:
        about = f"Bits per byte, {flat[0].method} windows, lower is better; bands are 95% intervals over documents."
        ticks = alt.Axis(values=sorted({row.length for row in flat if row.length}))
        x = alt.X("length:Q", title="window length, tokens", scale=alt.Scale(type="log", base=2), axis=ticks)
        drawn.append(_lines(results, flat, "by-length", "Loss by window length", about, x))
    if by_position:
        about = f"Bits per byte of the targets at each position of the longest window, from position {FIRST} on."
        x = alt.X("position:Q", title="position in the window, tokens", scale=alt.Scale(type="log", base=2))
        drawn.append(_lines(results, by_position, "by-position", "Loss by position", about, x))
    tasks = dict.fromkeys(row.task for row in rows if row.depth is not None)
    return drawn + [_grid(results, rows, task) for task in tasks]


def _lines(results: Results, rows: list[Row], name: str, title: str, about: str, x: alt.X) -> Figure:
    """A line per model with a band, by length or by the middle of positions."""
    points = [
        {"model": row.label, "length": row.length, "from": row.position_from, "to": row.position_to, "value": row.value}
        | {"low": row.low or row.value, "high": row.high or row.value}
        | {"position": ((row.position_from or 0) * (row.position_to or 1)) ** 0.5}
        for row in rows
    ]
    colors = alt.Scale(domain=results.labels, range=[COLORS[i % len(COLORS)] for i in range(len(results.labels))])
    legend = alt.Legend(title=None, orient="top", labelLimit=400, symbolOpacity=1)
    color = alt.Color("model:N", sort=results.labels, scale=colors, legend=legend)
    base = alt.Chart(alt.Data(values=points))
    y = alt.Y("value:Q", title="bits per byte", scale=alt.Scale(zero=False))
    places = ["length:Q"] if name == "by-length" else ["from:Q", "to:Q"]
    layers = [
        base.mark_area(opacity=0.15).encode(x, alt.Y("low:Q", title="bits per byte"), alt.Y2("high:Q"), color),
        base.mark_line().encode(x, y, color),
        base.mark_point(filled=True, size=45).encode(
            x, y, color, tooltip=["model:N", *places, "value:Q", "low:Q", "high:Q"]
        ),
    ]
    return Figure(name, title, about, about, themed(alt.layer(*layers).properties(height=340)))


def _grid(results: Results, rows: list[Row], task: str) -> Figure:
    """A panel per model; a square per length and depth."""
    panels, numbers = [], []
    for label in results.labels:
        points = [
            {"length": row.length, "depth": row.depth, "score": row.value}
            for row in rows
            if (row.task, row.label) == (task, label) and row.depth is not None
        ]
        numbers += [{"model": label, **point} for point in points]
        base = alt.Chart(alt.Data(values=points), title=label).encode(
            alt.X("length:O", title="length, tokens", axis=alt.Axis(labelAngle=0)), alt.Y("depth:O", title="depth")
        )
        score = alt.Color("score:Q", scale=alt.Scale(domain=[0, 1], scheme="viridis"), legend=alt.Legend(format="%"))
        dark = alt.condition("datum.score < 0.6", alt.value("white"), alt.value("black"))
        tooltip = ["length:O", "depth:O", alt.Tooltip("score:Q", format=".0%")]
        square = base.mark_rect().encode(score, tooltip=tooltip)
        percent = base.mark_text().encode(text=alt.Text("score:Q", format=".0%"), color=dark)
        if points:
            panels.append((square + percent).properties(width=alt.Step(64), height=alt.Step(34)))
    metric, summary = retrieval.TASKS[task].metric.capitalize(), retrieval.TASKS[task].summary
    about = f"{metric} by length and by the depth of the needle, 0 first and 1 last: {summary}."
    chart = themed(alt.concat(*panels, columns=2))
    scores = pd.DataFrame(numbers).pivot_table("score", ["model", "depth"], "length", sort=False)
    table = scores.map("{:.0%}".format, na_action="ignore").fillna("").reset_index()
    return Figure(f"grid-{task}", f"Retrieval: {task}", about, about, chart, resizes=False, table=table)
