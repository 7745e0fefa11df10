"""A picture of the docs for light pages and one for dark pages, drawn from committed results, with its numbers in words."""

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fill_numbers import ROOT
from longitude.report.figure import DARK, described, save


class Picture(NamedTuple):
    """docs/NAME.svg and docs/NAME-dark.svg.

    chart and words: of what `found` returns; words are all its numbers, for readers who do not see it.
    """

    name: str
    title: str
    found: Callable[[], Any]
    chart: Callable[[Any], Any]
    words: Callable[[Any], str]

    @property
    def files(self) -> dict[str, bool]:
        """Its files, and whether one is for dark pages."""
        return {f"{self.name}.svg": False, f"{self.name}-dark.svg": True}

    def write(self) -> None:
        """Both; the dark one is the other in the colours of dark pages."""
        found = self.found()
        for name, dark in self.files.items():
            path = ROOT / "docs" / name
            save(self.chart(found), path)
            svg = path.read_text(encoding="utf-8")
            if dark:
                svg = re.sub("|".join(DARK), lambda colour: DARK[colour[0]], svg)
            path.write_text(described(svg, self.title, self.words(found), path.stem).rstrip() + "\n", encoding="utf-8")

    def differing(self) -> list[str]:
        """The files that were drawn from other numbers."""
        expected = f">{self.words(self.found())}</desc>"
        paths = [ROOT / "docs" / name for name in self.files]
        return [p.name for p in paths if not p.exists() or expected not in p.read_text(encoding="utf-8")]

    def main(self) -> int:
        """Write, or with --check compare."""
        if "--check" not in sys.argv[1:]:
            self.write()
            return 0
        found = self.differing()
        print("\n".join(found) or "the pictures are those of the result")
        return int(bool(found))
