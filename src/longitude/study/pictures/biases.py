"""The figures of biases by offset, before and after training: what an encoding adds to the scores."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import torch

from longitude.checkpoints.quiet import quiet
from longitude.positions.base import Encoding
from longitude.positions.bias import FORBIDDEN
from longitude.positions.composed import Composed
from longitude.report.figure import EDGE, GREY, Figure, colour_of, themed
from longitude.study.analysis import Analysis
from longitude.study.pictures import PICTURES, lines
from longitude.study.results import Run, TrialResult
from longitude.study.train import build_model

POINTS = 120
"""Offsets of a line, about."""
TICKS = (0, *(4**k for k in range(10)))
"""Offsets that the axis and the table name."""


@PICTURES.register("biases")
def biases(analysis: Analysis) -> Iterator[Figure]:
    """A panel for each encoding of a label, in the first and the last layer that has its own; a line for each head."""
    run = analysis.run
    done = {trial.label: trial for trial in reversed(run.trials) if trial.status == "done"}  # the first seed of each
    drawn = [each for label in run.labels if label in done for each in panels_of(run, done[label])]
    if not drawn:
        return
    panels = [_panel(run, *each) for each in drawn]
    longest = max(run.task.positions(length) for length in (run.lengths[-1], run.train_length))
    chart = (
        alt.concat(*panels, columns=min(2, len(panels)))
        .resolve_scale(color="independent")
        .add_params(alt.param(name="picked", value=[]))
    )
    yield Figure(
        name="biases",
        title="Biases by offset",
        caption=f"What each head adds to the scores before softmax, by offset (query - key), for the query at position "
        f"{longest - 1}. Dashed: before training; solid: after it. A bias without parameters does not change. Drawn are biases "
        "that positions alone decide, of the first seed, in the first and the last layer where each has its own. The upright "
        f"line is at the training length, {run.train_length}.",
        alt="Line charts of biases by offset, one panel for each encoding that has one, one line for each head, before and "
        "after training.",
        chart=themed(chart, axisX=alt.AxisConfig(grid=False)),
        resizes=False,
        table=_table(drawn),
    )


def panels_of(run: Run, trial: TrialResult) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Titles and lines of panels: of the checkpoint of a trial, and of the weights that its seed draws."""
    if not (trial.folder / "config.json").exists():
        return
    before = _encodings(build_model(run.config, trial.label, trial.seed))
    with quiet():
        after = _encodings(run.task.model.from_pretrained(trial.folder))
    for kind, layers in before.items():
        causal = run.task.stack == "decoder" or "decoder" in kind[0]
        for place in sorted({0, len(layers) - 1}):
            fixed = not any(True for _ in after[kind][place].parameters())
            began = {} if run.config.start else {"before": layers}  # of --start, another study has it
            states = {"after": layers} if fixed else {**began, "after": after[kind]}
            points = [
                {"label": trial.label, "state": state, **point}
                for state, modules in states.items()
                for point in _lines(modules[place], run, causal)
            ]
            words = trial.label + (f", {kind[1]}" if len({kind for _, kind in before}) > 1 else "") + kind[0]
            words += f", layer {place + 1} of {len(layers)}" if len(layers) > 1 else ""
            words += ", fixed" if fixed else ""
            if points:
                yield words, points


def _encodings(model: Any) -> dict[tuple[str, str], list[Encoding]]:
    """(" in the encoder" or so, class) -> modules in the order of layers; one that all layers share is there once."""
    found = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, Encoding) and not isinstance(module, Composed):
            stack = next((f" in the {part}" for part in name.split(".") if part in ("encoder", "decoder")), "")
            found[stack, type(module).__name__].append(module)
    return found


@torch.no_grad()
def _lines(module: Encoding, run: Run, causal: bool) -> list[dict[str, Any]]:
    """Its bias for the last query of the longest window, a line for each head; none where tokens decide it, or it has none."""
    longest = max(run.task.positions(length) for length in (run.lengths[-1], run.train_length))
    offsets = np.unique(
        [*np.geomspace(1, longest, POINTS).astype(int) - 1, *(tick for tick in TICKS if tick < longest)]
    )
    if not causal:
        offsets = np.unique([*-offsets, *offsets])
    try:
        bias = module.bias(torch.tensor([longest - 1]), longest - 1 - torch.from_numpy(offsets))
    except ValueError:
        return []
    drawn = []
    for head, values in enumerate(bias[:, 0].double().numpy(), 1):
        finite = np.isfinite(values) & (values > FORBIDDEN)  # a one-sided bias forbids the rest
        drawn.append({"head": head, "offset": offsets[finite].tolist(), "bias": values[finite].round(4).tolist()})
    return drawn


def _table(drawn: list[tuple[str, list[dict[str, Any]]]]) -> pd.DataFrame:
    """A line for each head, at the offsets that the axes name."""
    points = [
        {"head": f"{title}, head {line['head']}, {line['state']}", "offset": offset, "bias": bias}
        for title, panel in drawn
        for line in panel
        for offset, bias in zip(line["offset"], line["bias"], strict=True)
        if abs(offset) in TICKS
    ]
    return lines.table_of(points, "head", "offset", lambda each: f"{each['bias']:.2f}")


def _panel(run: Run, title: str, points: list[dict[str, Any]]) -> Any:
    label = points[0]["label"]
    colour = colour_of(run.labels.index(label))
    offsets = [offset for point in points for offset in point["offset"]]
    ticks = sorted({tick for each in TICKS for tick in (each, -each) if min(offsets) <= tick <= max(offsets)})
    scale = alt.Scale(type="symlog", domain=[min(offsets), max(offsets)], nice=False)
    axis = alt.Axis(grid=False, values=ticks, domain=True, domainColor=EDGE, **lines.SPARSE)
    x = alt.X("offset:Q", title="offset", scale=scale, axis=axis)
    trained = (
        alt.Chart(alt.Data(values=[{"offset": run.train_length}])).mark_rule(strokeDash=[4, 4], color=GREY).encode(x)
    )
    base = lines.of_labels(points).transform_flatten(["offset", "bias"])
    dash = alt.StrokeDash("state:N", scale=alt.Scale(domain=["after", "before"], range=[[1, 0], [4, 3]]), legend=None)
    shade = alt.Color("state:N", scale=alt.Scale(domain=["after", "before"], range=[colour, GREY]), legend=None)
    tooltip = ["label:N", "head:O", "state:N", "offset:Q", alt.Tooltip("bias:Q", format=".3f")]
    y = alt.Y("bias:Q", title=None, scale=alt.Scale(zero=False))
    line = base.mark_line(strokeWidth=1.6).encode(x, y, shade, detail="head:N", strokeDash=dash)
    easy = base.mark_point(size=90, filled=True, opacity=0, aria=False).encode(x, y, tooltip=tooltip)
    return alt.layer(trained, line, easy, title=title).properties(width=320, height=210, description=label)
