"""Claims with their verdicts, on the terminal and as CSV."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from claims.base import CONFIRMED, NOT_RUN, REFUTED, UNDECIDED, Claim, Judged, Statement
from longitude.report.table import table as plain_table
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR
from longitude.statistics.seeds import benjamini_hochberg

COLORS = {CONFIRMED: "green", REFUTED: "red", UNDECIDED: "yellow", NOT_RUN: "dim"}
"""Terminal colors of claims."""
STATEMENT_COLORS = {HOLDS: "green", LOST: "red", UNCLEAR: "yellow", None: "dim"}


def table(judged: Sequence[Judged]) -> Table:
    """A line for each claim, and below it one for each of its statements."""
    made = plain_table("claim", "", "number, 95% interval", "verdict", words=4, fold=True)
    for claim in judged:
        made.add_row(
            claim.claim.number, Text(claim.claim.claimed, "bold"), "", Text(claim.verdict, COLORS[claim.verdict])
        )
        for part, statement, outcome in claim.lines:
            word = Text(outcome.word, STATEMENT_COLORS[outcome.verdict])
            made.add_row(part, statement.words, outcome.number or outcome.remark, word)
    return made


def definitions(claims: Sequence[Claim]) -> pd.DataFrame:
    """A row for each statement without its outcome, from which the notebook computes it again."""
    return pd.DataFrame(_definition(claim, *line) for claim in claims for line in claim.every)


def frame(judged: Sequence[Judged]) -> pd.DataFrame:
    """A row for each statement, with its outcome."""
    rows, chances = [], iter(false_discovery(judged))
    ends = ("value", "low", "high", "over", "text_low", "text_high", "seed_low", "seed_high", "p")
    for claim in judged:
        for part, statement, outcome in claim.lines:
            numbers = {name: outcome.estimate and getattr(outcome.estimate, name) for name in ends}
            seeds = outcome.estimate and len(outcome.estimate.values)
            words = {"verdict": claim.verdict, "statement_verdict": outcome.word, "remark": outcome.remark}
            rows.append(
                _definition(claim.claim, part, statement) | words | numbers | {"q": next(chances), "seeds": seeds}
            )
    return pd.DataFrame(rows)


def _definition(claim: Claim, part: str, statement: Statement) -> dict[str, Any]:
    reads = "; ".join("/".join(str(name) for name in place if name is not None) for place in statement.reads)
    above, below = statement.expected
    of = {"claim": claim.name, "part": part, "clause": claim.clause_of(statement), "statement": statement.words}
    return of | {"kind": statement.kind, "reads": reads, "above": above, "below": below}


def false_discovery(judged: Sequence[Judged]) -> list[float | None]:
    """p-values of all statements in order, adjusted together by Benjamini and Hochberg; None for a statement without one."""
    chances = [outcome.estimate and outcome.estimate.p for claim in judged for *_, outcome in claim.lines]
    adjusted = iter(benjamini_hochberg([p for p in chances if p is not None]))
    return [None if p is None else next(adjusted) for p in chances]
