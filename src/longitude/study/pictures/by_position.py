"""The figures of losses by position in the longest window: their mean, and those of one text, by color."""

import math
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pandas as pd

from longitude.measure.rows import Row
from longitude.report import passage
from longitude.report.figure import Figure
from longitude.report.wording import and_, papers
from longitude.study.analysis import Analysis
from longitude.study.pictures import PICTURES, lines
from longitude.study.pictures.by_length import NAMED
from longitude.study.results import Run

FIRST = 16
"""Positions below are not drawn: with so little context every model is bad, and the axis would show little else."""

BREAKS = 0.1
"""Relative rise of the loss from which on a model counts as breaking."""


@PICTURES.register("by-position")
def by_position(analysis: Analysis) -> Iterator[Figure]:
    """Figure of the mean loss over seeds by position in the longest window."""
    run = analysis.run
    rows = [row for row in run.rows if row.method == "per-position" and row.value is not None]
    rows = [row for row in rows if (row.position_to or 0) > FIRST]
    longest = max((row.window or 0 for row in rows), default=0)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.window == longest:
            groups.setdefault((row.label, row.position_from, row.position_to), []).append(row)
    if not groups:
        return
    points = [_at_positions(*key, rows=group) for key, group in groups.items()]
    scale = {"type": "log", "base": 2, "domain": [FIRST, longest], "padding": 14}
    ticks = [2**k for k in range(4, longest.bit_length())]
    title = f"Position in a window of {longest} {run.task.unit}{lines.LOG}"
    x = lines.x_axis("position", title, scale, values=ticks, format="d")
    y = lines.y_axis(lines.axis_title(run), lines.domain_of([point["value"] for point in points]))
    fields = {
        "label:N": ("encoding",),
        "from:N": ("positions",),
        "value:Q": (run.task.words, ".3f"),
        "spread:N": ("range of seeds" if len(run.config.seeds) > 1 else "95% interval",),
        "seeds:Q": ("seeds",),
    }
    values: Any = pd.DataFrame(points).pivot_table("value", "label", "from", sort=False)
    yield Figure(
        name="by-position",
        title=_finding(run, points),
        caption=f"Mean loss by position in a window of {longest} {run.task.unit}. An encoding breaks at the first "
        f"position after which its loss stays more than {BREAKS:.0%} above its loss at the last positions up to "
        f"{run.train_length}. Positions below {FIRST} are not drawn.",
        alt=f"Line chart of {run.task.words} by position in windows of {longest} {run.task.unit}, one line per encoding.",
        axes=("x", "y"),
        table=values.map("{:.3f}".format, na_action="ignore").fillna("").reset_index(),
        chart=lines.line_chart(run, points, x, y, fields, width=2.2, dots=14),
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
        "spread": lines.between(rows[0].low, rows[0].high) if alone else lines.between(min(values), max(values)),
        "seeds": len(rows),
    }


def _finding(run: Run, points: list[dict[str, Any]]) -> str:
    """Which labels break where in the window: "RoPE breaks from position 64; ALiBi does not break"."""
    names, at = run.names, {}
    for label in dict.fromkeys(point["label"] for point in points):
        own = sorted((point for point in points if point["label"] == label), key=lambda point: point["position"])
        inside = [point["value"] for point in own if point["position"] <= run.train_length]
        beyond = [point for point in own if point["position"] > run.train_length]
        bound = (1 + BREAKS) * inside[-1] if inside else math.inf
        high = [*takewhile(lambda point, bound=bound: point["value"] > bound, reversed(beyond))]
        at[label] = int(high[-1]["from"].partition(" ")[0]) if high else None
    broken = sorted((place, label) for label, place in at.items() if place is not None)
    if not broken:
        return "No encoding breaks within the window"
    if len(broken) > NAMED:
        return f"{len(broken)} of {len(at)} break within the window, the first from position {broken[0][0]}"
    words = [f"{names[label]} from position {place}" for place, label in broken]
    return f"Breaks within the window: {and_(words)}"


@PICTURES.register("one-text")
def one_text(analysis: Analysis) -> Iterator[Figure]:
    """One text under the first seed of each label, as far as its window was measured."""
    run = analysis.run
    names, panels = papers(run.labels), {}
    for label in run.labels:
        done = next((trial for trial in run.of(label) if trial.status == "done"), None)
        if done and done.window is not None:
            bits = done.window["nats"].to_numpy() / math.log(2)
            panels[names[label]] = passage.Panel([*done.window["text"]], bits, run.train_length, label)
    if panels:
        longest = max(len(panel.pieces) for panel in panels.values())
        caption = f"One held-out text of {longest:,} {run.task.unit}, of median compressed size. Models: the first seed of each."
        yield passage.figure(passage.Passage(caption=caption, unit=run.task.unit.removesuffix("s"), panels=panels))
