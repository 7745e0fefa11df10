"""Claims with their verdicts, on the terminal and as CSV."""

from collections.abc import Iterator, Sequence

import pandas as pd
from rich.table import Table
from rich.text import Text

from claims.base import CONFIRMED, NOT_RUN, REFUTED, UNDECIDED, Judged, Outcome, Statement
from longitude.study.report import STYLES, folding

COLOURS = {CONFIRMED: "green", REFUTED: "red", UNDECIDED: "yellow", NOT_RUN: "dim"}
"""Of verdicts, on the terminal."""


def table(judged: Sequence[Judged]) -> Table:
    """A line for each claim, and below it one for each of its statements."""
    made = folding("claim", "", "number, 95% interval", "verdict", words=4)
    for each in judged:
        claim, verdict = each.claim, each.verdict
        made.add_row(str(claim.number), Text(claim.claimed, "bold"), "", Text(verdict, COLOURS[verdict]))
        for statement, outcome, varied in _lines(each):
            words = Text(outcome.verdict or NOT_RUN, STYLES.get(outcome.verdict, "dim"))
            made.add_row("varied" if varied else "", statement.words, outcome.number or outcome.remark, words)
    return made


def frame(judged: Sequence[Judged]) -> pd.DataFrame:
    """A row for each statement."""
    rows = []
    for each in judged:
        for statement, outcome, varied in _lines(each):
            found = outcome.estimate
            rows.append(
                {
                    "claim": each.claim.name,
                    "verdict": each.verdict,
                    "statement": statement.words,
                    "statement_verdict": outcome.verdict or NOT_RUN,
                    "varied": varied,
                    "value": found and found.value,
                    "low": found and found.low,
                    "high": found and found.high,
                    "over": found and found.over,
                    "text_low": found and found.text_low,
                    "text_high": found and found.text_high,
                    "seeds": found and len(found.values),
                    "remark": outcome.remark,
                }
            )
    return pd.DataFrame(rows)


def _lines(each: Judged) -> Iterator[tuple[Statement, Outcome, bool]]:
    """Statements with their outcomes; True: of a variation, which is no part of the verdict."""
    yield from ((*pair, False) for pair in zip(each.claim.statements, each.outcomes, strict=True))
    yield from ((*pair, True) for pair in zip(each.claim.varied, each.varied, strict=True))
