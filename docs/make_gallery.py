"""The gallery: a row for every registered encoding, with a small picture of what it does with distance, to sort."""

import math
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from claims.evidence import KEPT
from fill_numbers import little, newest, word
from longitude.catalogue import acts, source_of
from longitude.drawings.drawing import FLOOR, Drawing, Lines
from longitude.positions.base import ENCODINGS
from longitude.report.wording import brief, paper
from longitude.study.analysis import analyse
from longitude.testing import example

WIDTH, HEIGHT, MARGIN = 160, 56, 3
NEAR = 0.4
"""Pixels that a point may lie off a line that leaves it out."""
FACTOR = 16
"""Of the test length over the training length."""
YEAR = re.compile(r" (\d{4}),")


class Row(NamedTuple):
    """change: of the loss at FACTOR times the training length; None: not measured."""

    name: str
    paper: str
    picture: str
    kind: str
    year: int
    learned: bool
    verdict: str
    change: float | None
    cost: float | None


def page(drawn: dict[str, list[Drawing]]) -> str:
    """The page, of every encoding's drawings."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "_templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    script = resources.files("longitude.report").joinpath("sort.js").read_text(encoding="utf-8")
    rows = [row(name, drawings) for name, drawings in drawn.items()]
    rows.sort(key=lambda row: math.inf if row.change is None else row.change)
    environment.filters["signed"] = signed
    return environment.get_template("gallery.md.j2").render(rows=rows, script=script, factor=FACTOR)


def row(name: str, drawings: list[Drawing]) -> Row:
    built = example(name)()
    costs = {row["encoding"]: row["cost"] for row in newest("properties")["rows"]}
    verdict, change = holding().get(name, ("not measured", None))
    source = source_of(built) or source_of(ENCODINGS[name]) or ""
    return Row(
        name=name,
        paper=paper(name),
        picture=thumbnail(paper(name), drawings),
        kind=", ".join(acts(built)) or "none",
        year=min(map(int, YEAR.findall(source))),
        learned=built.learned,
        verdict=verdict,
        change=change,
        cost=costs.get(name),
    )


@cache
def holding() -> dict[str, tuple[str, float | None]]:
    """Encoding -> its verdict at FACTOR times the training length, and the change of its loss.

    They are of the study of the claims, else of the newest other study that has the encoding.
    """
    found: dict[str, tuple[str, float | None]] = {}
    for rows in (
        [each._asdict() for each in analyse(KEPT / "ladder-a").main],
        *(newest(study)["rows"] for study in ("study-modern", "study-carriers", "study")),
    ):
        trained = min((each["length"] for each in rows), default=0)
        for each in rows:
            if each["length"] == FACTOR * trained and each["label"] in ENCODINGS:
                found.setdefault(each["label"], _verdict(each))
    return found


def _verdict(row: dict[str, Any]) -> tuple[str, float | None]:
    if row["value"] is None:
        return "no such positions", None
    return (word(row) or "no word") + ", learned too little" * little(row), row["change"]


def signed(change: float) -> str:
    """-0.0149 -> −1.5%; whole above 10%."""
    return (f"{change:+.0%}" if abs(change) > 0.1 else f"{change:+.1%}").replace("-", "−")


# ---- pictures --------------------------------------------------------------------------------------------------------
def thumbnail(name: str, drawings: list[Drawing]) -> str:
    """The first curve over a distance or a position, on linear axes; lines fade from the first to the last."""
    curves = [each for each in drawings if isinstance(each, Lines) and each.x != "rotary pair"]
    if not curves:
        return ""
    chosen = curves[0]
    lines = [_finite(*each) for each in chosen.lines.values()]
    low, high = (f(float(f(y)) for _, y in lines) for f in (min, max))
    paths = []
    for i, (x, y) in enumerate(lines):
        across = MARGIN + (x - x.min()) / (np.ptp(x) or 1) * (WIDTH - 2 * MARGIN)
        down = MARGIN + (high - y) / (high - low) * (HEIGHT - 2 * MARGIN) if low < high else y * 0 + HEIGHT / 2
        fade = 1 - 0.75 * i / max(1, len(lines) - 1)
        points = "L".join(f"{a:.1f} {b:.1f}" for a, b in _thinned(across, down))
        paths.append(f'<path d="M{points}" opacity="{fade:.2f}"/>')
    ends = f"{brief(low)} to {brief(high)}" if low < high else brief(low)
    axis = f"{chosen.y}: {ends.replace('-', '−')}"
    axis += "" if "offset" in chosen.x else f", by {chosen.x}"
    words = f"{name}: {chosen.title.lower()}; {axis}"
    return (
        f'<svg class="thumb" role="img" aria-label="{words}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}"><title>{words}</title>{"".join(paths)}</svg><br><small>{axis}</small>'
    )


def _finite(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of distances from 0 on, and not below the floor of drawings."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    kept = np.isfinite(y) & (x >= 0)
    return x[kept], y[kept].clip(min=FLOOR)


def _thinned(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[float, float]]:
    """Points without which the line would look otherwise."""
    start = 0
    yield x[0], y[0]
    for i in range(2, len(x)):
        between = slice(start + 1, i)
        straight = np.interp(x[between], [x[start], x[i]], [y[start], y[i]])
        if np.abs(straight - y[between]).max() > NEAR:
            start = i - 1
            yield x[start], y[start]
    yield x[-1], y[-1]
