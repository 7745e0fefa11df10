"""docs/verdicts.svg: a square for each claim, by its verdict on docs/claims.md, that leads to the claim."""

import re
from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from fill_numbers import ROOT
from pictures import Picture, drawing, words_at

ROW = re.compile(r"^\| (\w+) \| \[(.+?)\]\(#([\w-]+)\) \| \*\*(.+?)\*\* \|", re.MULTILINE)
KINDS = {
    "confirmed": ("C", "var(--sea)", "var(--paper)"),
    "refuted": ("R", "var(--lost)", "var(--paper)"),
    "undecided at this size": ("U", "var(--grid)", "var(--ink)"),
    "not run": ("N", "none", "var(--ink)"),
}
"""Verdict -> its letter, the color of its square and of the words on it."""
WIDTH, COLUMNS, SIDE = 400, 10, 36


class Square(NamedTuple):
    number: str
    claimed: str
    anchor: str
    verdict: str


def squares() -> dict[str, list[Square]]:
    """Claims and errata, as the page has them."""
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").partition("\n## ")[0]
    claims, _, errata = text.partition("\nErrata")
    return {
        name: [Square(*row) for row in ROW.findall(part)] for name, part in (("claims", claims), ("errata", errata))
    }


def counted(found: dict[str, list[Square]]) -> dict[str, int]:
    """Verdict -> how many claims have it."""
    return {kind: sum(each.verdict == kind for each in found["claims"]) for kind in KINDS}


def words(found: dict[str, list[Square]]) -> str:
    parts = []
    for name, group in found.items():
        by_kind = {kind: [each.number for each in group if each.verdict == kind] for kind in KINDS}
        parts.append(f"{len(group)} {name}: " + "; ".join(f"{k}: {', '.join(v)}" for k, v in by_kind.items() if v))
    return ". ".join(parts) + "."


def chart(found: dict[str, list[Square]]) -> str:
    """Ten in a row, errata in a row of their own, and what the letters say."""
    pitch, parts, y = (WIDTH - SIDE) / (COLUMNS - 1), [], 0.0
    for name, group in found.items():
        if name == "errata":
            parts.append(words_at(0, y + 16, "Errata of texts", "quiet"))
            y += 24
        parts += [_square(each, i % COLUMNS * pitch, y + i // COLUMNS * pitch) for i, each in enumerate(group)]
        y += -(-len(group) // COLUMNS) * pitch + 4
    parts += _legend(counted(found), y + 8)
    return drawing(WIDTH, round(y + 62), parts)


def _box(kind: str, x: float, y: float, side: float) -> str:
    edge = ' stroke="var(--grey)" stroke-dasharray="3 3"' if KINDS[kind][1] == "none" else ""
    return f'<rect x="{x + 1:g}" y="{y + 1:g}" width="{side - 2}" height="{side - 2}" rx="4" fill="{KINDS[kind][1]}"{edge}/>'


def _square(each: Square, x: float, y: float) -> str:
    letter, _, ink = KINDS[each.verdict]
    label = quoteattr(f"Claim {each.number}, {each.verdict}: {each.claimed}")
    return (
        f'<a href="claims.md#{each.anchor}" aria-label={label}><title>{label[1:-1]}</title>{_box(each.verdict, x, y, SIDE)}'
        + words_at(x + SIDE / 2, y + 15, each.number, "middle", style=f"font-size: 12px; fill: {ink}")
        + words_at(x + SIDE / 2, y + 30, letter, "middle strong", style=f"font-size: 14px; fill: {ink}")
        + "</a>"
    )


def _legend(counts: dict[str, int], y: float) -> Iterator[str]:
    for i, (kind, count) in enumerate(counts.items()):
        x, at = i // 2 * 180, y + i % 2 * 26
        yield _box(kind, x, at, 22)
        yield words_at(x + 11, at + 16, KINDS[kind][0], "middle strong", style=f"fill: {KINDS[kind][2]}")
        yield words_at(x + 30, at + 16, f"{kind}: {count}")


VERDICTS = Picture("verdicts", "The verdict on each claim", squares, chart, words, both=True)
