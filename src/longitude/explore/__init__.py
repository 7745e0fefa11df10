"""The offline page of `longitude explore`, on which readers try encodings."""

from pathlib import Path

from markupsafe import Markup

from longitude.errors import UsageError
from longitude.explore import values
from longitude.explore.figures import figures
from longitude.report.page import write_page

PLACES = {
    "the-input": "sinusoidal",
    "a-rotation": "rope",
    "a-bias-of-the-scores": "alibi",
    "a-vector-per-offset": "shaw",
    "content": "fox",
    "the-mask-or-the-mixer": "nope",
}
"""Section of docs/concepts/where-position-enters.md, to which the picture leads -> the encoding that this page shows for it."""


def write(path: str | Path) -> None:
    """Write the page: one HTML file that needs no network.

    Args:
        path: The file; one that exists is replaced.

    Raises:
        ValueError: Its folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise UsageError(str(path), "a file in a folder that exists", f"no folder {path.parent}", "make it first")
    encodings = [*values.encodings()]
    schemes = [values.NO_SCHEME, *values.schemes(2, values.ROPE.trained)]
    where = Path(__file__).with_name("where.svg").read_text(encoding="utf-8")
    for section, name in PLACES.items():
        where = where.replace(f'href="#{section}"', f'href="#first={name}"')
    words = {"encodings": encodings, "schemes": schemes, "factors": values.FACTORS, "where": Markup(where)}
    write_page(path, "longitude.explore", "explore.html.j2", [*figures(encodings)], **words)


__all__ = ["write"]
