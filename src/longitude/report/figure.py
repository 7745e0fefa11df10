"""Figures, and the pages that show them: colors and lettering are the same in all.

One Altair chart gives the live chart of a page, the SVG and the PNG. A page is one HTML file that needs no other and no network.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

import altair as alt
import numpy as np
import pandas as pd
import vl_convert
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from longitude import __version__
from longitude.report.wording import hue_of
from longitude.runs.files import atomic, make_folder

# Okabe and Ito's colors, distinct for color-blind readers, less yellow and black, the light ones darkened so that
# words in them can be read on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b85a92", "#c98a00", "#46a3da", "#6b6b6b")
# From dark to light through the hues of a flame: heads and layers in their order.
ORDERED = ("#0d0887", "#4903a0", "#7401a8", "#9c179e", "#bd3786", "#d8576b", "#e56b5d", "#ed7953")
DARK_ORDERED = ("#8a63ff", "#ac66f0", "#c868dc", "#e06dbf", "#f47896", "#fb8f72", "#fdae4f", "#fbd24a")
DASHES = ([1, 0], [7, 3], [2, 2], [7, 3, 2, 3], [12, 3])
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
INK, GREY, GRID = "#1d2733", "#5b6673", "#e4e8ec"
EDGE, PAPER = "#b6bec7", "#ffffff"
RED = "#c1121f"
"""The end of a scale from PAPER on: high losses."""
DARK = {
    **dict(zip(COLORS, ("#4aa8e8", "#f0813c", "#2fc797", "#dd8fbd", "#e0ab3c", "#8ccbf2", "#a9b1b9"), strict=True)),
    **dict(zip(ORDERED, DARK_ORDERED, strict=True)),
    PAPER: "#12171d",
    RED: "#ff6f61",
    INK: "#e6ebf0",
    GREY: "#9dabb8",
    GRID: "#2a333d",
    EDGE: "#55616d",
}
"""Colors above -> their replacements in dark mode."""
WIDTH = 760
"""Width of the SVG and PNG files, in pixels; the PNG has two dots per pixel."""
SLACK = 24
"""Least pixels added at the right of a file, for wider fonts of readers."""
WIDER = 1.5
"""Pixels by which a character of a bold name at the end of a line may be wider there: DejaVu Sans against Liberation Sans."""


@dataclass(frozen=True)
class Figure:
    """A chart with its texts.

    Attributes:
        name: Name of its files and of its section in a page.
        title: Title, plain text.
        caption: Caption, plain text.
        alt: Description of the picture, for screen readers.
        chart: The Altair chart.
        resizes: Whether it takes the width of its page; charts of several panels have their own.
        axes: Axes, "x" and "y", that a reader may switch between linear and logarithmic: all numbers there are above 0.
        table: Its numbers as a table, for readers who do not see it; None if a table is next to it anyway.
    """

    name: str
    title: str
    caption: str
    alt: str
    chart: Any
    resizes: bool = True
    axes: tuple[Literal["x", "y"], ...] = ()
    table: pd.DataFrame | None = None

    def sized(self, width: int | str) -> Any:
        """The chart at a width in pixels, or "container"."""
        return self.chart.properties(width=width) if self.resizes else self.chart

    def spec(self) -> dict[str, Any]:
        """Vega-Lite, at the width of the page; the browser gives the description to screen readers."""
        return self.sized("container").properties(description=self.alt).to_dict()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Output in a notebook: an SVG with its texts, or only the texts if pictures are not supported."""
        picture = described(svg_of(self.sized(WIDTH)), self.title, self.alt, self.name)
        return {"image/svg+xml": picture, "text/plain": self.alt}, {"image/svg+xml": {"alt": self.alt}}


def color_of(label: str) -> str:
    """The color of an encoding, the same in every figure."""
    return COLORS[hue_of(label)]


def ordered(count: int) -> list[str]:
    """Colors of lines that have an order: adjacent lines have similar colors, the first and the last do not."""
    return [ORDERED[round(i * (len(ORDERED) - 1) / max(1, count - 1))] for i in range(count)]


def dashes_of(labels: Sequence[str]) -> list[list[int]]:
    """The dash of each label: those of one color have different dashes."""
    hues = [*map(hue_of, labels)]
    return [DASHES[hues[:place].count(hue) % len(DASHES)] for place, hue in enumerate(hues)]


def themed(chart: Any, axis: dict[str, Any] | None = None, **more: Any) -> Any:
    """The chart in our lettering and colors. axis, more: further settings of `configure`."""
    letters = {"labelColor": GREY, "titleColor": GREY, "labelFontSize": 12, "titleFontSize": 12, "gridColor": GRID}
    plain = {"titleFontWeight": "normal", "domain": False, "tickColor": GRID}
    settings: dict[str, Any] = {
        "axis": alt.AxisConfig(**(letters | plain | (axis or {}))),
        "title": alt.TitleConfig(color=INK, fontSize=13, fontWeight=600),
        "legend": alt.LegendConfig(labelColor=GREY, titleColor=GREY, titleFontWeight="normal"),
    }
    return chart.configure(font=FONT, background=PAPER, view=alt.ViewConfig(stroke=None), **(settings | more))


