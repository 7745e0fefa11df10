"""The figure of changes of the loss from the training length."""

from collections.abc import Iterator
from typing import Any

from longitude.report.figure import Figure
from longitude.report.wording import percent
from longitude.statistics.estimates import HOLDS
from longitude.study.analysis import Analysis
from longitude.study.losses import TOLERANCE, span
from longitude.study.pictures import PICTURES, lines
from longitude.study.pictures.by_length import STYLE, length_axis


@PICTURES.register("change")
def change(analysis: Analysis) -> Iterator[Figure]:
    """Figure of the change of loss by the first method, with the 95% intervals that verdicts are based on."""
    run = analysis.run
    changes = [finding for finding in analysis.main if finding.change is not None]
    if not changes:
        return
    points: list[dict[str, Any]] = [finding._asdict() for finding in changes]
    for point, finding in zip(points, changes, strict=True):
        point |= {"value": finding.change, "from": finding.change_low, "to": finding.change_high}
        point |= {"interval": span(finding) or "none", "words": percent(finding.change)}
    bounds = [point[name] for point in points for name in ("from", "value", "to") if point[name] is not None]
    last = [finding for finding in changes if finding.length == max(finding.length for finding in changes)]
    within = [finding for finding in last if finding.within == HOLDS]
    lengths = sorted({finding.length for finding in changes} | {run.reference})
    x = length_axis(run, lengths, f"Window length in {run.task.unit}{lines.LOG}", type="log", base=2)
    domain = lines.domain_of([*bounds, TOLERANCE, 0])
    y = lines.y_axis(f"Change of {run.task.words}, lower is better", domain, format="+%")
    fields = {
        "label:N": ("encoding",),
        "length:Q": (f"window, {run.task.unit}", "d"),
        "words:N": ("change",),
        "interval:N": ("95% interval",),
        "seeds:Q": ("seeds",),
    }
    level = lines.level(TOLERANCE, f"within {TOLERANCE:.0%}", x, y, "length", lengths[-1])
    yield Figure(
        name="change",
        title=f"The loss of {len(within)} of {len(last)} rises by less than {TOLERANCE:.0%}",
        caption="Change of the loss, each model against itself in the last quarter of a training window, on the same "
        f"documents. Bands are 95% intervals of the change. A band wholly above the level line, {TOLERANCE:+.0%}, rises.",
        alt=f"Line chart of the relative change of {run.task.words} at lengths of up to {lengths[-1]} "
        f"{run.task.unit}, one line for each encoding; the table below has the numbers.",
        chart=lines.line_chart(run, points, x, y, fields, *level, **STYLE),
        axes=("x",),
        table=lines.table_of(points, "label", "length", lambda row: f"{row['words']} ({row['interval']})"),
    )
