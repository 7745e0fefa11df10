"""Output of a study: the page, its figures as SVG and PNG, and the table on the terminal.

Everything comes from saved results; the text and the models are not needed.
"""

import inspect
import re
import shlex
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from longitude.labels import parse_label
from longitude.report.figure import DARK, color_of, save_figures, write_page
from longitude.report.table import UNCUT, table as plain_table
from longitude.report.wording import by_layer, legible, named, percent, with_base
from longitude.statistics.estimates import Estimate
from longitude.study.analysis import Analysis, conclude, notes, ranked, state
from longitude.study.answers import SOLVED
from longitude.study.criterion import LEARNED, VERDICTS
from longitude.study.losses import TOLERANCE, LossCriterion
from longitude.study.pictures import figures, lines
from longitude.study.pictures.by_length import name_of
from longitude.study.rates import Choice
from longitude.study.results import Run
from longitude.study.tables import (
    csv,
    findings,
    floor_lines,
    in_words,
    number,
    training,
    with_ends,
)


def write_report(analysis: Analysis) -> Path:
    """Write report.html and figures/*.svg, *.png into the run directory, each whole or not at all; returns the page's path.

    A figure without numbers is not made, and one from an earlier report is removed.
    """
    names = analysis.run.names
    analysis = replace(analysis, criterion=analysis.criterion.with_names(names))
    run, drawn = analysis.run, figures(analysis)
    save_figures(drawn, run.path / "figures")
    path = run.path / "report.html"
    write_page(
        path,
        "longitude.study",
        "report.html.j2",
        drawn,
        run=run,
        config=asdict(run.config),
        task=run.task,
        criterion=analysis.criterion,
        columns=analysis.criterion.columns("page"),
        percent=percent,
        conclusion=conclude(analysis).lines,
        notes=notes(analysis),
        legend=[
            {
                "label": label,
                "name": names[label],
                "color": color_of(label),
                "dark": DARK[color_of(label)],
                "dash": dash,
            }
            for label, dash in zip(run.labels, lines.dashes(run), strict=True)
        ],
        tables={name_of(run, method): _table(analysis, method) for method in run.methods},
        names=names,
        comparisons=_comparisons(analysis),
        learned=_learned(analysis),
        training=_training(run),
        judged=run.task.kind == "answers" or bool(run.beyond),
        encodings=[(label, _described(label)) for label in run.labels],
        undone=[(trial, state(trial)) for trial in run.undone],
        left_out=[trial for trial in run.trials if trial.status == "done" and trial.reason],
        protocol=_protocol(run),
        command=run.study.get("command") or shlex.join(["longitude", "study", "--out", str(run.path)]),
        verdicts=VERDICTS,
        tolerance=f"{TOLERANCE:.0%}",
        solved=f"{SOLVED:.0%}",
    )
    return path


# ---- the terminal ----------------------------------------------------------------------------------------------------
HEADED = 9
"""Columns before the text of a line: the width of its head."""


def table(analysis: Analysis, width: int = UNCUT) -> Table:
    """Encodings by lengths, the best first: values, with half the 95% interval if the width has room for it.

    Args:
        analysis: Result of `analyse`.
        width: Width of the terminal, in columns.
    """
    run, criterion = analysis.run, analysis.criterion
    if not analysis.findings:
        return Table(title="measured by position only: the report shows it", title_justify="left", box=None)
    columns, labels = criterion.columns("terminal"), [finding.label for finding in ranked(analysis)]
    lengths = [f"{length} (trained)" if length == run.train_length else str(length) for length in run.lengths]
    heads = ["encoding", *lengths, *(column.head for column in columns)]

    def rows(halves: bool) -> list[list[str]]:
        return [[_marked(analysis, label), *_cells(analysis, label, halves)] for label in labels]

    needed = sum(max(map(len, column)) for column in zip(heads, *rows(True), strict=True))
    gap = 2 if needed + 2 * (len(heads) - 1) <= width else 1
    halves = needed + gap * (len(heads) - 1) <= width
    title = f"{criterion.title()} {_over(analysis, halves)}"
    lines = []
    for label, row in zip(labels, rows(halves), strict=True):
        verdicts = [finding.verdict for finding in analysis.of(label)]
        styles = [None, *verdicts, *(verdicts[column.place] for column in columns)]
        lines.append(
            [Text(cell, VERDICTS[verdict].color if verdict else "") for cell, verdict in zip(row, styles, strict=True)]
        )
    lines += [[Text(text, "dim") for text in line] for line in floor_lines(run)]
    made = plain_table(*heads, rows=lines, title=title, fold=True, padding=(0, gap - 1 if halves else 1, 0, 0))
    made.columns[0].min_width = min(16, max(map(len, labels)))
    return made


