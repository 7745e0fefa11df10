"""`longitude check --serve`: lines judged with the config of their model, as a screen and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.text import Text

from longitude.errors import UsageError
from longitude.positions.config_keys import WINDOWED
from longitude.positions.hugging_face import RopeConfig
from longitude.report.table import table
from longitude.runs.files import read_json
from longitude.serving.config import Config, NotKnown, rope
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
def numbers(rotation: RopeConfig | None) -> dict[str, Any]:
    """The numbers of a rotation, by their names in the table; None for what it has not."""
    if rotation is None:
        return {}
    scaling, warm = rotation.scaling, rotation.temperature or rotation.unrotated_temperature
    return {
        "base": rotation.base,
        "scheme": "none" if scaling is None else scaling.name,
        "factor": getattr(scaling, "factor", None),
        "original length": getattr(scaling, "original_max_length", None),
        "attention factor": 1.0 if scaling is None else scaling.factors()[0],
        "rotated share": rotation.partial_rotary_factor,
        "sections": rotation.sections,
        "temperature": warm and warm["name"],
    }


def sides(case: Case) -> Iterator[tuple[str | None, dict[str, dict[str, Any]]]]:
    """(label, {column: numbers}) for each kind of layers: the checkpoint alone, the engine, and what is meant."""
    meant: dict[str | None, RopeConfig] = {}
    if case.meant.parameters != case.before.parameters:
        parameters = Config({}, {"rope_parameters": case.meant.parameters}).by_type
        with suppress(NotKnown):
            meant = {label: rope(flat, case.meant.length) for label, flat in parameters.items()}
    for label, alone in case.alone.items():
        columns = {"checkpoint": alone, case.line.name: case.used.get(label, case.used.get(None))}
        if label not in WINDOWED and (like := meant.get(label, meant.get(None))):
            columns["meant"] = like._replace(partial_rotary_factor=alone.partial_rotary_factor)
        window = {"window": case.before.window(label)}
        yield label, {name: numbers(rotation) | window for name, rotation in columns.items()}


def lengths(case: Case) -> dict[str, int | None]:
    """Tokens of the longest request; None for an engine that stops, and if that is not known."""
    served = None if case.stops else case.served.length or None
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


def shown(value: Any) -> str:
    """A cell."""
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return value or "-"


def screen(case: Case, rows: list[Finding], note: str | None) -> Iterator[Any]:
    """The tables, the findings and the corrected line, for 80 columns."""
    yield f"\n{known(case)}"
    yield from [note] if note else []
    tokens = lengths(case) | ({case.line.name: "stops"} if case.stops else {})
    for label, columns in sides(case):
        head = table(label or "all layers", *columns, words=1)
        of_layers = {
            name: column | ({} if label in WINDOWED else {"length": tokens[name]}) for name, column in columns.items()
        }
        for row in dict.fromkeys(row for column in of_layers.values() for row in column):
            cells = [shown(column.get(row)) for column in of_layers.values()]
            if {*cells} - {"-"}:
                head.add_row(row, *cells)
        yield head
    colors = {"wrong": "bold red", "unknown": "yellow", "costs": "cyan", "remark": "dim"}
    for verdict, text, source in ((row.verdict, row.text, row.source) for row in rows):
        yield Text.assemble((f"\n{verdict}: ", colors[verdict]), text, (f"\n  {source}" if source else "", "dim"))
    if wrong(rows):
        remedy, why = corrected(case)
        yield f"\ncorrected:\n{remedy}" if remedy else f"\nno line corrects it: {why}"
    elif not rows:
        yield "\nnothing found"
