"""The offline page of `longitude explore`, on which readers try encodings."""

from pathlib import Path

from longitude.explore import values
from longitude.explore.figures import figures
from longitude.report.page import write_page


def write(path: str | Path) -> None:
    """Write the page: one HTML file that needs no network.

    Args:
        path: The file; one that exists is replaced.

    Raises:
        ValueError: Its folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(
            f"{path}: expected a file in a folder that exists, and there is no {path.parent}; make it first"
        )
    encodings = [*values.encodings()]
    schemes = [values.NO_SCHEME, *values.schemes(2, values.ROPE.trained)]
    words = {"encodings": encodings, "schemes": schemes, "factors": values.FACTORS}
    write_page(path, "longitude.explore", "explore.html.j2", [*figures(encodings)], **words)


__all__ = ["write"]
