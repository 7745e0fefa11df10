"""A model on one picture: what its config.json declares about position, and what its class computes; no weights are read."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import transformers
import vl_convert
from jinja2 import Environment

from longitude import __version__
from longitude.checkpoints.declared import raw_config
from longitude.drawings.checkpoint import facts, kinds_of, positions_of, read
from longitude.drawings.rotations import PLAIN
from longitude.report.figure import COLORS, DARK, FONT, GREY, GRID, INK, PAPER, described
from longitude.report.page import environment
from longitude.report.wording import PAPERS
from longitude.runs.files import atomic

WIDTH, MARGIN = 720, 32
"""Units of the picture; a text of 20 units has 11 pixels on a phone of 390."""
INKS = dict(zip(("blue", "orange", "green", "purple", "gold", "sky"), COLORS, strict=False))
INKS |= {"ink": INK, "quiet": GREY, "line": GRID, "paper": PAPER}
WIDTHS = {" .,:;'|!ijlI()[]/": 0.32, "ftr-": 0.4, "mwMW%@×…": 0.95}
"""Letters -> their width over the size of the font; other letters have 0.58, capitals and signs beyond Latin more."""
Mark = tuple[str, bool]
"""Filling of a layer's cell, and whether it is high: it is low where a query sees a part of the tokens."""
STATES = {"linear_attention": "recurrent state", "recurrence": "recurrent state", "conv": "convolution"}
"""Words for types of layers without attention."""
SEES = {
    "full_attention": "all tokens",
    "attention": "all tokens",
    "sliding_attention": "window",
    "chunked_attention": "chunks",
}
ALONE = {"learned": ("table", "a table at the input"), "alibi": ("ramp", "ALiBi"), "t5": ("ramp", "T5 bias")}
"""Kind of positions without a rotation -> the filling and words of every layer."""
SPARE = ("cross", "dots", "unknown")
"""Fillings of layers whose mark another kind has."""
KINDS, ROTATIONS = 4, 2
"""Most kinds of layers, and most rotations, on a card."""


@dataclass(frozen=True)
class Card:
    """Texts and numbers of a card.

    Attributes:
        name: Name of the model.
        model: Its type, and the kinds of its positions.
        layers: Mark of each layer.
        legend: (mark, text) of each kind of layers.
        rotations: Cells of a table, a row for each rotation.
        rows: (head, text) of each other fact.
        longer: (words, (factor of the trained length, share of pairs at new angles)) of each rotation.
        says: Who says it, and the first note.
    """

    name: str
    model: str
    layers: list[Mark]
    legend: list[tuple[Mark, str]]
    rotations: list[tuple[str, ...]]
    rows: list[tuple[str, str]]
    longer: list[tuple[str, list[tuple[int, float]]]]
    says: list[str]


def card(path: str) -> Card:
    """The card of a checkpoint: a folder, its config.json, or a name of the hub. ValueError if it cannot be read."""
    config = read(path)
    about, name = facts(path, config, raw_config(path)), name_of(path)
    layers, marks = [*_layers(config, about["kind"])], dict[str, Mark]()
    for words, (filling, high) in layers:
        free = [mark for mark in zip((filling, *SPARE), repeat(high)) if mark not in marks.values()]
        marks.setdefault(words, (free or [(SPARE[-1], high)])[0])
    counts = Counter(words for words, _ in layers).most_common()
    legend = [(marks[words], f"{count} {words}") for words, count in counts]
    if len(legend) > KINDS:
        rest = sum(count for _, count in counts[KINDS - 1 :])
        legend[KINDS - 1 :] = [(legend[KINDS - 1][0], f"{rest} of {len(legend) - KINDS + 1} other kinds")]
    kinds = ", ".join(PAPERS.get(kind, kind) for kind in about["kind"])
    package = type(config).__module__.partition(".")[0]
    version = __version__ if package == "longitude" else transformers.__version__
    notes = [note.replace(path, name) for note in about["notes"]]
    more = f" (+{len(notes) - 1} more)" * (len(notes) > 1)
    return Card(
        name=name,
        model=f"{about['model_type']}, positions: {kinds}",
        layers=[marks[words] for words, _ in layers],
        legend=legend,
        rotations=[*_rotations(about, config)],
        rows=[(head, text.replace(path, name)) for head, text in _rows(about)],
        longer=[*_longer(about["rotations"])],
        says=[f"Declared by the file, computed by the class of {package} {version}"]
        + [fitted(f"Note: {note}", WIDTH - 2 * MARGIN, 18, more) for note in notes[:1]],
    )