def summary_lines(analysis: Analysis, width: int = 80) -> str:
    """Lines below the table: result, best, caution, notes, and the legend."""
    heads = [*conclude(analysis).lines.items(), *(("Note", sentence) for sentence in notes(analysis))]
    if analysis.criterion.less_is_better and analysis.run.beyond:
        heads.append(("Note", f"A stable loss does not show that distant {analysis.run.task.unit} are used"))
    text = [headed(head, f"{sentence}.", width) for head, sentence in heads]
    key = [headed(line[:HEADED].strip(), line[HEADED:], width) for line in analysis.criterion.key()]
    return "\n".join(["", *text, *([""] if key else []), *key])


def headed(head: str, sentence: str, width: int = 80) -> str:
    """A line with its head, broken at the width."""
    indent = " " * HEADED
    return textwrap.fill(f"{head:<{HEADED}}{sentence}", width, subsequent_indent=indent, break_on_hyphens=False)


def _over(analysis: Analysis, halves: bool) -> str:
    """Sentence on the seeds that values average over, and the documents they are measured on."""
    measured = [finding for finding in analysis.main if finding.value is not None]
    if not measured:
        return "Nothing was measured."
    seeds, things = max(finding.seeds for finding in measured), f"{measured[0].documents} {analysis.criterion.things}"
    half = " ± half the 95% interval" if halves else ""
    if seeds == 1:
        return f"One seed{half}, on {things}."
    return f"Mean of {seeds} seeds{half}, on the same {things}."


def _marked(analysis: Analysis, label: str) -> str:
    """The label in the terminal's table, with an asterisk if it learned too little; a blind control with what it sees."""
    if analysis.run.is_blind(label):
        return f"{by_layer(label)} {analysis.run.sight(label)}"
    known = f"{named(label)} ({label})" if label == "nope" else by_layer(with_base(label))
    return f"{known} *" if analysis.criterion.learned_too_little(label) else known


def _cells(analysis: Analysis, label: str, halves: bool) -> list[str]:
    """The cells of a label after its name."""
    lines, criterion = analysis.of(label), analysis.criterion
    cells = [criterion.short(finding, halves) for finding in lines]
    states = [trial.status for trial in analysis.run.of(label)]
    if "done" not in states and all(finding.value is None for finding in lines):
        cells[0] = "diverged" if "diverged" in states else states[0]
    shown = (column.cell(lines) for column in criterion.columns("terminal"))
    # [+41, +43] in place of [+41 to +43%]: a terminal of 80 columns has room for the intervals of values, too
    return cells + [with_ends(cell.text, cell.interval.replace(" to ", ", ").rstrip("%")) for cell in shown]


# ---- the page --------------------------------------------------------------------------------------------------------
def _table(analysis: Analysis, method: str) -> dict[str, Any]:
    """The table below a figure, and its numbers as CSV."""
    frame = findings(analysis, method).dropna(axis="columns", how="all")
    rows = [analysis.of(finding.label, method) for finding in ranked(analysis, method)]
    return {"method": method, "rows": rows, "csv": csv(frame)}


def _comparisons(analysis: Analysis) -> dict[str, Any]:
    """Pairs of labels at the reference and the longest length, by the first method, and all of them as CSV."""
    run, criterion = analysis.run, analysis.criterion
    every = next(iter(analysis.comparisons.values()), [])
    at = dict.fromkeys((run.reference, run.lengths[-1]))
    lines = [finding._asdict() | in_words(finding, criterion, 1) for finding in every if finding.length in at]
    return {"lines": lines, "csv": pd.DataFrame(every).to_csv(index=False)}


