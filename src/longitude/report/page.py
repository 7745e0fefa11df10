"""Pages: one HTML file that needs nothing else and no network, from a template and its figures."""

import base64
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from longitude import __version__
from longitude.report.figure import DARK, Figure
from longitude.runs.files import atomic


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