def name_of(path: str) -> str:
    """The name of a folder or a file, of its folder for config.json; a name of the hub stays as it is."""
    place = Path(path).expanduser().resolve()
    return path if not place.exists() else place.parent.name if place.name == "config.json" else place.name


# ---- facts in words --------------------------------------------------------------------------------------------------
def _layers(config: Any, kinds: Sequence[str]) -> Iterator[tuple[str, Mark]]:
    """(words, mark) of each layer."""
    if config.model_type.startswith("longitude"):
        for specs, mixer in zip(config.layer_specs(), config.layer_mixers(), strict=True):
            yield _attending(specs, mixer["name"], mixer.get("size"))
        return
    for (kind, window), layer in zip(kinds_of(config), positions_of(config) or repeat(None), strict=False):
        if layer is not None and layer.attends:
            yield _attending(layer.encoding, kind, window)
        elif layer is not None or kind in STATES:
            yield STATES.get(kind, f"no attention ({kind})"), ("state", True)
        else:
            filling, words = ALONE.get(kinds[0], ("unknown", kinds[0]))
            yield words, (filling, True)


def _attending(specs: Sequence[dict[str, Any]], kind: str, window: int | None) -> tuple[str, Mark]:
    names = [spec["name"] for spec in specs if spec["name"] != "nope" and "temperature" not in spec["name"]]
    turns = bool({*names} & {"rope", "mrope"})
    words = "rotate" if turns else ", ".join(PAPERS.get(name, name) for name in names) or "no position"
    sees = SEES.get(kind, PAPERS.get(kind, kind.replace("_", " "))) + (f" of {window:,}" if window else "")
    return f"{words}, {sees}", ("solid" if turns else "ramp" if names else "hollow", window is None)


def _rotations(about: dict[str, Any], config: Any) -> Iterator[tuple[str, ...]]:
    """Cells of each rotation: layers, base, dimensions that rotate, pairs that never turn once."""
    for rotation in (every := about["rotations"])[:ROTATIONS]:
        base, pairs, width = rotation["base"], rotation["pairs"], rotation["head_dim"]
        if width == getattr(config, "qk_rope_head_dim", None):  # latent attention: the rest of a head has no position
            width += getattr(config, "qk_nope_head_dim", None) or 0
        never, within = pairs - rotation["turned"], rotation["window"] or about["trained"]
        written = f"{base:,.0f}" if base < 1e8 and base == int(base) else f"{base:g}"
        yield rotation["layers"], written, f"{2 * pairs} of {width}", f"{never} of {pairs} in {within:,}"
    if len(every) > ROTATIONS:
        yield f"and {len(every) - ROTATIONS} more", "", "", ""


