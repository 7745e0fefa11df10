"""`longitude check --serve`: lines judged with the config of their model, as a screen and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from longitude.errors import UsageError
from longitude.positions.config_keys import WINDOWED
from longitude.positions.hugging_face import RopeConfig
from longitude.report.table import table
from longitude.runs.files import read_json
from longitude.serving.config import Config, Stops, rope
from longitude.serving.effective import Case, judged, opened
from longitude.serving.findings import Finding, findings, wrong
from longitude.serving.line import lines_of
from longitude.serving.write import corrected

RECIPES = (".yaml", ".yml", ".service", ".sh", ".md", ".txt")
"""Endings of files with lines; a Dockerfile and JSON of arguments have lines, too."""


def is_recipe(place: Path) -> bool:
    """Whether a file has lines, and is no checkpoint."""
    if place.suffix == ".json":
        content = read_json(place, kind=object, links=True)
        return isinstance(content, list) or not {"model_type", "architectures"} & {*content}
    return place.suffix in RECIPES or place.name.startswith(("Dockerfile", "Containerfile"))


def check_lines(model: str | None, text: str) -> list[tuple[Case, list[Finding], str | None]]:
    """The cases of all lines in a text or file, their findings, and a note on how the checkpoint was read.

    Args:
        model: A folder, a config.json, a GGUF file or a name in the local cache; None: the one that each line names.
        text: A line, or the name of a file with lines.

    Raises:
        ValueError: no line, a line that cannot be read, no config.
    """
    results = []
    for line in lines_of(text):
        name = model or line.model
        if name is None:
            raise UsageError("check", "a line that names its model", "none", "check config.json --serve FILE")
        config, alone, note = opened(name)
        case = judged(line, config, alone)
        results.append((case, findings(case), note))
    return results


# ---- output ------------------------------------------------------------------------------------------------------------
def cells(rotation: RopeConfig | None) -> dict[str, str]:
    """The numbers of a rotation, by their names in the table."""
    if rotation is None:
        return {}
    scaling = rotation.scaling
    factor, original = (getattr(scaling, name, None) for name in ("factor", "original_max_length"))
    warm = rotation.temperature or rotation.unrotated_temperature
    return {
        "base": f"{rotation.base:,.0f}" if rotation.base >= 1000 else f"{rotation.base:g}",
        "scheme": "none" if scaling is None else scaling.name,
        "factor": "-" if factor is None else f"{factor:g}",
        "original length": "-" if original is None else f"{original:,}",
        "attention factor": "1" if scaling is None else f"{scaling.factors()[0]:.4g}",
        "rotated share": f"{rotation.partial_rotary_factor:g}",
        "sections": "-" if rotation.sections is None else "/".join(map(str, rotation.sections)),
        "temperature": "-" if warm is None else warm["name"],
    }


def sides(case: Case) -> Iterator[tuple[str | None, dict[str, dict[str, str]]]]:
    """(label, {column: cells}) for each kind of layers: the checkpoint alone, the engine, and what is meant."""
    meant: dict[str | None, RopeConfig] = {}
    if case.meant.parameters != case.before.parameters:
        parameters = Config({}, {"rope_parameters": case.meant.parameters}).by_type
        try:
            meant = {label: rope(flat, case.meant.length) for label, flat in parameters.items()}
        except Stops:
            meant = {}
    for label in case.alone:
        window = case.before.window(label)
        columns = {
            "checkpoint": cells(case.alone[label]),
            case.line.name: cells(case.used.get(label, case.used.get(None))),
        }
        if label not in WINDOWED and (like := meant.get(label, meant.get(None))):
            columns["meant"] = cells(like._replace(partial_rotary_factor=case.alone[label].partial_rotary_factor))
        if window is not None:
            columns = {name: column | {"window": f"{window:,}"} for name, column in columns.items() if column}
        yield label, columns


def lengths(case: Case) -> dict[str, int | None]:
    """Tokens of the longest request; None for an engine that stops, and if that is not known."""
    served = None if case.stops else case.tokens or None
    return {"checkpoint": case.before.declared, case.line.name: served, "meant": case.meant.length}


def as_json(case: Case, rows: list[Finding], note: str | None) -> dict[str, Any]:
    """A case as plain data."""
    remedy, why = corrected(case) if wrong(rows) else (None, "")
    return {
        "engine": case.line.name,
        "version": case.facts.version,
        "known": known(case),
        "line": " ".join((*case.line.start, *case.line.options)),
        "lengths": lengths(case),
        "layers": {label or "all": columns for label, columns in sides(case)},
        "findings": [finding._asdict() for finding in rows],
        "corrected": remedy,
        "no_line": why or None,
        "note": note,
    }


def known(case: Case) -> str:
    """The version of an engine's rules, and how they are known."""
    return f"{case.line.name} {case.facts.version}: {case.facts.known}"


def screen(case: Case, rows: list[Finding], note: str | None) -> Iterator[Any]:
    """The tables, the findings and the corrected line, for 80 columns."""
    yield f"\n{known(case)}"
    yield from [note] if note else []
    tokens = {name: "-" if length is None else f"{length:,}" for name, length in lengths(case).items()}
    tokens |= {case.line.name: "stops"} if case.stops else {}
    for label, columns in sides(case):
        names = [name for name in columns if columns[name] or name == case.line.name]
        head = table(label or "all layers", *names, words=1)
        for row in dict.fromkeys(key for column in columns.values() for key in column):
            values = [columns[name].get(row, "-") for name in names]
            if {*values} - {"-"}:
                head.add_row(row, *values)
        if label not in WINDOWED:
            head.add_row("length", *(tokens.get(name, "-") for name in names))
        yield head
    colors = {"wrong": "bold red", "unknown": "yellow", "costs": "cyan", "remark": "dim"}
    for finding in rows:
        yield Text.assemble(
            (f"\n{finding.verdict}: ", colors[finding.verdict]),
            finding.text,
            (f"\n  {finding.source}" if finding.source else "", "dim"),
        )
    if wrong(rows):
        remedy, why = corrected(case)
        yield f"\ncorrected:\n{remedy}" if remedy else f"\nno line corrects it: {why}"
    elif not rows:
        yield "\nnothing found"
