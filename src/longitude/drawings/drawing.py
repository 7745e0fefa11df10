"""Drawings as data: numbers with their words, which a terminal, a file and a page draw each in its own way."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from longitude.attention.mixer import MIXERS
from longitude.labels import layers_in
from longitude.positions.base import ENCODINGS
from longitude.report.wording import brief

POINTS = 160
"""Approximate number of points of a curve over offsets."""
DENSE = 256  # offsets below this are all drawn: fast rotary pairs turn once in six of them
FLOOR = -20.0
"""Below it a bias makes a weight less than 2e-9 of what it is with bias 0: drawings end here."""


Line = tuple[Any, Any]
"""(x [n], y [n]): arrays or sequences of numbers."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Numbers with their words.

    Attributes:
        name: Name of its file and of its section in a page.
        title: Title of the drawing.
        caption: The meaning of the drawing, in a sentence or two.
        x: Title of the horizontal axis, or of the columns.
        y: Title of the vertical axis, or of the rows.
    """

    name: str
    title: str
    caption: str
    x: str
    y: str

    @property
    def frame(self) -> pd.DataFrame:
        """All numbers as a table."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Lines(Drawing):
    """Curves over one axis.

    Attributes:
        lines: Name -> (x [n], y [n]); numbers that are not finite are left out.
        log_x: Whether the horizontal axis is logarithmic; 0 is shown.
        log_y: Whether the vertical axis is logarithmic; all numbers must be above 0.
        far: Whether the horizontal axis is a distance between tokens: linear, unless a reader asks for a logarithmic one.
        marks: Label -> position of a vertical marker line on the horizontal axis.
        levels: Label -> position of a horizontal marker line on the vertical axis.
        focus: The line that represents the drawing in comparisons of encodings; None: all lines.
        floor: Lower end of the vertical axis; smaller numbers are cut off.
    """

    lines: Mapping[str, Line]
    log_x: bool = False
    log_y: bool = False
    far: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    focus: str | None = None
    floor: float | None = None

    @classmethod
    def by_offset(cls, **more: Any) -> "Lines":
        """Curves over the distance from a query back to a key."""
        return cls(x="offset (query - key)", far=True, **more)

    @property
    def x_title(self) -> str:
        """Title of the horizontal axis, which says if it is logarithmic."""
        return f"{self.x} (log scale)" if self.log_x else self.x

    @property
    def frame(self) -> pd.DataFrame:
        """The drawn points as columns line, x, y."""
        parts = [pd.DataFrame({"line": name, "x": x, "y": y}) for name, (x, y) in self.lines.items()]
        whole: Any = pd.concat(parts, ignore_index=True)
        return whole[np.isfinite(whole["y"])].reset_index(drop=True)


@dataclass(frozen=True, kw_only=True)
class Grid(Drawing):
    """Heat map of numbers by row and column.

    Attributes:
        values: Numbers [rows, columns]; cells that are not finite stay empty.
        rows: Names of the rows, from top to bottom.
        columns: Numbers of the columns, ascending.
        floor: The number of the lightest shade; smaller numbers have it too.
    """

    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[float]
    floor: float | None = None

    @property
    def frame(self) -> pd.DataFrame:
        """Columns row, x, value."""
        rows, columns = np.meshgrid(np.arange(len(self.rows)), np.asarray(self.columns), indexing="ij")
        names = np.asarray(self.rows)[rows.ravel()]
        return pd.DataFrame({"row": names, "x": columns.ravel(), "value": np.asarray(self.values, float).ravel()})


def floor_of(values: Sequence[np.ndarray]) -> float | None:
    """FLOOR if a number is below it, else None."""
    return FLOOR if np.nanmin(values, initial=0.0) < FLOOR else None


def heads(values: np.ndarray, x: np.ndarray) -> dict[str, Line]:
    """Lines of heads [heads, n] by name; a single line if all heads are equal."""
    if len(values) > 1 and np.array_equal(values, np.broadcast_to(values[0], values.shape), equal_nan=True):
        return {"every head": (x, values[0])}
    return {f"head {head}": (x, line) for head, line in enumerate(values, 1)}


