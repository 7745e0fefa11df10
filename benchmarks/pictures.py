"""A picture of the docs, drawn from committed results, with its numbers in words: light and dark, in two files or in one."""

import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from fill_numbers import ROOT
from longitude.report.figure import COLORS, DARK, EDGE, FONT, GREY, GRID, INK, PAPER, described, save


class Picture(NamedTuple):
    """docs/NAME.svg and docs/NAME-dark.svg; docs/NAME.svg alone where it is an SVG by `drawing`.

    chart and words: of what `found` returns; words are all its numbers, for readers who do not see it.
    """

    name: str
    title: str
    found: Callable[[], Any]
    chart: Callable[[Any], Any]
    words: Callable[[Any], str]
    both: bool = False
    """Whether its chart is an SVG that has both colorings."""

    @property
    def files(self) -> dict[str, bool]:
        """Its files, and whether one is for dark pages."""
        return {f"{self.name}.svg": False} | ({} if self.both else {f"{self.name}-dark.svg": True})

    def write(self) -> None:
        """All of them; the dark one is the other in the colors of dark pages."""
        found = self.found()
        for name, dark in self.files.items():
            path = ROOT / "docs" / name
            if self.both:
                svg = self.chart(found)
            else:
                save(self.chart(found), path)
                svg = path.read_text(encoding="utf-8")
            if dark:
                svg = re.sub("|".join(DARK), lambda color: DARK[color[0]], svg)
            svg = described(svg, self.title, self.words(found), path.stem).rstrip()
            if "<a " in svg:  # what is in an image has no links for screen readers
                svg = svg.replace('role="img"', 'role="group"', 1)
            path.write_text(svg + "\n", encoding="utf-8")

    def differing(self) -> list[str]:
        """The files that were drawn from other numbers."""
        expected = f">{escape(self.words(self.found()))}</desc>"
        paths = [ROOT / "docs" / name for name in self.files]
        return [p.name for p in paths if not p.exists() or expected not in p.read_text(encoding="utf-8")]


# ---- drawn by hand -----------------------------------------------------------------------------------------------------
NAMES = {
    "ink": INK,
    "grey": GREY,
    "grid": GRID,
    "edge": EDGE,
    "paper": PAPER,
    "sea": COLORS[0],
    "lost": "#a33f00",
    "holds": "#00694c",
}
LIGHTER = {**DARK, "#a33f00": "#ffab78", "#00694c": "#66dcb5"}
VARIABLES = {
    dark: " ".join(f"--{name}: {LIGHTER[color] if dark else color};" for name, color in NAMES.items())
    for dark in (False, True)
}
STYLE = f""".themed {{ {VARIABLES[False]} font-family: {FONT}; font-size: 14px; fill: var(--ink); }}
@media (prefers-color-scheme: dark) {{ .themed {{ {VARIABLES[True]} }} }}
html[data-theme="light"] .themed {{ {VARIABLES[False]} }}
html[data-theme="dark"] .themed {{ {VARIABLES[True]} }}
.themed .quiet {{ fill: var(--grey); }} .themed .strong {{ font-weight: 600; }} .themed .middle {{ text-anchor: middle; }}
.themed .end {{ text-anchor: end; }} .themed .small {{ font-size: 13px; }} .themed .title {{ font-size: 15px; font-weight: 600; }}
.themed a {{ text-decoration: none; }} .themed a:hover text, .themed a:focus text {{ text-decoration: underline; }}"""
"""As a file it follows the reader's color scheme; within a page of the site, its theme."""


def drawing(width: int, height: int, parts: Iterable[str], style: str = "") -> str:
    """An SVG in both colorings, that a page may hold with its links."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="themed" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="max-width: 100%; height: auto">'
        f'<style>{STYLE}{style}</style><rect width="{width}" height="{height}" fill="var(--paper)"/>{"".join(parts)}</svg>'
    )


def words_at(x: float, y: float, text: str, classes: str = "", **more: Any) -> str:
    """A line of text."""
    extra = "".join(f' {name}="{value}"' for name, value in more.items())
    return f'<text x="{x:g}" y="{y:g}" class="{classes}"{extra}>{escape(text)}</text>'


def titled(text: str, letters: int = 46) -> tuple[list[str], int]:
    """The lines of a title, which states the finding, and where they end."""
    lines = textwrap.wrap(text, letters)
    return [words_at(0, 18 + 20 * i, line, "title") for i, line in enumerate(lines)], 20 * len(lines) + 6
