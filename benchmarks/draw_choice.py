"""docs/choice.svg: the table at the top of docs/choose.md as a tree of questions, whose leaves lead to the evidence."""

import re
import textwrap
from typing import NamedTuple
from xml.sax.saxutils import escape

from fill_numbers import ROOT
from pictures import Picture, drawing, words_at

ROW = re.compile(r"^\| \[(.+?)\]\(#([\w-]+)\) \| (.+?) \|", re.MULTILINE)
QUESTION = "Do you have trained weights?"
BRANCHES = {
    "Yes, a checkpoint. Can you train it further?": (
        "extend-a-checkpoint-without-training",
        "extend-a-checkpoint-with-short-training",
    ),
    "No. I train an encoder.": ("an-encoder",),
    "No. I train a decoder. What must it do?": (
        "train-from-scratch-evaluate-longer",
        "train-from-scratch-never-longer",
        "long-decoding-small-cache",
        "exact-recall",
        "algorithmic-tasks",
    ),
}
"""An answer, with the next question, and the sections of the page below it."""
WIDTH, LINE, INDENT = 400, 18, 22
LETTERS = 44
"""In a line of a leaf."""
STYLE = """
.themed .line { fill: none; stroke: var(--edge); stroke-width: 1.5; }
.themed .leaf rect { fill: var(--paper); stroke: var(--edge); } .themed .leaf:hover rect { stroke: var(--sea); }"""


class Rule(NamedTuple):
    case: str
    anchor: str
    take: str


def rules() -> dict[str, list[Rule]]:
    """Branch -> the rows of the table below it. ValueError where the table has other sections than the tree."""
    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8").partition("\n## ")[0].replace("`", "")
    rows = {found[2]: Rule(*found.groups()) for found in ROW.finditer(text)}
    if {*rows} != {anchor for below in BRANCHES.values() for anchor in below}:
        raise ValueError(f"docs/choose.md: expected a row for each section of the tree, got {', '.join(rows)}")
    return {answer: [rows[anchor] for anchor in below] for answer, below in BRANCHES.items()}


def words(found: dict[str, list[Rule]]) -> str:
    parts = [f"{answer} " + " ".join(f"{each.case}: {each.take}." for each in group) for answer, group in found.items()]
    return " ".join([QUESTION, *parts])


def chart(found: dict[str, list[Rule]]) -> str:
    """An outline: the question, its answers below it, their leaves below them."""
    parts, y, answers = [words_at(0, 18, QUESTION, "strong", style="font-size: 16px")], 34, []
    for answer, group in found.items():
        answers.append(y + 14)
        parts.append(words_at(INDENT, y + 19, answer, "strong"))
        y, ends = y + 34, []
        for each in group:
            leaf, height = _leaf(each, 2 * INDENT, y)
            parts.append(leaf)
            ends.append(y + height / 2)
            y += height + 8
        parts += [_line(INDENT + 6, y - sum(_height(each) + 8 for each in group) - 8, ends, INDENT - 6)]
        y += 8
    return drawing(WIDTH, y - 6, [_line(6, 26, answers, INDENT - 10), *parts], STYLE)


def _line(x: float, top: float, ends: list[float], length: float) -> str:
    branches = "".join(f"M{x} {end:g}h{length}" for end in ends)
    return f'<path class="line" d="M{x} {top:g}V{ends[-1]:g}{branches}"/>'


def _lines(each: Rule) -> list[tuple[str, str]]:
    """(text, classes) of each line of a leaf."""
    taken = [(line, "strong small") for line in textwrap.wrap(each.take, LETTERS)]
    return [(each.case[0].upper() + each.case[1:], "small quiet"), *taken]


def _height(each: Rule) -> int:
    return LINE * len(_lines(each)) + 12


def _leaf(each: Rule, x: int, y: int) -> tuple[str, int]:
    lines = [words_at(x + 10, y + LINE * (i + 1), *line) for i, line in enumerate(_lines(each))]
    box = f'<rect x="{x}" y="{y}" width="{WIDTH - x - 1}" height="{_height(each)}" rx="6"/>'
    link = f'<a class="leaf" href="#{each.anchor}" aria-label="{escape(each.case)}: {escape(each.take)}">'
    return f"{link}{box}{''.join(lines)}</a>", _height(each)


CHOICE = Picture("choice", "Which encoding to choose", rules, chart, words, both=True)
