"""The page of a measurement, one HTML file that needs nothing else and no network, and its tables on the terminal."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longitude.measure import retrieval
from longitude.measure.charts import figures
from longitude.measure.run import ANSWERS, REPORT, Results
from longitude.measure.tables import by_position, effective, sentences, tables, wrong_answers
from longitude.report.page import write_page
from longitude.report.table import table as empty_table
from longitude.report.wording import legible


def write_report(results: Results) -> Path:
    """Write report.html into the run directory, whole or not at all; returns its path."""
    path = results.path / REPORT
    write_page(
        path,
        "longitude.measure",
        "report.html.j2",
        figures(results),
        results=results,
        tables=tables(results),
        sentences=sentences(results),
        effective=effective(results),
        wrong=wrong_answers(results),
        definition=retrieval.DEFINITION,
        protocol=_protocol(results),
    )
    return path


def _protocol(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """The question, legibly, and how the rows came about."""
    about = results.question
    text = dict(about["text"] or {})
    for model in about["models"].values():
        if model["unit"]:
            text[f"read by {model['label']}"] = f"{model['documents']} {model['unit']}"
    columns = ("bos", "truncation", "weighting", "dtype", "backend", "prefill", "commit")
    rows = {name: sorted({str(getattr(row, name)) for row in results.rows if getattr(row, name)}) for name in columns}
    models = {model["label"]: f"{path}, {model['positions']}" for path, model in about["models"].items()}
    machine = {**about["machine"], "device": about["device"], "asked": about["at"]}
    parts = {"Models": models, "Text": text, "Options": about["configuration"], "Rows": rows, "Machine": machine}
    return [(name, legible(values)) for name, values in (parts | {"Versions": about["versions"]}).items() if values]


def terminal(results: Results) -> Iterator[Any]:
    """Tables and sentences for `longitude.report.table.show`."""
    from rich.text import Text

    for table in tables(results):
        heads = ("model", "positions", "trained at", *map(str, table.lengths))
        shown = empty_table(*heads, words=2, title=table.title, caption=f"{table.caption}\n")
        for label, positions, trained, cells in table.lines:
            numbers = [Text(cell.value, "bold" if cell.trained else "") for cell in cells]
            for text, cell in zip(numbers, cells, strict=True):
                text.append(f"\n{cell.interval}" if cell.interval else "", "dim")
            shown.add_row(Text(label), Text(positions), Text(trained), *numbers)
        yield shown
    if found := by_position(results):
        longest, places = found
        shown = empty_table("positions", *results.labels, title=f"perplexity by position, windows of {longest} tokens")
        for (first, last), values in places.items():
            shown.add_row(f"{first} to {last}", *values)
        yield from (shown, "")
    if lengths := effective(results):
        yield "effective length: " + ", ".join(f"{label} {length or 'none'}" for label, length in lengths.items())
        yield f"({retrieval.DEFINITION})\n"
    if results.answers:
        yield f"answers: {results.path / ANSWERS}"
    yield from sentences(results)