def middle(names: Mapping[str, object]) -> str:
    """The line that stands for all heads: neither the steepest nor the flattest of ALiBi's."""
    return [*names][(len(names) - 1) // 2]


def evenly(things: Sequence[Any], most: int) -> list[Any]:
    """At most `most` evenly spaced items, with both ends."""
    if len(things) <= most:
        return list(things)
    return [things[i] for i in np.linspace(0, len(things) - 1, most).round().astype(int)]


def ticks(low: float, high: float, scale: Literal["linear", "log", "offsets"] = "linear") -> list[float]:
    """Places on an axis: steps of 1, 2 or 5; powers of 10, and 2 and 5 times them if they are few; 0, 1, 4, 16, ..."""
    if scale == "offsets":
        return [power for power in (0, *(4**k for k in range(16))) if low <= power <= high]
    if scale == "log":
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        places = [m * 10.0**k for k in decades for m in ((1,) if len(decades) > 4 else (1, 2, 5))]
        return [place for place in places if 0.999 * low <= place <= 1.001 * high]
    step = 10.0 ** math.floor(math.log10((high - low) or 1.0))
    step = next(size for size in (step / 5, step / 2, step, 2 * step) if (high - low) / size <= 7)
    step = 1.0 if step < 1 and high - low >= 2 else step  # heads and pairs have no halves
    return [round(k * step, 12) + 0.0 for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def side_by_side(parts: Mapping[str, Sequence[Drawing]]) -> list[Drawing]:
    """Combine the drawings of several labels: curves of a kind share a picture; grids have their own.

    Args:
        parts: Label -> its drawings; those of a single label stay unchanged.

    Returns:
        Drawings with distinct names.
    """
    if len(parts) == 1:
        return [*next(iter(parts.values()))]
    kinds = dict.fromkeys(drawing.name for drawings in parts.values() for drawing in drawings)
    pictures: list[Drawing] = []
    for kind in kinds:
        same = {label: picture for label, drawings in parts.items() for picture in drawings if picture.name == kind}
        curves = {label: picture for label, picture in same.items() if isinstance(picture, Lines)}
        if len(curves) == len(same) > 1:
            pictures.append(_together(curves))
            continue
        for place, (label, picture) in enumerate(same.items(), 1):
            name = picture.name if len(same) == 1 else f"{picture.name}-{place}"
            pictures.append(
                replace(picture, name=name, title=f"{label}: {picture.title[0].lower()}{picture.title[1:]}")
            )
    return pictures


def _joined(places: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Words -> place, of all labels; the words name the label if labels differ."""
    first, *others = places.values()
    if all(other == first for other in others):
        return dict(first)
    return {f"{label}: {name}": at for label, marks in places.items() for name, at in marks.items()}


def _together(curves: Mapping[str, Lines]) -> Lines:
    """Combine curves of several labels: the focus line of each label, or all its lines."""
    first, sentences = next(iter(curves.values())), re.compile(r"(?<=\.) (?=[A-Z])")
    lines = {}
    for label, curve in curves.items():
        shown = {curve.focus: curve.lines[curve.focus]} if curve.focus else curve.lines
        for name, line in shown.items():
            shared = all(name in other.lines and np.array_equal(other.lines[name], line) for other in curves.values())
            lines[label if len(shown) == 1 else name if shared else f"{label}, {name}"] = line
    focused = [f"{curve.focus} of {label}" for label, curve in curves.items() if curve.focus]
    only = f" Drawn: {', '.join(focused)}." if focused else ""
    title = min((curve.title for curve in curves.values()), key=len)
    states = [f"{label}{curve.title.removeprefix(title)}" for label, curve in curves.items() if curve.title != title]
    caption = dict.fromkeys(sentence for curve in curves.values() for sentence in sentences.split(curve.caption))
    return replace(
        first,
        title="; ".join([title, *states]),
        caption=" ".join(caption) + only,
        lines=lines,
        marks=_joined({label: curve.marks for label, curve in curves.items()}),
        levels=_joined({label: curve.levels for label, curve in curves.items()}),
        focus=None,
        floor=min((curve.floor for curve in curves.values() if curve.floor is not None), default=None),
    )


def are_labels(names: Iterable[str]) -> bool:
    """Whether all names of curves are encodings or mixers, which have the same color in every picture."""
    return all(part.name in ENCODINGS or part.name in MIXERS for name in names for part in layers_in(name)[0])


def offsets_of(length: int) -> np.ndarray:
    """Offsets from 0 to below the length: all small ones, then ever further apart, the ticks of the axis among them."""
    spread = np.geomspace(1, length, POINTS).astype(int) - 1
    return np.unique([*range(min(length, DENSE)), *spread, *map(int, ticks(0, length - 1, "offsets"))])


def valued(label: str, at: float) -> str:
    """Words about a place on an axis, with its number."""
    return label if brief(at) in label else f"{label}: {brief(at)}"