def _learned(analysis: Analysis) -> list[dict[str, Any]]:
    """Losses of each label at the training length: against n-grams, and against its blind control."""
    if not isinstance(analysis.criterion, LossCriterion):
        return []
    return [
        {
            "label": level.label,
            "floor": _estimate(level.floor),
            "control": _estimate(level.control),
            "learned": LEARNED[level.verdict],
        }
        for level in analysis.criterion.learned.values()
        if level.checks and not analysis.run.is_blind(level.label)
    ]


def _training(run: Run) -> dict[str, Any]:
    """Training of each label and its cost: heads, and lines of (number, text, small text)."""
    columns = {name: values for name, values in training(run).items() if any(values.values())}
    if "flops_per_token" in columns:
        millions = {label: flops and flops / 1e6 for label, flops in columns.pop("flops_per_token").items()}
        columns["MFLOPs_per_token"] = millions
    lines = {label: [(values[label], number(values[label]), "") for values in columns.values()] for label in run.labels}
    for label, choice in run.choices.items():
        tried = ", ".join(f"{rate:g}" for rate in choice.losses)
        lines[label][0] = (choice.rate, "none" if choice.rate is None else f"{choice.rate:g}", f"of {tried}")
    heads = [name.removeprefix("train_").replace("_", " ") for name in columns]
    return {"heads": heads, "lines": lines}


def _estimate(estimate: Estimate | None) -> tuple[float | str, str, str]:
    """The value, in words, and its interval."""
    if estimate is None or estimate.value is None:
        return "", "–", ""
    ends = "" if estimate.low is None or estimate.high is None else f"{estimate.low:+.3f} to {estimate.high:+.3f}"
    return estimate.value, f"{estimate.value:+.3f}".replace("-", "−"), ends.replace("-", "−")


def _described(label: str) -> list[dict[str, Any]]:
    """Description of each part of a label, from its class's docstring: the first paragraph, and a formula."""
    from longitude.attention.mixer import MIXERS
    from longitude.positions.base import ENCODINGS

    parsed, parts = parse_label(label), []
    kinds = [ENCODINGS] * len(parsed.encodings) + [MIXERS] * len(parsed.mixers)
    for part, kind in zip([*parsed.encodings, *parsed.mixers], kinds, strict=True):
        first, _, rest = (inspect.getdoc(kind[part["name"]]) or "It has no description.").partition("\n\n")
        first_sentence = " ".join(first.split())
        formula = " ".join(rest.partition("\n\n")[0].split()) if first_sentence.endswith(":") else ""
        options = ", ".join(f"{name} = {value}" for name, value in part.items() if name != "name")
        papers = re.findall(r"([^;]+?), (https://\S+?)(?:;|$)", getattr(kind[part["name"]], "source", None) or "")
        parts.append(
            {"name": part["name"], "words": first_sentence, "formula": formula, "options": options, "papers": papers}
        )
    return parts


def _protocol(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """The question in readable form: (heading, [(name, value)])."""
    study, data = run.study, run.study["data"]
    seconds = sum((trial.training_seconds or 0) + (trial.measuring_seconds or 0) for trial in run.trials)
    time = [("time of all models", f"{seconds / 60:.1f} minutes")]
    machine = {name: value for name, value in study["machine"].items() if value is not None}
    recorded = [dict(plugin) for plugin in study.get("plugins", [])]
    plugins = {plugin.pop("name"): ", ".join(plugin.values()) for plugin in recorded}
    whole = [
        ("Models and training", legible(asdict(run.config))),
        ("Recipe", legible(study["recipe"])),
        ("Examples" if run.task.generated else "Text", legible(data)),
        *([("Plugins", legible(plugins))] if plugins else []),
        ("Machine and time", [*legible(machine), *time, ("begun", str(study.get("begun", "not recorded")))]),
        ("Versions", [*legible(study["versions"]), ("commit", str(study.get("commit") or "not in a repository"))]),
    ]
    if run.choices:
        whole.insert(2, ("Learning rates", [(label, _chosen(run, choice)) for label, choice in run.choices.items()]))
    return whole


def _chosen(run: Run, choice: Choice) -> str:
    """The learning rate of a label, and the loss of each candidate."""
    rates = [f"{rate:g}: " + ("diverged" if loss is None else f"{loss:.3f}") for rate, loss in choice.losses.items()]
    rate = "none" if choice.rate is None else f"{choice.rate:g}"
    return f"{rate} ({', '.join(rates)}; nats per {run.task.loss_unit} at {run.train_length} on the selection text)"
