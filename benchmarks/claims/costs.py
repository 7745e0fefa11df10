"""A statement about time: two rows of a bench that this repository commits, which no study measures again."""

from typing import Any

from claims.base import Outcome, Statement
from claims.evidence import Evidence, NotRun
from longitude.study.estimates import HOLDS, LOST, UNCLEAR

Row = dict[str, Any]


def seconds_below(bench: str, a: Row, b: Row, **both: Any) -> Statement:
    """The row a takes less time than b, with all that lies between the quartiles over turns; `both` have these fields, too."""

    def judge(evidence: Evidence) -> Outcome:
        found = evidence.bench(bench)
        rows = [[row for row in found["rows"] if (where | both).items() <= row.items()] for where in (a, b)]
        if any(len(each) != 1 for each in rows):
            raise NotRun(f"the newest result of `make bench{bench and '-'}{bench}` has not both rows")
        [x], [y] = rows
        holds, lost = x["seconds_high"] < y["seconds_low"], x["seconds_low"] > y["seconds_high"]
        remark = (
            f"median and quartiles over turns, {found['machine']['cpu']}, {found['made'][:10]}; one machine: not tested"
        )
        return Outcome(HOLDS if holds else LOST if lost else UNCLEAR, f"{_time(x)} against {_time(y)}", remark=remark)

    return Statement(f"{_words(a)} takes less time than {_words(b)}", (), judge)


def _time(row: Row) -> str:
    """4.3 ms [4.1, 4.5]."""
    middle, low, high = (1000 * row[key] for key in ("seconds", "seconds_low", "seconds_high"))
    return f"{middle:,.1f} ms [{low:,.1f}, {high:,.1f}]"


def _words(row: Row) -> str:
    """A token of mamba behind 32,768; t5 over 2,048 tokens."""
    if "label" in row:
        return f"a token of {row['label']} behind {row['context']:,}"
    return f"{row['name']} over {row['length']:,} tokens"
