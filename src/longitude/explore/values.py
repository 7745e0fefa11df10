"""The numbers of the page, each computed by the library's own classes when the page is written."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from longitude.catalogue import acts, source_of
from longitude.positions.base import list_encodings
from longitude.positions.hugging_face import RopeConfig
from longitude.report.wording import paper
from longitude.show.build import Shape, built
from longitude.show.drawing import Lines
from longitude.show.encodings import drawings, weights
from longitude.show.facts import formula
from longitude.show.rotations import ALL, Rotation, arcs, schemes

FACTORS = (1, 2, 4, 8, 16)
"""Context lengths of the page, in training lengths: the places of its slider."""
TRAINED = 128
"""Training length of the attention that encodings are drawn in, as in our studies."""
DRAWN = Shape(length=2 * TRAINED, heads=4)
MAX_POINTS = 256  # of a line, and half as many of each line of weights: keeps the page below 2 MB
FLOOR = 1e-6  # weights below it are not drawn
NOTHING = {"line": "nothing is drawn", "x": [0], "y": [0]}  # a chart without any line has no size
ROPE = Rotation(ALL, RopeConfig(base=10_000.0), head_dim=128, trained=4096)  # as Llama 2 has it
NO_SCHEME = "none"


def encodings() -> Iterator[dict[str, Any]]:
    """Registered encodings, with their text and main picture as lines; no lines without a picture."""
    for name in list_encodings():
        [part] = built(name, DRAWN).encodings
        own = [each for each in drawings(part.module, DRAWN) if isinstance(each, Lines) and (each.far or each.log_x)]
        picture = own[0] if own else None
        yield {
            "name": name,
            "paper": paper(name),
            "formula": formula(part.factory),
            "source": source_of(part.module) or source_of(part.factory) or "",
            "acts": ", ".join(acts(part.module, DRAWN.dim)),
            "caption": picture.caption if picture else "It adds nothing to a score at any distance.",
            "axes": f"{picture.y}, by {picture.x}" if picture else "",
            "lines": [*_lines(picture, picture.floor)] if picture else [NOTHING],
        }


def attention() -> Iterator[dict[str, Any]]:
    """Lines of the weights of attention, of every encoding at every context length."""
    for name in list_encodings():
        for factor in FACTORS:
            shape = Shape(length=factor * TRAINED, heads=DRAWN.heads)
            with torch.no_grad():
                pictures = [*weights(built(name, shape).encodings[0].module, shape)]
            curves = [each for each in pictures if isinstance(each, Lines)]
            lines = [line for each in curves for line in _lines(each, FLOOR, MAX_POINTS // 2)]
            yield from ({"name": name, "factor": factor, **line} for line in lines or [{**NOTHING, "y": [None]}])


def pairs() -> Iterator[dict[str, Any]]:
    """Lines over the rotary pairs, of every scheme at every factor: positions of a rotation, how many times slower."""
    before = ROPE.plain
    for factor in FACTORS:
        for name, scheme in {NO_SCHEME: None, **schemes(factor, ROPE.trained)}.items():
            after = ROPE.frequencies(scheme).inverse
            numbers = {"positions": 2 * torch.pi / after, "slower": before / after}
            columns = {key: _short(values.double().numpy()) for key, values in numbers.items()}
            yield {"scheme": name, "factor": factor, "pair": [*range(len(after))], **columns}


def clocks() -> Iterator[dict[str, Any]]:
    """Shares of its circle that each pair goes through, in training and at every factor under every scheme."""
    for factor in FACTORS:
        for name, scheme in {NO_SCHEME: None, **schemes(factor, ROPE.trained)}.items():
            seen, asked = arcs(ROPE.plain, ROPE.frequencies(scheme).inverse, ROPE.trained, factor * ROPE.trained)
            shares = {"seen": _short(seen), "asked": _short(asked)}
            yield {"scheme": name, "factor": factor, "dial": [*range(len(seen))], **shares}


def unseen() -> Iterator[dict[str, Any]]:
    """The share of pairs at angles that training never met, of every scheme at every factor."""
    for factor in FACTORS:
        for row in ROPE.stretched(factor):
            name = row.scheme if row.scheme in schemes(factor, ROPE.trained) else NO_SCHEME
            yield {"scheme": name, "factor": factor, "share": row.unseen}


def _lines(picture: Lines, floor: float | None, points: int = MAX_POINTS) -> Iterator[dict[str, Any]]:
    """Each line as columns of numbers, evenly thinned; what is below the floor is left out."""
    for line, (x, y) in picture.lines.items():
        x, y = np.asarray(x), np.asarray(y, dtype=float)
        y = np.where(y < (-np.inf if floor is None else floor), np.nan, y)
        even = np.linspace(x.min(), x.max(), points).round()
        kept = np.unique(np.searchsorted(x, even).clip(max=len(x) - 1))
        yield {"line": line, "x": x[kept].tolist(), "y": _short(y[kept])}


def _short(values: np.ndarray) -> list[float | None]:
    """With four digits, which a picture does not exceed."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values]
