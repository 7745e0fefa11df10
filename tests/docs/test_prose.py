"""What people read is short: sentences, paragraphs and words of pages, help texts and public docstrings. No wording is pinned.

`PYTHONPATH=docs:benchmarks:. python tests/docs/test_prose.py` prints every fault that is found.
"""

import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from longitude import cli
from longitude.study.config import StudyConfig
from make_api import public_names

ROOT = Path(__file__).parents[2]
SENTENCE, PARAGRAPH = 30, 80
"""Words at most."""
PHRASES = re.compile(
    r"\b(?:is to be|are to be|whose it is|in sight|of ours|of yours|nothing but|the begin of|behind [\d,]+ tokens)\b|\d %"
)
END = re.compile(r"(?<=[.!?])[\"')\]*]*\s+")
PAGES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY", *sorted(p.stem for p in (ROOT / "docs").rglob("*.md")))


def page(stem: str) -> str:
    """The text of a page, without what is made from results."""
    text = next(p for p in (ROOT / f"{stem}.md", *(ROOT / "docs").rglob(f"{stem}.md")) if p.exists()).read_text("utf-8")
    return re.sub(r"<!-- numbers:.*?<!-- end -->", "", text, flags=re.DOTALL)


def paragraphs(markdown: str) -> Iterator[str]:
    """Paragraphs and items as plain words: without code blocks, tables and HTML."""
    tokens = MarkdownIt().enable("table").parse(markdown)
    for before, token in pairwise(tokens):
        if token.type == "inline" and before.type in ("paragraph_open", "heading_open"):
            kept = {"text", "code_inline", "softbreak", "hardbreak"}
            yield "".join(each.content or " " for each in token.children or () if each.type in kept)


def faults(words: str) -> Iterator[str]:
    """What is wrong with a paragraph."""
    if len(words.split()) > PARAGRAPH:
        yield f"{len(words.split())} words in a paragraph: {words[:70]}"
    for sentence in END.split(words):
        if len(sentence.split()) > SENTENCE:
            yield f"{len(sentence.split())} words in a sentence: {sentence[:70]}"
        if sentence.startswith("Of "):
            yield f"begins with Of: {sentence[:70]}"
    yield from (f"{phrase!r}: {words[:70]}" for phrase in PHRASES.findall(words))


def of_page(stem: str) -> list[str]:
    return [fault for words in paragraphs(page(stem)) for fault in faults(words)]


def of_help(verb: str) -> list[str]:
    """The help of a verb, and of each option."""
    text = "\n\n".join(
        inspect.getdoc(each) or "" for each in (cli.verbs()[verb], *([StudyConfig] if verb == "study" else []))
    )
    return [fault for words in re.split(r"\n\s*\n|\n {4}(?=\w+:)", text) for fault in faults(" ".join(words.split()))]


def of_docstrings() -> list[str]:
    """The first line and the paragraphs before the sections of every public name; code and formulas are set in by four."""
    found = []
    for name, thing in public_names():
        prose = re.split(r"\n(?:Args|Attributes|Returns|Raises|Source):\n", inspect.getdoc(thing) or "")[0]
        for words in prose.split("\n\n") if inspect.isclass(thing) or inspect.isfunction(thing) else ():
            if not words.startswith("    "):
                found += [f"{name}: {fault}" for fault in faults(" ".join(words.split()))]
    return found


@pytest.mark.parametrize("stem", PAGES)
def test_a_page_is_written_in_short_sentences(stem: str) -> None:
    assert of_page(stem) == []


@pytest.mark.parametrize("verb", cli.verbs())
def test_a_help_is_written_in_short_sentences(verb: str) -> None:
    assert of_help(verb) == []


def test_public_docstrings_are_written_in_short_sentences() -> None:
    assert of_docstrings() == []


if __name__ == "__main__":
    for stem in PAGES:
        for fault in of_page(stem):
            print(f"{stem}: {fault}")
