"""Measured numbers in prose stand in the page that the same paragraph links to, which is made from results; verdicts likewise."""

import re
from pathlib import Path

import pytest

from tests.docs.test_snippets import ROOT, sections

DOCS = ROOT / "docs"
PAGES = [DOCS / "choose.md", DOCS / "guides" / "extend-a-checkpoint.md", *sorted((DOCS / "concepts").glob("*.md"))]
NUMBER = re.compile(r"(?<![\w.:/-])[+−]?\d[\d,]*(?:\.\d+%?|%)(?![\w.]*\d)")
"""With a decimal point, or in percent."""
LINK = re.compile(r"\]\(([^)#:]*\.md)?(?:#([\w-]+))?\)")
PLAIN = re.compile(r"```.*?```|`[^`]*`|\[\d{4}\.\d{5}\]\([^)]*\)|95 ?%", re.DOTALL)
"""Code, numbers of papers, and the word for an interval: nothing that was measured."""
FILLED = re.compile(r"<!-- numbers:.*?<!-- end -->", re.DOTALL)
"""What is made from results, as another test sees to."""


def evidence(page: Path, anchor: str) -> str:
    """A page, or its part under a heading; of claims the part of all that share a number, because they share charts."""
    if not anchor:
        return page.read_text(encoding="utf-8")
    of_claims = re.match(r"\d+", anchor) if page.name == "claims.md" else None
    like = re.compile(rf"{of_claims[0]}(?!\d).*" if of_claims else re.escape(anchor))
    return "".join(text for name, text in sections(page).items() if like.fullmatch(name))


def unfounded(text: str, page: Path) -> list[str]:
    """Numbers of a text that no part has which the same paragraph, list item or table links to."""
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=[*-] )", text):
        links = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in LINK.findall(paragraph)]
        known = "\n".join(evidence(*link) for link in links)
        for number in NUMBER.findall(PLAIN.sub(" ", paragraph)):
            if not re.search(rf"(?<![\d.,+−]){re.escape(number)}(?![\d%]|\.\d)", known):
                found.append(number)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measured_numbers_are_those_of_the_linked_page(page: Path) -> None:
    assert unfounded(FILLED.sub("", page.read_text(encoding="utf-8")), page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_verdicts_are_those_of_the_linked_claims(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    for anchor, verdict in re.findall(r"claims\.md#([\w-]+)\)(?:,| \|) (confirmed|refuted|undecided)", text):
        assert f"Verdict: **{verdict}" in sections(DOCS / "claims.md")[anchor], anchor


def test_a_number_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("## One\n\n+12% and 3.41\n\n## Two\n\n5.00\n")
    assert unfounded("+12% and 3.41, [one](#one)", page) == unfounded("5.00, [all](page.md); `9.99`", page) == []
    assert unfounded("* 12% and 3.4, [one](#one)\n* 5.00, [one](#one)\n\n3.41", page) == ["12%", "3.4", "5.00", "3.41"]
