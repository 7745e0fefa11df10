"""A page for every registered encoding and mixer, as Markdown: from its class, its laws and the results of the benches."""

import hashlib
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import make_cards
import make_gallery
import make_laws
from claims.base import list_claims
from fill_numbers import newest
from longitude.attention.mixer import MIXERS
from longitude.drawings.build import Shape
from longitude.drawings.charts import figure
from longitude.drawings.subjects import Subject, subjects
from longitude.labels import parse_label
from longitude.positions.base import ENCODINGS
from longitude.registry import Registry, options_of
from longitude.report.figure import WIDTH, Figure, save
from longitude.report.wording import paper
from longitude.testing import example
from longitude.testing.engine import STATUSES
from longitude.testing.examples import SMALL
from properties import cells

HERE = Path(__file__).parent
ROWS = 24
"""Of the table of numbers below a picture, about."""
LARGE = {"size": 128, "window": 128}
"""Options of a mixer without a default, in its pictures; others as the laws have them."""
SIGN = re.compile(r"(`[^`]*`|https?://\S+)|([\\*_<|\[\]])")


def pages(source: Path) -> Iterator[tuple[str, str]]:
    """("encodings/alibi", its text), ... for everything registered; its pictures are written to the source of the site."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "_templates"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["plain"] = plain
    environment.filters["number"] = lambda value: "" if value is None else f"{value:.2g}"
    template = environment.get_template("part.md.j2")
    kinds: dict[str, Registry] = {"encoding": ENCODINGS, "mixer": MIXERS}
    for kind, registry in kinds.items():
        for name in registry:
            text = template.render(**about(kind, name, registry[name], source))
            yield f"{kind}s/{name}", re.sub(r"\n{3,}", "\n\n", text)
    yield "find-your-model", make_cards.page(source, environment)
    yield "gallery", make_gallery.page({name: shown(label_of(name, ENCODINGS[name])).drawings for name in ENCODINGS})


def plain(text: str) -> str:
    """Text whose signs mean nothing to Markdown; `code` and addresses stay."""
    return SIGN.sub(lambda match: match[1] or f"\\{match[2]}", " ".join(text.split()))


def about(kind: str, name: str, factory: Any, source: Path) -> dict[str, Any]:
    """What the template shows of one."""
    label = label_of(name, factory)
    subject = shown(label)
    return {
        "kind": kind,
        "name": name,
        "label": label,
        "directive": "autoclass" if inspect.isclass(factory) else "autofunction",
        "object": f"{factory.__module__}.{factory.__qualname__}",
        "title": factory.__name__,
        "paper": paper(name),
        "note": note(name),
        "chips": chips(name, kind),
        "facts": [(head, text) for head, text in subject.words if head and head not in ("source", "cost here")],
        "pictures": [picture(label, figure(drawing), source) for drawing in subject.drawings],
        "properties": property_row(name) if kind == "encoding" else None,
        "decode": [*decode_rows(name)] if kind == "mixer" else [],
        "laws": (laws := law_rows(kind, name)),
        "counts": counted(laws),
        "tried": results("laws")["made"],
        "claims": [row for row in claim_rows() if name in row["about"]],
    }


@cache
def notes() -> dict[str, dict[str, str]]:
    """Texts that are written by hand, by name of an encoding or mixer."""
    return tomllib.loads((HERE / "notes.toml").read_text(encoding="utf-8"))


def note(name: str) -> dict[str, str] | None:
    """A text by hand with its formula as MathML; None for a plugin's encoding or mixer."""
    if name not in notes():
        return None
    from docutils.utils.math.latex2mathml import tex2mathml  # of the extra `docs`, which only these texts need

    return notes()[name] | {"math": tex2mathml(notes()[name]["formula"], as_block=True)}


def chips(name: str, kind: str) -> list[str]:
    """What is known of an encoding in a few words; of a mixer, how its cache grows."""
    if kind == "mixer":
        of = next(
            (line for line in results("decode").get("lines", ()) if name in re.split(r"[+:]", line["label"])), None
        )
        return [] if of is None else [f"cache: {of['growth']}"]
    row = next((row for row in results("properties")["rows"] if row["encoding"] == name), None)
    facts = ["learned parameters" if example(name)().learned else "no parameters"]
    if row is not None:
        facts.insert(0, {True: "relative", False: "not relative", None: ""}[row["relative"]])
        facts.append(f"time: {row['cost']:.2f}× PyTorch")
    if name in make_gallery.holding():
        verdict, change = make_gallery.holding()[name]
        moved = [verdict] if change is None else [make_gallery.signed(change), verdict]
        facts.insert(2, f"loss at {make_gallery.FACTOR}×: {', '.join(moved)}")
    return [*filter(None, facts)]


