"""The figure of training losses."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from longitude.report.figure import Figure
from longitude.study.analysis import Analysis, state
from longitude.study.pictures import PICTURES, lines
from longitude.study.results import TrialResult

POINTS = 100
"""Approximate number of points drawn for each line."""


@PICTURES.register("training")
def training(analysis: Analysis) -> Iterator[Figure]:
    """Figure of the training loss by targets, lightly smoothed, one line per trial."""
    run = analysis.run
    width = max((_width(trial) for trial in run.trials if trial.losses), default=1)
    drawn = [_points(trial) for trial in run.trials if trial.losses]
    points = [point for each in drawn for point in each]
    if not points:
        return
    quarters = [each[place * (len(each) - 1) // 4] for each in drawn for place in (1, 2, 3, 4)]
    unit, text = run.task.loss_unit, not run.task.generated
    most = max(point["tokens"] for point in points)
    # the first steps leave it at the top
    domain = lines.domain_of([p["value"] for p in points if p["tokens"] > 0.05 * most])
    x = lines.x_axis("tokens", f"Training tokens ({unit}s)", {"domain": [0, most]}, format="~s", tickCount=6)
    y = lines.y_axis(f"Bits per {unit}, lower is better", domain)
    fields = {
        "trial:N": ("model",),
        "step:Q": ("step", "d"),
        "tokens:Q": ("tokens", ",d"),
        "value:Q": (f"bits per {unit}", ".3f"),
        "state:N": ("the run",),
    }
    on = f"{'windows of' if text else 'examples of up to'} {run.train_length} {run.task.unit}"
    diverged = sum(trial.status == "diverged" for trial in run.trials)
    models = f"{diverged} of {len(run.trials)} models" if diverged else "No model"
    smoothed = f", a moving average of {width} steps" if width > 1 else ""
    yield Figure(
        name="training",
        title=f"{models} diverged in training",
        caption=f"Training: loss on {on}{smoothed}. All encodings of a seed read the same "
        f"{run.task.unit if text else 'examples'} in the same order; the first steps lie above the picture.",
        alt=f"Line chart of training loss in bits per {unit} against training tokens, one line per model.",
        table=lines.table_of(quarters, "trial", "step", lambda each: f"{each['value']:.3f}"),
        chart=lines.line_chart(run, points, x, y, fields, width=1.6, by_trial=True),
    )


def _width(trial: TrialResult) -> int:
    """Steps of the moving average."""
    return 2 * round(len(trial.losses) / 80) + 1


def _points(trial: TrialResult) -> list[dict[str, Any]]:
    losses = pd.DataFrame(trial.losses)
    bits = losses["loss"] / math.log(2)
    losses["value"] = bits.rolling(_width(trial), center=True, min_periods=1).mean().round(4)
    drawn = sorted({*range(0, len(losses), max(1, len(losses) // POINTS)), len(losses) - 1})
    own = {
        "label": trial.label,
        "trial": f"{trial.label}, seed {trial.seed}",
        "state": state(trial),
        "end": "" if trial.status == "done" else f": {trial.status}",
    }
    return [own | point for point in losses.iloc[drawn][["tokens", "step", "value"]].to_dict("records")]