def apart(values: list[float], gap: float) -> list[float]:
    """Ascending values moved as little as needed for `gap` between neighbors: clusters keep their mean."""
    from scipy.optimize import isotonic_regression  # it takes a second to load, and few figures have such labels

    gaps = gap * np.arange(len(values))
    return (isotonic_regression(values - gaps).x + gaps).tolist()


def save(chart: Any, path: Path) -> None:
    """Save as SVG or PNG, by the suffix, atomically."""
    with atomic(path) as unfinished:
        if path.suffix == ".svg":
            unfinished.write_text(svg_of(chart), encoding="utf-8")
        else:
            _still(chart).save(str(unfinished), format=path.suffix[1:], scale_factor=2)


def described(svg: str, title: str, description: str, name: str = "picture") -> str:
    """The SVG with words that screen readers read; name: prefix of its ids, unique within a page."""
    root, rest = svg.split(">", 1)
    labels = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
    return f'{root} role="img" aria-labelledby="{name}-title {name}-desc">{labels}{rest}'


def svg_of(chart: Any) -> str:
    """The text of an SVG file; cells of heat maps meet in it without seams."""
    file, cells = StringIO(), 'class="mark-rect role-mark'
    _still(chart).save(file, format="svg")
    return file.getvalue().replace(cells, f'shape-rendering="crispEdges" {cells}')


def _still(chart: Any) -> Any:
    """The chart of a file: without invisible layers for a pointer, and with room for another font."""
    spec = _visible(chart.to_dict())
    if isinstance(spec.get("padding"), dict):  # readers' fonts may be wider than the font of the layout
        names = [point.get("name", "") for points in spec.get("datasets", {}).values() for point in points]
        longest = max(map(len, names), default=0)
        spec["padding"] |= {"right": spec["padding"]["right"] + max(SLACK, round(WIDER * longest))}
    return alt.Chart.from_dict(spec)


def _visible(spec: Any) -> Any:
    """A specification without invisible layers, which only a pointer finds: they would be most of a file."""
    if isinstance(spec, list):
        marks = [part.get("mark") if isinstance(part, dict) else None for part in spec]
        hidden = [isinstance(mark, dict) and mark.get("opacity") == 0 for mark in marks]
        return [_visible(part) for part, unseen in zip(spec, hidden, strict=True) if not unseen]
    return {name: _visible(part) for name, part in spec.items()} if isinstance(spec, dict) else spec


def save_figures(figures: Sequence[Figure], folder: Path) -> None:
    """NAME.svg and NAME.png of every figure; pictures of figures that are not made any more are removed."""
    make_folder(folder)
    kept = {folder / f"{figure.name}.{kind}": figure for figure in figures for kind in ("svg", "png")}
    for path, figure in kept.items():
        save(figure.sized(WIDTH), path)
    for path in {*folder.glob("*.svg"), *folder.glob("*.png")} - kept.keys():
        path.unlink()


# ---- pages -----------------------------------------------------------------------------------------------------------
def write_page(path: Path, package: str, template: str, figures: Sequence[Figure], **context: Any) -> None:
    """Render a template of a package to a file, atomically.

    Args:
        path: The page. It shows figures/NAME.svg, if that is next to it, until the live chart is drawn, and in print.
        package: Package of the template, "longitude.study"; the template extends "page.html.j2" of this package.
        template: File name of the template.
        figures: Figures that the template draws by `chart(figure)`.
        context: Other variables of the template.
    """
    pictures = {figure.name: picture for figure in figures if (picture := _picture(path, figure)) is not None}
    page = (
        environment(package)
        .get_template(template)
        .render(
            figures=figures,
            pictures=pictures,
            specs={figure.name: figure.spec() for figure in figures},
            dark=DARK,
            javascript=_javascript() if figures else "",
            version=__version__,
            **context,
        )
    )
    with atomic(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


def environment(package: str) -> Environment:
    """Templates of a package, and those of this one, which escape every text."""
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader("longitude.report", ".")])
    spaces: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **spaces)


def _picture(path: Path, figure: Figure) -> str | None:
    """The saved SVG, as base64."""
    picture = path.parent / "figures" / f"{figure.name}.svg"
    return base64.b64encode(picture.read_bytes()).decode() if picture.exists() else None


@cache
def _javascript() -> Markup:
    """Vega, Vega-Lite and vega-embed, once for all charts. Safe in a page: no end of a script element is in it."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    assert "</script" not in bundle.lower() and "<!--" not in bundle
    return Markup(f"/*!\n{vega_notice()}*/\n{bundle}")


def vega_notice() -> str:
    """The licenses of Vega and its dependencies, which must be part of every copy: the bundle does not contain them."""
    return Path(__file__).with_name("vega_notice.txt").read_text(encoding="utf-8")
