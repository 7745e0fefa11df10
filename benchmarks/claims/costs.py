"""A statement about time: two rows of a bench that this repository commits, which no study measures again."""

from typing import Any

from claims.base import Outcome, Statement
from claims.evidence import Evidence, NotRun
from longitude.report.wording import paper
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR

Row = dict[str, Any]


TURNS = 5
"""Turns of a bench that a spread is judged from; two turns that differ by a factor of five are no measurement."""


def time_below(bench: str, a: Row, b: Row, **both: Any) -> Statement:
    """The row a takes less time than b, with all that lies between the quartiles over turns.

    Each is judged by its ratio to one way that was timed in the same turns where it has such a ratio: two groups of a bench run
    one after the other, and the machine is faster in one than in the other. By its seconds only where neither has a ratio.

    Args:
        bench: The bench of `make bench-NAME`; "" for `make bench`.
        a: Fields of its row.
        b: Likewise.
        **both: Fields that both rows have.
    """

    def judge(evidence: Evidence) -> Outcome:
        found = evidence.bench(bench)
        rows = [[row for row in found["rows"] if (where | both).items() <= row.items()] for where in (a, b)]
        if any(len(each) != 1 for each in rows):
            raise NotRun(f"the newest result of `make bench{bench and '-'}{bench}` has not both rows")
        [x], [y] = rows
        if x["against"] == y.get("name"):  # x was timed in turns with y itself
            y = y | {"against": x["against"], "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
        same = "name" in x and x["against"] == y["against"]  # ratios of a token are to another context of its own label
        of = "ratio" if same and x["ratio"] is not None else "seconds"
        number = f"{_value(x, of)} against {_value(y, of)}" + f" (time over {x['against']} in the same turns)" * (
            of == "ratio"
        )
        remark = (
            f"median and quartiles over turns, {found['machine']['cpu']}, {found['made'][:10]}; one machine: not tested"
        )
        if (turns := min(x["turns"], y["turns"])) < TURNS:
            return Outcome(UNCLEAR, number, remark=f"{turns} turns: expected at least {TURNS} for a spread; {remark}")
        holds, lost = x[f"{of}_high"] < y[f"{of}_low"], x[f"{of}_low"] > y[f"{of}_high"]
        return Outcome(HOLDS if holds else LOST if lost else UNCLEAR, number, remark=remark)

    return Statement(f"{_words(a)} takes less time than {_words(b)}", (), judge)


def _value(row: Row, of: str) -> str:
    """4.3 ms [4.1, 4.5]; 0.80 [0.72, 0.83]."""
    middle, low, high = (row[of + end] for end in ("", "_low", "_high"))
    if of == "ratio":
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"
    return f"{1000 * middle:,.1f} ms [{1000 * low:,.1f}, {1000 * high:,.1f}]"


def _words(row: Row) -> str:
    """A token of Mamba at context length 32,768; T5 bias over 2,048 tokens."""
    if "label" in row:
        return f"a token of {paper(row['label'])} at context length {row['context']:,}"
    return f"{paper(row['name'])} over {row['length']:,} tokens"