def _rows(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    trained, declared, turning = about["trained"], about["declared"], about["rotations"]
    several = len(turning) > 1
    length = f"trained at {trained:,} tokens, {declared:,} declared" if declared else f"trained at {trained} tokens"
    alike = f"{declared} tokens declared, and no shorter one for training"
    yield "length", "not known: the file declares none" if trained is None else alike if trained == declared else length
    scales, scores = list[str](), list[str]()
    for rotation in turning:
        where, scheme = f" in {rotation['layers']}" * several, rotation["scheme"] or {}
        factor = f", factor {scheme['factor']:g}" if scheme.get("factor") else ""
        scales += [f"{scheme['name']}{factor}{where}"] if scheme else []
        times = rotation["attention_factor"] ** 2 * rotation["softmax_factor"]
        scores += [f"times {times:.4g}{where}"] * (times != 1)
    scores += [f"queries: {PAPERS.get(spec['name'], spec['name'])}" for spec in about["temperature"]]
    scores += [f"learned sinks in {about['sinks']} layers"] * bool(about["sinks"])
    if turning:
        yield "scaling", "; ".join(scales) or PLAIN
    if scores:
        yield "scores", "; ".join(scores)
    for what, why in about["unknown"].items():
        yield what, f"not known: {why.removeprefix('not understood: ')}"
    if turning and all(rotation["window"] for rotation in turning):
        yield "longer", "offsets stay within the window: no angle is new"
    if about["kind"] == ["learned"]:
        yield (
            "longer",
            f"positions from {declared:,} on do not exist" if declared else "not known: the end of its table",
        )


def _longer(turning: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Shares of pairs at new angles, under its own scaling if it has one."""
    for rotation in turning[:ROTATIONS]:
        scheme = f"its own {rotation['scheme']['name']}" if rotation["scheme"] else PLAIN
        if shares := [(row["factor"], row["unseen"]) for row in rotation["longer"] if row["scheme"] == scheme]:
            where = f" in {rotation['layers']}" * (len(turning) > 1)
            yield f"pairs at angles new since training, {scheme.removeprefix('its own ')}{where}", shares


# ---- the picture -----------------------------------------------------------------------------------------------------
def width_of(text: str, size: float = 20) -> float:
    """Estimated width of a text, in units."""
    known = {letter: width for letters, width in WIDTHS.items() for letter in letters}
    return size * sum(
        known.get(letter, 1.0 if letter > "\u0250" else 0.72 if letter.isupper() else 0.58) for letter in text
    )


def fitted(text: str, width: float, size: float = 20, end: str = "") -> str:
    """A text without control signs, cut to a width, and what is not cut after it."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[:1000]).split())
    if width_of(text + end, size) > width:
        while text and width_of(text + "…" + end, size) > width:
            text = text[:-1]
        text = text.rstrip() + "…"
    return text + end


def lines_of(text: str, width: float, most: int = 3) -> list[str]:
    """A text as lines of a width; the last one is cut."""
    lines, rest = list[str](), fitted(text, most * width)
    while rest and len(lines) < most - 1 and width_of(rest) > width:
        room = len(fitted(rest, width)) - 1
        place = rest.rfind(" ", 0, room + 1)
        place = place if place > 0 else room
        lines.append(rest[:place])
        rest = rest[place:].strip()
    return [*lines, fitted(rest, width)]


def svg(made: Card, *schemes: dict[str, str]) -> str:
    """A card as SVG. schemes: the colors in the light, and those in the dark, if it follows its reader."""
    template = templates().get_template("card.svg.j2")
    picture = template.render(card=made, schemes=schemes, font=FONT, left=MARGIN, right=WIDTH - MARGIN)
    words = [*(text for _, text in made.legend), *(": ".join(row) for row in made.rows), *made.says]
    return described(picture, fitted(made.name, 2000), fitted("; ".join(words), 9000), "card")


def templates() -> Environment:
    """The templates of this package, with what keeps texts within the picture."""
    made = environment("longitude.drawings")
    made.filters |= {"fitted": fitted, "lines_of": lines_of, "width_of": width_of}
    return made


def write(path: str, out: Path) -> str:
    """Write the card of a checkpoint as SVG, PNG or page, by the suffix of `out`. Its name is returned."""
    made = card(path)
    with atomic(out) as unfinished:
        if out.suffix == ".png":
            unfinished.write_bytes(vl_convert.svg_to_png(svg(made, INKS), scale=2))
            return made.name
        text = svg(made, INKS, {name: DARK[color] for name, color in INKS.items()})
        if out.suffix == ".html":
            text = templates().get_template("card.html.j2").render(card=made, svg=text)
        unfinished.write_text(text, encoding="utf-8")
    return made.name