def label_of(name: str, factory: Any) -> str:
    """With the options that it needs, and that no model passes."""
    needed = [
        option
        for option, parameter in options_of(factory).items()
        if parameter.default is parameter.empty and option not in (*Shape().known, "layout", "encoding")
    ]
    values = {**SMALL, **LARGE}
    options = ",".join(f"{option}={values[option]}" for option in needed if option in values)
    return f"{name}:{options}" if options else name


@cache
def shown(label: str) -> Subject:
    """As `longitude show` has it; in words alone what cannot be built without options that nobody knows."""
    try:
        [subject] = subjects([label], {})
    except ValueError as error:
        return Subject(label, {}, [("needs", str(error))], [])
    return subject


# ---- pictures --------------------------------------------------------------------------------------------------------
def picture(label: str, drawn: Figure, source: Path) -> dict[str, Any]:
    """Its file, words and numbers. A file is named by what is drawn, so that one that is there is right."""
    chart = drawn.sized(WIDTH).copy()
    chart.title = alt.Undefined  # it stands above the picture
    digest = hashlib.sha256(json.dumps(chart.to_dict(), sort_keys=True, default=str).encode()).hexdigest()[:12]
    path = source / "pictures" / f"{label.partition(':')[0]}-{drawn.name}-{digest}.svg"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save(chart, path)
    return {"path": f"/pictures/{path.name}", "figure": drawn, "table": table(drawn)}


def table(drawn: Figure) -> str | None:
    """Some of the rows of its numbers, spread over them all; None for shades, which have too many columns for a page."""
    numbers = drawn.table
    if numbers is None or len(numbers) > 2000 or "value" in numbers:
        return None
    chosen = numbers.iloc[:: -(-len(numbers) // ROWS)]
    return chosen.drop(columns="line", errors="ignore").to_html(index=False, border=0, classes="numbers")


# ---- what was measured -------------------------------------------------------------------------------------------------
results = cache(newest)


def property_row(name: str) -> list[str] | None:
    """Relative, cost; None where it was not measured."""
    rows = {row["encoding"]: row for row in results("properties")["rows"]}
    return cells(rows[name]) if name in rows else None


def decode_rows(name: str) -> Iterator[dict[str, Any]]:
    """A generated token behind the contexts of the bench."""
    for row in results("decode")["rows"]:
        if name in row["label"].partition(":")[0].split("+"):
            yield row


def law_rows(kind: str, name: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """(law, what it says, what was found) of the tests; None: not tried yet. Those that do not apply are last."""
    tried = results("laws")["found"].get(name, {})
    battery = make_laws.laws() if kind == "encoding" else make_laws.mixers.laws()
    rows = [(law.name, law.claim, tried.get(law.name)) for law in battery.values()]
    return sorted(rows, key=lambda row: row[2] is not None and row[2]["status"] == "not applicable")


def counted(laws: list[tuple[str, str, dict[str, Any] | None]]) -> str:
    """29 passed, 2 not applicable; empty where none was tried."""
    statuses = [result["status"] for _, _, result in laws if result]
    return ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses)


# ---- what papers say -------------------------------------------------------------------------------------------------
VERDICT = re.compile(r'<a id="([\w-]+)"></a>.*?\| \*\*(.+?)\*\* \|')


@cache
def claim_rows() -> list[dict[str, Any]]:
    """Every claim with its verdict on the committed page, and the names of encodings and mixers whose models it reads."""
    verdicts = dict(VERDICT.findall((HERE / "claims.md").read_text(encoding="utf-8")))
    rows = []
    for claim in list_claims():
        labels = {place.label for part, statement in claim.every if part != "varied" for place in statement.reads}
        specs = [spec for label in labels for part in [parse_label(label)] for spec in (*part.encodings, *part.mixers)]
        anchor = f"{claim.number}-{claim.name}"
        rows.append(
            {"claim": claim, "anchor": anchor, "verdict": verdicts[anchor], "about": {spec["name"] for spec in specs}}
        )
    return rows
