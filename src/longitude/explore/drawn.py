"""What `longitude show` draws of every registered encoding, as plain data for the page."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from longitude.catalogue import acts, source_of
from longitude.positions.base import list_encodings
from longitude.show import encodings
from longitude.show.build import built
from longitude.show.drawing import Drawing, Grid
from longitude.show.facts import formula
from longitude.show.shape import Shape

LENGTHS = (256, 1024)
"""At which every encoding is drawn."""
POINTS = 160
"""Of a curve, about: of more, those that are close together where offsets are small."""
DIGITS = 4
"""Of its numbers."""


def drawn() -> list[dict[str, Any]]:
    """Every encoding that a picture exists of: its words, and for each length its drawings."""
    every = (_drawn(name) for name in list_encodings())
    return [each for each in every if any(each["drawings"].values())]


def _drawn(name: str) -> dict[str, Any]:
    made = {length: built(name, shape) for length in LENGTHS if (shape := Shape(length=length))}
    [part], first = next(iter(made.values())).encodings, next(iter(made.values())).encoding
    assert first is not None
    return {
        "label": name,
        "formula": formula(part.factory),
        "source": source_of(part.module) or source_of(part.factory) or "",
        "acts": ", ".join(acts(part.module, Shape().dim)),
        "learned": part.module.learned,
        "drawings": {
            str(length): [_plain(drawing) for drawing in encodings.drawings(each.encoding, Shape(length=length))]
            for length, each in made.items()
            if each.encoding is not None
        },
    }


def _plain(drawing: Drawing) -> dict[str, Any]:
    words = {key: getattr(drawing, key) for key in ("name", "title", "caption", "x", "y", "floor")}
    if isinstance(drawing, Grid):
        grid = {
            "rows": [*drawing.rows],
            "columns": [*drawing.columns],
            "values": [_short(row) for row in drawing.values],
        }
        return words | grid
    return words | {
        "logX": drawing.log_x,
        "logY": drawing.log_y,
        "marks": [{"words": words, "at": at} for words, at in drawing.marks.items()],
        "levels": [{"words": words, "at": at} for words, at in drawing.levels.items()],
        "lines": [_line(name, *line) for name, line in drawing.lines.items()],
    }


def _line(name: str, x: Any, y: Any) -> dict[str, Any]:
    x, y = np.asarray(x), np.asarray(y, dtype=float)
    if len(x) > 2 * POINTS:
        kept = np.unique(np.geomspace(1, len(x), POINTS).astype(int) - 1)
        x, y = x[kept], y[kept]
    return {"name": name, "x": x.tolist(), "y": _short(y)}


def _short(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values]
