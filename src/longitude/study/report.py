"""The page of a study: one HTML file that needs nothing else and no network, and its figures as SVG and PNG.

Everything comes from saved results (`results.read_run`); the text and the models are not needed.
"""

import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longitude.report.figure import colour_of, dash_of, save_figures
from longitude.report.page import write_page
from longitude.report.wording import legible
from longitude.study import charts
from longitude.study.answers import SOLVED
from longitude.study.config import as_dict, of_task, option
from longitude.study.judge import HOLDS, LOST, UNCLEAR, Finding, Judge
from longitude.study.labels import parse_label
from longitude.study.results import Run, read_run
from longitude.study.statistics import TOLERANCE, conclusion, findings, judge_of, percent, span, state


def write_report(run: Run | Path | str) -> Path:
    """Write report.html and figures/*.svg, *.png of a run directory, each whole or not at all; returns the page's path.

    A figure without numbers is not made, and one from an earlier report is removed. Raises ValueError as `read_run`.
    """
    run = read_run(run)
    figures = charts.figures(run)
    save_figures(figures, run.path / "figures")
    path = run.path / "report.html"
    write_page(
        path,
        "longitude.study",
        "report.html.j2",
        figures,
        run=run,
        config=run.config,
        task=run.task,
        sentence=conclusion(run),
        facts=_facts(run),
        legend=[{"label": label, "colour": colour_of(i), "dash": dash_of(i)} for i, label in enumerate(run.labels)],
        tables=_tables(run),
        encodings=[(label, _described(label)) for label in run.labels],
        undone=[(cell, state(cell)) for cell in run.undone],
        left_out=[cell for cell in run.cells if cell.status == "done" and cell.reason],
        protocol=_protocol(run),
        command=_command(run),
        tolerance=f"{TOLERANCE:.0%}",
        solved=f"{SOLVED:.0%}",
    )
    return path


# ---- what the page says ---------------------------------------------------------------------------------------------


def _facts(run: Run) -> list[tuple[str, str]]:
    """The study in a few numbers."""
    parameters = sorted({cell.parameters for cell in run.cells if cell.parameters})
    size = f"{parameters[0] / 1e6:.2f}" if parameters else ""
    if parameters and f"{parameters[-1] / 1e6:.2f}" != size:
        size += f" to {parameters[-1] / 1e6:.2f}"
    steps, examples = run.config["steps"], run.config["steps"] * run.config["batch_size"]
    trained = ("million bytes of training", f"{examples * run.train_length / 1e6:.2g}")
    measured = "validation documents"
    if run.task.generated:
        trained, measured = ("training examples", f"{examples:,}"), "test examples of each length"
    facts = [
        ("encodings", str(len(run.labels))),
        ("seeds" if len(run.config["seeds"]) > 1 else "seed", str(len(run.config["seeds"]))),
        ("million weights", size),
        trained,
        ("in training", run.sampled_positions),
        ("steps", f"{steps:,}"),
        (measured, str(run.study["data"][measured.replace(" ", "_")])),
    ]
    return [(name, value) for name, value in facts if value]


def _tables(run: Run) -> dict[str, dict[str, Any]]:
    """Name of a figure -> the table of its numbers: lines of cells, ready to be shown."""
    return {charts.name_of(method): {"method": method, "lines": _lines(run, method)} for method in run.methods}


KINDS: dict[str | None, str] = {HOLDS: "holds", LOST: "lost", UNCLEAR: "unclear"}
"""Of verdicts, for the style sheet."""


def _lines(run: Run, method: str) -> list[dict[str, Any]]:
    judge, everything = judge_of(run), findings(run, method)
    lines = []
    for label in run.labels:
        part = [each for each in everything if each.label == label]
        last = part[-1]
        undone = [state(cell) for cell in run.of(label) if cell.status != "done"]
        undone += [words] if (words := run.untrained(label)) else []
        lines.append(
            {
                "label": label,
                "note": "; ".join(dict.fromkeys(undone)),
                "cells": [_cell(judge, each) for each in part],
                "change": percent(last.change),
                "span": span(last),
                "reach": judge.last_cell(run, part),
                "verdict": judge.verdicts.get(last.verdict or "", ""),
                "kind": KINDS.get(last.verdict, ""),
            }
        )
    return lines


def _cell(judge: Judge, found: Finding) -> dict[str, str]:
    return {"value": judge.number(found), "interval": judge.bounds(found)}


def _described(label: str) -> list[dict[str, str]]:
    """What each part of a label is, from the docstring of its class: the first paragraph, and a formula set apart."""
    from longitude.attention.mixer import MIXERS
    from longitude.positions.base import ENCODINGS

    said, parts = parse_label(label), []
    kinds: list[tuple[dict[str, Any], Callable[..., Any]]] = [
        *((part, ENCODINGS[part["name"]]) for part in said.encodings),
        *((part, MIXERS[part["name"]]) for part in said.mixers),
    ]
    for part, factory in kinds:
        first, _, rest = textwrap.dedent(_docstring(factory)).strip().partition("\n\n")
        words = " ".join(first.split())
        formula = " ".join(rest.partition("\n\n")[0].split()) if words.endswith(":") else ""
        options = ", ".join(f"{name} = {value}" for name, value in part.items() if name != "name")
        parts.append({"name": part["name"], "words": words, "formula": formula, "options": options})
    return parts


def _docstring(factory: Callable[..., Any]) -> str:
    first, _, rest = (factory.__doc__ or "It has no description.").partition("\n")
    return first + "\n" + textwrap.dedent(rest)


def _protocol(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """study.json, legibly: (heading, [(name, value)])."""
    study, config, data = run.study, run.config, run.study["data"]
    done = [cell for cell in run.cells if cell.status == "done"]
    seconds = [(cell.training_seconds or 0, cell.measuring_seconds or 0) for cell in done]
    time = []
    if done:
        trained, measured = (sum(each) / len(done) for each in zip(*seconds, strict=True))
        time = [("time per model", f"{trained:.0f} s of training, {measured:.0f} s of measuring, on average")]
        time.append(("time in all", f"{sum(map(sum, seconds)) / 60:.1f} minutes"))
    examples = config["steps"] * config["batch_size"]
    amount = ("training bytes per model", f"{examples * config['train_length']:,}")
    if run.task.generated:
        amount = ("training examples per model", f"{examples:,}")
    machine = {name: value for name, value in study["machine"].items() if value is not None}
    whole = [
        ("Examples" if run.task.generated else "Text", legible(data)),
        ("Models and training", [*legible(config), amount]),
        ("Machine and time", [*legible(machine), *time, ("begun", str(study.get("begun", "not recorded")))]),
        ("Versions", [*legible(study["versions"]), ("commit", str(study.get("commit") or "not in a repository"))]),
    ]
    for later in study.get("continued", []):
        whole.append((f"Continued {later['at']}", [*legible(later["machine"]), *legible(later["versions"])]))
    return whole


def _command(run: Run) -> str:
    """The command line of the study: the options that differ from the defaults."""
    defaults = as_dict(of_task(run.task.name))
    words = ["longitude", "study"]
    for name, value in run.config.items():
        value = tuple(value) if isinstance(value, list) else value
        if value == defaults.get(name) and not (name == "task" and value != "text") or name == "device":
            continue
        words += [option(name), *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join([*words, "--out", str(run.path)])
