"""Curves for a terminal, of braille dots; readable in 80 columns and in a file."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from plotille import Canvas

from longitude.drawings.drawing import Drawing, Lines, evenly, ticks, valued
from longitude.report.wording import brief

CURVES = 8
"""Maximum number of curves in a terminal; of more curves, evenly spaced ones are drawn."""
HEIGHT = 12
"""Height of curves in lines."""
MARGIN = 9
"""Letters before the curves."""


def drawn(drawing: Drawing, width: int = 80) -> str:
    """Render curves as text; of another drawing its words, because a terminal has too few cells for it.

    Args:
        drawing: The drawing.
        width: Characters per line.
    """
    curves = [*_curves(drawing, width)] if isinstance(drawing, Lines) else []
    caption = drawing.caption if curves else f"{drawing.caption} --out FILE.svg draws it."
    return "\n".join([*wrapped(drawing.title, width), *curves, *wrapped(caption, width)])


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most this many letters; links stay whole."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, subsequent_indent=indent, **options)


# ---- curves ----------------------------------------------------------------------------------------------------------
def _curves(drawing: Lines, width: int) -> Iterator[str]:
    names = evenly([*drawing.lines], CURVES)
    frame: Any = drawing.frame
    frame = frame[frame["line"].isin(names)]
    place_x: Any = _logarithm if drawing.log_x else np.asarray
    place_y: Any = np.log10 if drawing.log_y else np.asarray
    levels = [*drawing.levels.values()]
    low, high = min([*frame["y"], *levels]), max([*frame["y"], *levels])
    low = low if drawing.floor is None else max(low, drawing.floor)
    left, right = float(frame["x"].min()), float(frame["x"].max())
    canvas = _canvas(width - MARGIN, place_x(left), place_y(low), place_x(right), place_y(high))

    for level in levels:
        for x in np.linspace(canvas.xmin, canvas.xmax_inside, canvas.width // 2):
            canvas.point(float(x), float(place_y(level)))
    for mark in drawing.marks.values():
        if left <= mark <= right:
            for y in np.linspace(canvas.ymin, canvas.ymax_inside, 2 * HEIGHT):
                canvas.point(float(place_x(mark)), float(y))
    keys = _keys(names)
    for place, name in enumerate(names):
        curve = frame[frame["line"] == name]
        x, y = (np.atleast_1d(f(curve[axis].to_numpy(float))) for f, axis in ((place_x, "x"), (place_y, "y")))
        _curve(canvas, x, y)
        if len(names) > 1 and (seen := y >= canvas.ymin).any():
            at = x[seen][0] + (x[seen][-1] - x[seen][0]) * (place + 0.5) / len(names)
            canvas.point(float(at), float(np.interp(at, x, y)), marker=keys[name])

    heights = {_row(canvas, float(place_y(y))): y for y in ticks(low, high, "log" if drawing.log_y else "linear")}
    yield f"{'':{MARGIN - 2}} {drawing.y}"
    for row, line in enumerate(canvas.plot().replace("⠀", " ").splitlines()):
        tick = heights.get(row)
        yield f"{'' if tick is None else brief(tick):>{MARGIN - 2}} {'│' if tick is None else '┤'}{line}".rstrip()
    across = ticks(left, right, "offsets" if drawing.log_x else "linear")
    yield from _axis(drawing, canvas, {tick: place_x(tick) for tick in across})
    entries = [f"{keys[name]} {name}" for name in names] if len(names) > 1 else []
    entries += [f"┄ {valued(label, at)}" for label, at in drawing.levels.items()]
    entries += [f"┆ {valued(label, at)}" for label, at in drawing.marks.items() if left <= at <= right]
    yield from _legend(entries, width)
    if drawing.floor is not None and frame["y"].min() < drawing.floor:
        yield f"Curves go on below {brief(drawing.floor)}, down to {brief(frame['y'].min())}."
    if len(names) < len(drawing.lines):
        yield f"{len(names)} of {len(drawing.lines)} curves; --out FILE.svg has all."


def _logarithm(x: Any) -> Any:
    return np.log2(np.asarray(x) + 1)


def _canvas(width: int, left: float, low: float, right: float, high: float) -> Canvas:
    """A canvas with its outermost dots at the ends of the axes."""
    right = right if right > left else left + 1
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    across, up = 2 * width / (2 * width - 1), 4 * HEIGHT / (4 * HEIGHT - 1)
    xmax, ymax = float(left + (right - left) * across), float(low + (high - low) * up)
    return Canvas(width, HEIGHT, float(left), float(low), xmax, ymax, mode="names")


def _curve(canvas: Canvas, x: np.ndarray, y: np.ndarray) -> None:
    """Clipped at the lower edge; a single point is a dot."""
    if len(x) == 1:
        canvas.point(float(x[0]), float(y[0]))
    for here, there, below, above in zip(x[:-1], x[1:], y[:-1], y[1:], strict=True):
        canvas.line(float(here), float(below), float(there), float(above))


def _row(canvas: Canvas, y: float) -> int:
    """Row of a canvas for y, counted from the top."""
    last, share = canvas.height - 1, (y - canvas.ymin) / (canvas.ymax - canvas.ymin)
    return last - min(last, int(share * canvas.height))


def _axis(drawing: Lines, canvas: Canvas, places: Mapping[float, float]) -> Iterator[str]:
    """The line below the curves, the numbers of its ticks as far as they have room, its title."""
    rule, numbers = ["─"] * canvas.width, [" "] * (canvas.width + MARGIN)
    end = -1
    for tick, at in places.items():
        column = min(canvas.width - 1, int((at - canvas.xmin) / (canvas.xmax - canvas.xmin) * canvas.width))
        text = brief(tick)
        start = max(0, min(column + MARGIN - len(text) // 2, len(numbers) - len(text)))
        if start > end:
            rule[column], numbers[start : start + len(text)] = "┬", text
            end = start + len(text)
    yield " " * (MARGIN - 1) + "└" + "".join(rule)
    yield "".join(numbers).rstrip()
    yield f"{drawing.x_title:^{canvas.width + 2 * MARGIN}}".rstrip()


def _keys(names: Sequence[str]) -> dict[str, str]:
    """A letter for each curve: the number of its head if all curves are heads 1 to 9, else A, B, ..."""
    last = [name.rpartition(" ")[2] for name in names]
    alone = all(name == f"head {digit}" and len(digit) == 1 for name, digit in zip(names, last, strict=True))
    return dict(zip(names, last if alone else "ABCDEFGH", strict=False))


def _legend(entries: Sequence[str], width: int) -> list[str]:
    """Lines of entries, each of which stays whole."""
    whole = "  ".join(entry.replace(" ", "\N{NO-BREAK SPACE}") for entry in entries)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped(whole, width)]


# ---- words -----------------------------------------------------------------------------------------------------------
def fact(head: str, text: str, width: int) -> Iterator[str]:
    """Lines of a head and its text; without a head the paragraphs of a formula, with indented lines unchanged."""
    if head:
        yield from wrapped(f"{head:10} {text}", width, " " * 11)
        return
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(" "):
            yield from paragraph.splitlines()
        else:
            yield from wrapped(" ".join(paragraph.split()), width)
