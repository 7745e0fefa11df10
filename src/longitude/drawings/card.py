"""A model on one picture: what its config.json declares about position, and what its class computes; no weights are read."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any

import vl_convert

from longitude.checkpoints.declared import declared_length, raw_config
from longitude.drawings.checkpoint import facts, kinds_of, length_of, positions_of, read
from longitude.drawings.rotations import PLAIN
from longitude.positions.config_keys import FULL, WINDOWED
from longitude.report.figure import COLORS, DARK, FONT, GREY, GRID, INK, PAPER, environment
from longitude.report.wording import PAPERS
from longitude.runs.files import atomic

INKS = dict(zip("blue orange green purple gold sky grey".split(), COLORS, strict=True))
INKS |= {"ink": INK, "quiet": GREY, "line": GRID, "paper": PAPER}
NARROW, WIDE = " .,:;'|!ijlI()[]/ftr-", "mwMW%@×…"
Mark = tuple[str, bool]
"""Filling of a layer's cell, and whether it is high: a low one sees a part of the tokens."""
STATES = {"linear_attention": "recurrent state", "recurrence": "recurrent state", "conv": "convolution"}
"""Words for types of layers without attention."""
SEES = {FULL: "all tokens", "attention": "all tokens", WINDOWED[0]: "window", WINDOWED[1]: "chunks"}
ALONE = {"learned": "table", "alibi": "ramp", "t5": "ramp"}
"""Kind of positions without a rotation -> the filling of every layer."""
SPARE = ("cross", "dots", "unknown")
"""Fillings of layers whose mark another kind has."""


def card(path: str) -> dict[str, Any]:
    """Texts and numbers of the card of a checkpoint, which is a folder, its config.json, or a name of the hub.

    Returns:
        name and model; layers, the mark of each; legend, (mark, text); rotations, the cells of each; rows, (head, text);
        longer, a list of (text, (factor, share of pairs at new angles) of each longer length), the largest shares first; says,
        the lines below.

    Raises:
        ValueError: If config.json cannot be read.
    """
    config = read(path)
    about, marks = facts(path, config, raw_config(path)), dict[str, Mark]()
    for label, (filling, high) in (layers := [*_layers(config, about["kind"])]):
        free = (mark for mark in zip((filling, *SPARE), repeat(high)) if mark not in marks.values())
        marks.setdefault(label, next(free, (SPARE[-1], high)))
    for rotation in about["rotations"]:
        rotation["layers"] = rotation["layers"].replace("_", " ")
    package = type(config).__module__.partition(".")[0]
    version = getattr(import_module(package), "__version__", "")  # a plugin's class may have none
    says = f"Declared by the file, computed by the class of {package} {version}".rstrip()
    more = f" (+{len(about['notes']) - 1} more)" * (len(about["notes"]) > 1)
    return {
        "name": name_of(path),
        "model": f"{about['model_type']}, positions: {', '.join(PAPERS.get(kind) or kind for kind in about['kind'])}",
        "layers": [marks[label] for label, _ in layers],
        "legend": [(marks[label], f"{n} {label}") for label, n in Counter(label for label, _ in layers).most_common()],
        "rotations": [_rotation(rotation, about, config) for rotation in about["rotations"]],
        "rows": [*_rows(about)],
        "longer": sorted(_longer(about["rotations"]), key=lambda longer: -longer[1][-1][1]),
        "says": [says, *(line for note in about["notes"][:1] for line in lines_of(f"Note: {note}", 656, 18, 2, more))],
    }


def name_of(path: str) -> str:
    """The name of a folder or a file, of its folder for config.json; a name of the hub stays as it is."""
    place = Path(path).expanduser().resolve()
    return path if not place.exists() else place.parent.name if place.name == "config.json" else place.name


# ---- facts in words --------------------------------------------------------------------------------------------------
def _layers(config: Any, kinds: Sequence[str]) -> Iterator[tuple[str, Mark]]:
    """(label, mark) of each layer."""
    if config.model_type.startswith("longitude"):
        for specs, mixer in zip(config.layer_specs(), config.layer_mixers(), strict=True):
            yield _attending(specs, mixer["name"], mixer.get("size"))
        return
    for (kind, window), layer in zip(kinds_of(config), positions_of(config) or repeat(None), strict=False):
        if layer is not None and layer.attends:
            whole = window is not None and window >= (declared_length(config) or math.inf)
            yield _attending(layer.encoding, FULL if whole else kind, None if whole else window)
        elif layer is not None or kind in STATES:
            yield STATES.get(kind, f"no attention ({kind})"), ("state", True)
        else:
            label = f"with {PAPERS.get(kinds[0], kinds[0])}" if kinds[0] in ALONE else "not known"
            yield label, (ALONE.get(kinds[0], "unknown"), True)


def _attending(specs: Sequence[dict[str, Any]], kind: str, window: int | None) -> tuple[str, Mark]:
    names = [spec["name"] for spec in specs if spec["name"] != "nope" and "temperature" not in spec["name"]]
    turns = bool({*names} & {"rope", "mrope"})
    carriers = "rotate" if turns else ", ".join(PAPERS.get(name) or name for name in names) or "no position"
    sees = SEES.get(kind, PAPERS.get(kind, kind.replace("_", " "))) + (f" of {window:,}" if window else "")
    return f"{carriers}, {sees}", ("solid" if turns else "ramp" if names else "hollow", window is None)


