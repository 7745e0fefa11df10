"""The figures of a metric by length, one line per label: losses, or exact answers and solved lengths."""

from collections.abc import Iterator
from typing import Any

import altair as alt

from longitude.report.figure import GREY, Figure
from longitude.report.wording import and_, percent
from longitude.study.analysis import Analysis
from longitude.study.answers import SOLVED
from longitude.study.criterion import Finding
from longitude.study.losses import span
from longitude.study.pictures import MAIN, PICTURES, lines
from longitude.study.results import RULE, Run, ngrams_named
from longitude.study.schemes import PLAIN
from longitude.study.tasks.base import Task

NAMED = 3
"""Maximum number of labels that a title names in a group; of more it gives the number."""
STYLE: dict[str, Any] = {"width": 2.4, "dots": 46, "bands": True}


@PICTURES.register("by-length")
def by_length(analysis: Analysis) -> Iterator[Figure]:
    """One figure per method."""
    draw = answers_by_length if analysis.run.task.kind == "answers" else losses_by_length
    for method, findings in analysis.findings.items():
        if measured := [finding for finding in findings if finding.value is not None]:
            yield draw(analysis, measured, method)


def name_of(run: Run, method: str) -> str:
    """Name of the figure of a method."""
    return MAIN if method == run.task.methods[0] else f"{MAIN}-{method}"


def losses_by_length(analysis: Analysis, findings: list[Finding], method: str) -> Figure:
    """Figure of losses, with bands for the 95% intervals over seeds, if there are several."""
    run = analysis.run
    points = [_point(finding) for finding in findings]
    seeds, floors = of_seeds(findings), {ngrams_named(order): bits for order, bits in run.floor.items()}
    lengths = sorted({finding.length for finding in findings})
    bounds = [point[name] for point in points for name in ("from", "value", "to") if point[name] is not None]
    domain = lines.domain_of([*bounds, *(point["value"] for point in seeds), *floors.values()])
    fields = {
        "label:N": ("encoding",),
        "length:Q": (f"window, {run.task.unit}", "d"),
        "value:Q": (run.task.words, ".3f"),
        "interval:N": ("95% interval",),
        "change:N": ("change",),
        "span:N": ("95% interval, paired",),
        "remark:N": ("remark",),
        "documents:Q": ("documents",),
        "seeds:Q": ("seeds",),
    }
    x = length_axis(run, lengths, f"Window length in {run.task.unit}{lines.LOG}", type="log", base=2)
    y = lines.y_axis(lines.axis_title(run), domain)
    stride = run.config.stride
    windows, which = "non-overlapping windows", ""
    if method == "sliding":
        moved = f"{stride} {run.task.unit}" if stride else "half their length"
        windows, which = f"windows that move by {moved}", " (sliding windows)"
    elif method not in PLAIN:
        which = f" ({method})"
        windows += f". Beyond {run.train_length}, the {method} method extends the model to the length, without training"
    # documents differ alike for every label, so bands over both, as in the table, would hide the order of the lines
    spread = "Circles: single seeds. Bands: 95% intervals over seeds." if seeds else "There is one seed."
    counts = and_([f"{name} ({bits:.2f})" for name, bits in floors.items()])
    floor = f" Dotted: {counts} of the training text." if floors else ""
    return Figure(
        name=name_of(run, method),
        title=finding(analysis, findings) + which,
        caption=f"Each {run.task.loss_unit} is scored once, in {windows}. {spread} Dashed: the training length.{floor}",
        alt=f"Line chart of {run.task.words} against window lengths of {lengths[0]} to {lengths[-1]} {run.task.unit}, one line "
        "for each encoding; the table below has the numbers.",
        chart=lines.line_chart(run, points, x, y, fields, seeds=seeds, levels=floors, **STYLE),
        axes=("x", "y"),
    )


def finding(analysis: Analysis, findings: list[Finding]) -> str:
    """Summary of the verdicts at the longest length: "Loss at 1024 bytes: level for ALiBi; rises for RoPE"."""
    run, criterion = analysis.run, analysis.criterion
    sign = 1 if criterion.less_is_better else -1
    last = [finding for finding in findings if finding.length == run.lengths[-1] and finding.verdict]
    last.sort(key=lambda finding: sign * (finding.value or 0.0))
    what = "Loss" if criterion.less_is_better else run.task.name.capitalize()
    if not last:
        return f"{what} by length"
    names, groups = run.names, {}
    for finding in last:
        groups.setdefault(finding.verdict, []).append(names[finding.label])
    parts = [f"{word} for {and_(of) if len(of) <= NAMED else len(of)}" for word, of in groups.items()]
    return f"{what} at {run.lengths[-1]} {run.task.unit}: {'; '.join(parts)}"


