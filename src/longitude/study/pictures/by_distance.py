"""The figure of accuracy by length and distance, of tasks whose examples have distances."""

from collections.abc import Iterator
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from longitude.report.figure import Figure, themed
from longitude.study.analysis import Analysis
from longitude.study.pictures import PICTURES, lines

COLUMN = "distance"
"""Of documents.parquet: how far what an example asks for lies before the question."""


@PICTURES.register("by-distance")
def by_distance(analysis: Analysis) -> Iterator[Figure]:
    """A panel for each label: a square for each length and distance, distances between powers of two together."""
    run = analysis.run
    tables = [trial.documents.assign(label=trial.label) for trial in run.trials if COLUMN in trial.documents]
    if not tables:
        return
    answers = pd.concat(tables).dropna(subset=[COLUMN])
    answers["from"] = 2 ** np.floor(np.log2(answers[COLUMN].clip(lower=1))).astype(int)
    groups: Any = answers.groupby(["label", "length", "from"], as_index=False)["exact"].agg(["mean", "size"])
    groups[COLUMN] = [f"{low} to {2 * low - 1}" if low > 1 else "1" for low in groups["from"]]
    order = [words for _, words in sorted({*zip(groups["from"], groups[COLUMN], strict=True)}, reverse=True)]
    score = alt.Color(
        "mean:Q",
        title="exact",
        scale=alt.Scale(domain=[0, 1], scheme="viridis"),
        legend=alt.Legend(format="%", orient="top"),
    )
    panels = []
    for label in run.labels:
        own = groups[groups["label"] == label]
        if len(own):
            base = lines.of_labels(own.to_dict("records")).encode(
                alt.X("length:O", title=f"length, {run.task.unit}", axis=alt.Axis(labelAngle=0)),
                alt.Y(f"{COLUMN}:O", sort=order, title="distance"),
                tooltip=[
                    "label:N",
                    "length:O",
                    f"{COLUMN}:O",
                    alt.Tooltip("mean:Q", format=".1%"),
                    alt.Tooltip("size:Q", title="answers"),
                ],
            )
            dark = alt.condition("datum.mean < 0.6", alt.value("#fff"), alt.value("#000"))
            words = base.mark_text().encode(text=alt.Text("mean:Q", format=".0%"), color=dark)
            panels.append(
                (base.mark_rect().encode(score) + words).properties(width=320, height=alt.Step(30), title=label)
            )
    chart = alt.concat(*panels, columns=min(2, len(panels))).add_params(alt.param(name="picked", value=[]))
    yield Figure(
        name="by-distance",
        title="Exact answers by length and distance",
        caption="The share of exact answers, all seeds together, by the length of an example and by how far what it asks for "
        "lies before the question.",
        alt="Heat maps of the share of exact answers by length and distance, one for each encoding.",
        chart=themed(chart),
        resizes=False,
    )
