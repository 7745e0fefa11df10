"""Claims with their verdicts, on the terminal and as CSV."""

from collections.abc import Iterator, Sequence

import pandas as pd
from rich.table import Table
from rich.text import Text

from claims.base import CONFIRMED, NOT_RUN, REFUTED, UNDECIDED, Judged, Outcome, Statement
from longitude.report.table import table as plain_table
from longitude.statistics.seeds import benjamini_hochberg
from longitude.study.criterion import VERDICTS

COLORS = {CONFIRMED: "green", REFUTED: "red", UNDECIDED: "yellow", NOT_RUN: "dim"}
"""Terminal colors of verdicts."""


def table(judged: Sequence[Judged]) -> Table:
    """A line for each claim, and below it one for each of its statements."""
    made = plain_table("claim", "", "number, 95% interval", "verdict", words=4, fold=True)
    for each in judged:
        claim, verdict = each.claim, each.verdict
        made.add_row(str(claim.number), Text(claim.claimed, "bold"), "", Text(verdict, COLORS[verdict]))
        for statement, outcome, part in _lines(each):
            words = Text(outcome.word, VERDICTS[outcome.verdict].color if outcome.verdict in VERDICTS else "dim")
            made.add_row(part, statement.words, outcome.number or outcome.remark, words)
    return made


def frame(judged: Sequence[Judged]) -> pd.DataFrame:
    """A row for each statement."""
    rows, chances = [], iter(false_discovery(judged))
    for each in judged:
        for statement, outcome, part in _lines(each):
            found = outcome.estimate
            rows.append(
                {
                    "claim": each.claim.name,
                    "verdict": each.verdict,
                    "statement": statement.words,
                    "statement_verdict": outcome.word,
                    "part": part,
                    "value": found and found.value,
                    "low": found and found.low,
                    "high": found and found.high,
                    "over": found and found.over,
                    "text_low": found and found.text_low,
                    "text_high": found and found.text_high,
                    "seed_low": found and found.seed_low,
                    "seed_high": found and found.seed_high,
                    "p": found and found.p,
                    "q": next(chances),
                    "seeds": found and len(found.values),
                    "remark": outcome.remark,
                }
            )
    return pd.DataFrame(rows)


def false_discovery(judged: Sequence[Judged]) -> list[float | None]:
    """p-values of all statements in order, adjusted together by Benjamini and Hochberg; None for a statement without one."""
    found = [outcome.estimate and outcome.estimate.p for each in judged for _, outcome, _ in _lines(each)]
    adjusted = iter(benjamini_hochberg([p for p in found if p is not None]))
    return [None if p is None else next(adjusted) for p in found]


def _lines(each: Judged) -> Iterator[tuple[Statement, Outcome, str]]:
    """Statements with their outcomes, and which are no part of the verdict: "varied", and "larger" of the next size."""
    claim = each.claim
    parts = [
        ("", claim.statements, each.outcomes),
        ("varied", claim.varied, each.varied),
        ("larger", claim.larger, each.larger),
    ]
    for part, statements, outcomes in parts:
        yield from ((*pair, part) for pair in zip(statements, outcomes, strict=True))
