"""`longitude explore`."""

import sys
from pathlib import Path

from longitude.cli.shared import DONE, waiting

EXAMPLES = """  longitude explore
  longitude explore --out pages/explore.html"""


def explore(out: Path = Path("explore.html")) -> int:
    """Write an HTML page to try position encodings on; it needs no network.

    Args:
        out: The file, .html.
    """
    if out.suffix != ".html":
        raise ValueError(f"--out {out}: expected a name that ends in .html")
    with waiting("drawing every encoding: about a minute"):
        from longitude.explore import write

        write(out)
    print(f"{out}: open it in a browser", file=sys.stderr)
    return DONE
