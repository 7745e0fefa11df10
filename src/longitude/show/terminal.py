"""Drawings for a terminal: curves of braille dots, grids of shades."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import plotille

from longitude.show.drawing import Drawing, Grid, Lines

SHADES = " ░▒▓█"
CURVES = 8
"""At most, in a terminal: of more, evenly chosen ones."""
ROWS = 16
"""Of a grid, at most."""
COLOURS = ("bright_blue", "bright_red", "bright_green", "bright_magenta", "bright_yellow", "bright_cyan", "white", "blue")
MARGIN = 20
"""Letters beside the curves, of numbers and axis."""


def drawn(drawing: Drawing, width: int = 80, colour: bool = False) -> str:
    """The drawing as text.

    Args:
        drawing: What to draw.
        width: Letters of a line.
        colour: Whether the terminal shows colours.
    """
    lines = _curves(drawing, width, colour) if isinstance(drawing, Lines) else _shades(drawing, width)
    return "\n".join([drawing.title, *lines])


# ---- curves ----------------------------------------------------------------------------------------------------------
def _curves(drawing: Lines, width: int, colour: bool) -> Iterator[str]:
    names = _some([*drawing.lines], CURVES)
    frame = drawing.frame
    frame = frame[frame["line"].isin(names)]
    across = np.log2(frame["x"] + 1) if drawing.log_x else frame["x"].astype(float)
    up = np.log10(frame["y"]) if drawing.log_y else frame["y"].astype(float)
    levels = {words: np.log10(level) if drawing.log_y else level for words, level in drawing.levels.items()}
    low, high = min([*up, *levels.values()]), max([*up, *levels.values()])
    slack = 0.05 * (high - low) or 1.0
    figure = plotille.Figure()
    figure.width, figure.height = max(20, width - MARGIN), 12
    figure.with_colors, figure.color_mode = colour, "names"
    figure.x_label, figure.y_label = drawing.x, drawing.y
    figure.x_ticks_fkt = lambda least, most: _number(2**least - 1 if drawing.log_x else least)
    figure.y_ticks_fkt = lambda least, most: f"{_number(10**least if drawing.log_y else least):>10}"
    figure.set_x_limits(float(across.min()), float(across.max()) or 1.0)
    figure.set_y_limits(low - slack, high + slack)
    for words, level in levels.items():
        figure.plot([float(across.min()), float(across.max())], [level, level])
        figure.text([float(across.min())], [level + slack / 2], [words])
    for name, hue in zip(names, COLOURS, strict=False):
        here = frame["line"] == name
        if here.any():
            more: dict[str, Any] = {"lc": hue} if colour else {}
            figure.plot(across[here].tolist(), up[here].tolist(), **more)
            if not colour and len(names) > 1:  # dots do not say whose they are
                figure.text([across[here].iloc[-1]], [up[here].iloc[-1]], [name])
    yield from (line.rstrip() for line in figure.show().splitlines())
    if colour and len(names) > 1:
        yield "  ".join(plotille.color(name, fg=hue) for name, hue in zip(names, COLOURS, strict=False))
    if len(names) < len(drawing.lines):
        yield f"{len(names)} of {len(drawing.lines)} lines are drawn here; --out FILE.svg has all"


# ---- grids -----------------------------------------------------------------------------------------------------------
def _shades(grid: Grid, width: int) -> Iterator[str]:
    rows = _some([*range(len(grid.rows))], ROWS)
    names = [grid.rows[row] for row in rows]
    room = max(map(len, names))
    columns = _some([*range(len(grid.columns))], max(1, width - room - 1))
    values = np.asarray(grid.values, float)[np.ix_(rows, columns)]
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    for name, line in zip(names, values, strict=True):
        shades = (
            " " if not np.isfinite(value) else SHADES[round((value - low) / ((high - low) or 1.0) * (len(SHADES) - 1))]
            for value in line
        )
        yield f"{name:>{room}} " + "".join(shades)
    first, last = _number(grid.columns[columns[0]]), _number(grid.columns[columns[-1]])
    yield " " * (room + 1) + first + grid.x.center(max(0, len(columns) - len(first) - len(last))) + last
    yield f"from {_number(low)} (blank) to {_number(high)} (full)"


def _some(things: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly chosen, the ends among them."""
    if len(things) <= most:
        return list(things)
    return [things[i] for i in np.linspace(0, len(things) - 1, most).round().astype(int)]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
