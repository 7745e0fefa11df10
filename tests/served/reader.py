"""A rule in the place of a model: the number that the visible text states for what the last question asks."""

import re
from collections import Counter
from dataclasses import dataclass

HOLE = "\ufffc"
"""Stands in a text for tokens that are not visible."""
NUMBER = re.compile(r"(?<![\w-])\d{3,}(?![\w-])")
SENTENCE_END = re.compile(rf"[.!?](?=\s|$)|[\n{HOLE}]")
LITTLE = frozenset("a an and are at for has have in is it my of on s the this to was what which with".split())
"""Terms by which nothing is recognized."""
PLURAL = frozenset("all codes keys numbers values".split())
TAIL = 600
"""Letters at the end of a prompt in which its question stands."""


@dataclass(frozen=True)
class Statement:
    """A number, and the terms beside it in its sentence."""

    number: str
    terms: frozenset[str]


def terms(text: str) -> frozenset[str]:
    """Words and numbers, hyphens inside them, in lower case."""
    return frozenset(re.findall(r"\w+(?:-\w+)*", text.lower())) - LITTLE


def question(text: str) -> frozenset[str]:
    """The terms of the last question and what follows it; without a question mark, of the last sentences without a number."""
    tail = text[-TAIL:].rstrip()
    before, mark, after = tail.rpartition("?")
    if mark:
        return terms(SENTENCE_END.split(before)[-1] + " " + after)
    plain = [sentence for sentence in SENTENCE_END.split(tail) if sentence.strip() and not NUMBER.search(sentence)]
    return terms(" ".join(plain[-2:]))


def statements(text: str, asked: frozenset[str]) -> list[Statement]:
    """All numbers that are no part of the question; a number beside a hole has lost digits, and is none."""
    text, stated = re.sub(rf"\d*{HOLE}\d*", HOLE, text), []
    for sentence in SENTENCE_END.split(text):
        numbers = [number for number in NUMBER.findall(sentence) if number not in asked]
        parts = re.split(r"[,;]| and ", sentence) if len(numbers) > 1 else [sentence] * len(numbers)
        beside: frozenset[str] = frozenset()
        for part in parts:
            beside = terms(part) if terms(part) & asked else beside  # "A has 123 and 456", "for A, 123"
            stated += [Statement(n, beside) for n in NUMBER.findall(part) if n not in asked]
    return stated


def read(visible: str, whole: str) -> str | None:
    """What is stated in the visible text for the question of the whole; None if no such statement is visible.

    The statements that share most with the question are those asked for; a term counts less in the many that have it.
    """
    asked = question(whole)
    seen = statements(visible, asked)
    known = [*dict.fromkeys(seen + statements(whole, asked))]
    common = Counter(term for statement in known for term in statement.terms & asked)
    scores = {s: round(sum(1 / common[term] for term in s.terms & asked), 9) for s in known}
    best = max(scores.values(), default=0)
    if not best:
        return None
    keys = {statement.terms & asked for statement in known if scores[statement] == best}
    numbers = [*dict.fromkeys(statement.number for statement in seen if statement.terms & asked in keys)]
    return ", ".join(numbers if PLURAL & asked else numbers[-1:]) or None