def _point(finding: Finding) -> dict[str, Any]:
    """A finding with its band over seeds; no band over documents, since documents differ more than encodings do."""
    texts = {
        "interval": lines.between(finding.low, finding.high),
        "change": percent(finding.change) or "–",
        "span": span(finding) or "–",
        "remark": finding.remark or "–",
    }
    low, high = finding.seed_low, finding.seed_high  # text is the same for every line
    return finding._asdict() | texts | {"from": low, "to": high}


def of_seeds(findings: list[Finding]) -> list[dict[str, Any]]:
    """A point for every seed of a finding with several seeds."""
    several = [finding for finding in findings if len(finding.values) > 1]
    return [
        {"label": finding.label, "length": finding.length, "value": v} for finding in several for v in finding.values
    ]


def answers_by_length(analysis: Analysis, findings: list[Finding], method: str) -> Figure:
    """Figure of the share of right answers, with bands for its 95% intervals, and the score of a rule without positions."""
    run, bounds = analysis.run, analysis.criterion.bounds
    points = [
        finding._asdict() | {"interval": bounds(finding), "from": finding.low, "to": finding.high}
        for finding in findings
    ]
    seeds = of_seeds(findings)
    lengths, task, domain = sorted({finding.length for finding in findings}), run.task, [-0.03, 1.03]
    fields = {
        "label:N": ("encoding",),
        "length:Q": (task.unit, "d"),
        "value:Q": (task.words, ".1%"),
        "interval:N": ("95% interval",),
        "documents:Q": ("examples",),
        "seeds:Q": ("seeds",),
    }
    ticks = [0, 0.25, 0.5, 0.75, SOLVED, 1]
    y = lines.y_axis(lines.axis_title(run), domain, format="%", values=ticks, labelOverlap=False)
    solved = alt.Chart(alt.Data(values=[{"value": SOLVED}])).mark_rule(color=GREY, strokeWidth=1, opacity=0.6).encode(y)
    x = length_axis(run, lengths, f"Length in {task.unit}")
    guessing = [{"length": length, "value": run.guessing[length]} for length in lengths if run.guessing.get(length)]
    rule = alt.Chart(alt.Data(values=guessing)).mark_line(strokeDash=[1, 3], color=GREY, strokeWidth=1.4).encode(x, y)
    floor = f" The dotted line is what a {RULE} reaches." if guessing else ""
    over = "examples and seeds" if any(finding.seeds > 1 for finding in findings) else "examples"
    rings = ", rings single seeds" if seeds else ""
    return Figure(
        name=name_of(run, method),
        title=finding(analysis, findings),
        caption=f"{task.words.capitalize()} by length. {counted(task)} "
        f"Bands are 95% intervals over {over}{rings}; the dashed line marks the longest training "
        f"examples, the level line {SOLVED:.0%}, from where a length is solved.{floor}",
        alt=f"Line chart of the share of {task.words} against lengths of {lengths[0]} to {lengths[-1]} {task.unit}, one line "
        "for each encoding; the table below has the numbers.",
        chart=lines.line_chart(run, points, x, y, fields, solved, *([rule] if guessing else []), seeds=seeds, **STYLE),
    )


def counted(task: Task) -> str:
    """Sentence on which parts of an answer count."""
    if task.metric == "exact_match":
        return "An answer counts when every symbol of it is the likeliest one, given the right ones before it."
    return "A symbol that is asked for is right when it is the likeliest one."


def length_axis(run: Run, lengths: list[int], title: str, **scale: Any) -> alt.X:
    """Ticks at the lengths, the training length within."""
    low, high = min(*lengths, run.train_length), max(*lengths, run.train_length)
    domain = [low, high] if low < high else [low // 2 or 1, high * 2]
    return lines.x_axis("length", title, {"domain": domain, "padding": 14, **scale}, values=lengths, format="d")