def _rotation(rotation: dict[str, Any], about: dict[str, Any], config: Any) -> tuple[str, ...]:
    """Layers, base, dimensions that rotate, pairs that never finish a turn."""
    pairs, width, within = rotation["pairs"], rotation["head_dim"], rotation["window"] or about["trained"]
    if width == getattr(config, "qk_rope_head_dim", None):  # latent attention does not rotate the rest of a head
        width += getattr(config, "qk_nope_head_dim", None) or 0
    never = f"{pairs - rotation['turned']} of {pairs} in {within:,}"
    return rotation["layers"], f"{rotation['base']:,.9g}", f"{2 * pairs} of {width}", never


def _rows(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    turning = about["rotations"]
    yield "length", length_of(about)
    scales = _by_layers(turning, _scheme)
    scores = _by_layers(turning, _times)
    for key, where in (("temperature", ""), ("unrotated_temperature", " in layers without position")):
        scores += [f"queries: {PAPERS.get(spec['name'], spec['name'])}{where}" for spec in about[key]]
    scores += [f"learned sinks in {about['sinks']} layers"] * bool(about["sinks"])
    for head, texts in (("scaling", scales or [PLAIN] * bool(turning)), ("scores", scores)):
        yield from [(head, "; ".join(texts))] * bool(texts)
    for what, why in about["unknown"].items():
        yield what, f"not known: {why.removeprefix(about['label'] + ': ').removeprefix('not understood: ')}"
    if turning and all(rotation["window"] for rotation in turning):
        yield "longer", "offsets stay within the window: no angle is new"
    if about["kind"] == ["learned"]:
        yield "longer", f"positions {f'from {end:,} on' if (end := about['declared']) else 'past the end'} do not exist"


def _by_layers(turning: Sequence[dict[str, Any]], text_of: Callable[[dict[str, Any]], str]) -> list[str]:
    """The texts of rotations, each with its layers unless all have one text; without empty ones."""
    texts = [text_of(rotation) for rotation in turning]
    if len({*texts}) == 1:
        return [*filter(None, texts[:1])]
    return [f"{text} in {rotation['layers']}" for text, rotation in zip(texts, turning, strict=True) if text]


def _scheme(rotation: dict[str, Any]) -> str:
    scheme = rotation["scheme"] or {"name": ""}
    return scheme["name"] + (f", factor {scheme['factor']:g}" if scheme.get("factor") else "")


def _times(rotation: dict[str, Any]) -> str:
    """By what scores are multiplied, or the part of them that rotates."""
    factor = rotation["attention_factor"] ** 2
    part = "rotated part " * (factor != 1 and rotation["partial"])
    return f"{part}× {factor * rotation['softmax_factor']:.4g}" * (factor * rotation["softmax_factor"] != 1)


def _longer(turning: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Shares of pairs at new angles, under its own scaling if it has one."""
    for rotation in turning:
        where, scheme = f" in {rotation['layers']}" * (len(turning) > 1), (rotation["scheme"] or {}).get("name")
        shown = f"its own {scheme}" if scheme else PLAIN
        if shares := [(row["factor"], row["unseen"]) for row in rotation["longer"] if row["scheme"] == shown]:
            yield f"new angles past {rotation['trained']:,}{where}, {f'with {scheme}' if scheme else PLAIN}", shares


# ---- the picture -----------------------------------------------------------------------------------------------------
def width_of(text: str, size: float = 20) -> float:
    """Estimated width of a text, in units."""
    wide = (0.95 if c in WIDE or c > "\u0250" else 0.36 if c in NARROW else 0.72 if c.isupper() else 0.58 for c in text)
    return size * sum(wide)


def fitted(text: str, width: float, size: float = 20, end: str = "") -> str:
    """A text without control signs, cut to a width, and what is not cut after it."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[:1000]).split())
    if width_of(text + end, size) <= width:
        return text + end
    while text and width_of(f"{text}…{end}", size) > width:
        text = text[:-1].rstrip()
    return f"{text}…{end}"


def lines_of(text: str, width: float, size: float = 20, most: int = 3, end: str = "") -> list[str]:
    """A text as lines of a width; what does not fit into the last one is cut, and `end` stands after it."""
    lines, rest = list[str](), fitted(text, math.inf).split()
    while rest and len(lines) < most - 1:
        fit = next(n for n in range(len(rest), 0, -1) if n == 1 or width_of(" ".join(rest[:n]), size) <= width)
        lines.append(fitted(" ".join(rest[:fit]), width, size))
        rest = rest[fit:]
    return [*lines, fitted(" ".join(rest), width, size, end)] if rest else lines


def write(path: str, out: Path) -> str:
    """Write the card of a checkpoint as SVG, PNG or page, by the suffix of `out`. Its name is returned."""
    made, templates = card(path), environment("longitude.drawings")
    templates.filters |= {"fitted": fitted, "lines_of": lines_of, "width_of": width_of}
    still, dark = out.suffix == ".png", {name: DARK[color] for name, color in INKS.items()}
    template = templates.get_template("card.html.j2" if out.suffix == ".html" else "card.svg.j2")
    text = template.render(card=made, schemes=[INKS] if still else [INKS, dark], font=FONT, left=32, right=688)
    with atomic(out) as unfinished:
        unfinished.write_bytes(vl_convert.svg_to_png(text, scale=2) if still else text.encode())
    return made["name"]
