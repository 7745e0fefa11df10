"""The page of a measurement, one HTML file that needs nothing else and no network, and its tables on the terminal."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from longitude import __version__
from longitude.measure import retrieval
from longitude.measure.charts import figures
from longitude.measure.run import REPORT, Results
from longitude.measure.tables import effective, sentences, tables
from longitude.runs.files import atomic


def write_report(results: Results) -> Path:
    """Write report.html into the run directory, whole or not at all; returns its path."""
    path = results.path / REPORT
    with atomic(path) as beside:
        beside.write_text(page(results), encoding="utf-8")
    return path


def page(results: Results) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("longitude.measure", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    drawn = figures(results)
    return environment.get_template("report.html.j2").render(
        results=results,
        tables=tables(results),
        sentences=sentences(results),
        effective=effective(results),
        definition=retrieval.definition(),
        figures=drawn,
        specs={figure.name: figure.chart.to_dict() for figure in drawn},
        javascript=_javascript(),
        protocol=_protocol(results),
        version=__version__,
    )


@cache
def _javascript() -> Markup:
    """Vega, Vega-Lite and vega-embed, once for all charts. Safe in a page: no end of a script element is in it."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    assert "</script" not in bundle.lower() and "<!--" not in bundle
    return Markup(bundle)


def _protocol(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """measure.json, legibly, and what the rows say of how they came about."""
    about = results.about
    text = dict(about["text"] or {})
    for model in about["models"].values():
        if model["unit"]:
            text[f"read by {model['label']}"] = f"{model['documents']} {model['unit']}"
    kept = ("bos", "truncation", "weighting", "dtype", "backend", "prefill", "commit")
    rows = {name: sorted({str(getattr(row, name)) for row in results.rows if getattr(row, name)}) for name in kept}
    models = {model["label"]: f"{path}, {model['positions']}" for path, model in about["models"].items()}
    machine = {**about["machine"], "device": about["device"], "begun": about["begun"]}
    parts = (
        ("Models", models),
        ("Text", text),
        ("Options", about["configuration"]),
        ("Rows", rows),
        ("Machine", machine),
    )
    return [(name, _plain(values)) for name, values in (*parts, ("Versions", about["versions"])) if values]


def _plain(values: dict[str, Any]) -> list[tuple[str, str]]:
    def words(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(map(str, value))
        return "none" if value is None else str(value)

    return [(name.replace("_", " "), words(value)) for name, value in values.items()]


def terminal(results: Results) -> Iterator[Any]:
    """Tables and sentences for rich."""
    from rich.table import Table as Shown
    from rich.text import Text

    for table in tables(results):
        shown = Shown(title=Text(table.title, "bold"), title_justify="left", title_style="", box=None, pad_edge=False)
        for name in ("model", "positions"):
            shown.add_column(name, no_wrap=True)
        for name in ("trained at", *map(str, table.lengths), *table.extra):
            shown.add_column(name, justify="right", no_wrap=True)
        for label, positions, trained, cells in table.lines:
            said = [Text(cell.value, "bold" if cell.trained else "") for cell in cells]
            for text, cell in zip(said, cells, strict=True):
                text.append(f"\n{cell.interval}" if cell.interval else "", "dim")
            shown.add_row(Text(label), Text(positions), Text(trained), *said)
        yield shown
        yield Text(f"{table.caption}\n", "dim")
    lengths = effective(results)
    if lengths:
        yield Text(" · ".join(f"{label} {length or 'none'}" for label, length in lengths.items()))
        yield Text(f"{retrieval.definition()}\n", "dim")
    for sentence in sentences(results):
        yield Text(sentence)
