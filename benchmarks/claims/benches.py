"""Statements on rows of a bench that this repository commits, which no study measures again: of times, answers and scores."""

import json
import math
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from claims.base import Outcome, Statement
from claims.evidence import Evidence, NotRun
from claims.statements import points
from claims.verdicts import in_words, verdict_of
from longitude.report.wording import paper, with_base
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Estimate, Sums, level
from longitude.statistics.proportions import wilson

Row = dict[str, Any]


TURNS = 5
"""Turns of a bench that a spread is judged from; two turns that differ by a factor of five are no measurement."""


NO_FALL = 1.0
"""Less is no fall of scores: a tenth of that in trained models."""


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

    kind = json.dumps(["time", bench, a | both, b | both])
    return Statement(f"{_words(a)} takes less time than {_words(b)}", (), judge, kind, (-math.inf, 0.0))


def answers_differ(length: int, margin: float, by: float) -> Statement:
    """Among the extended models of `benchmarks/retrieval.py` are two of one loss, of which one answers more.

    All pairs of one loss are compared, so each interval has the confidence that keeps the chance of any error at 5%.

    Args:
        length: Tokens that both are measured at.
        margin: Bits per byte whose ratio is 1 within this are one loss.
        by: Share of the questions, 0 to 1, that one must answer more.
    """

    def judge(evidence: Evidence) -> Outcome:
        found, at = evidence.bench("retrieval"), str(length)
        pairs = [
            sorted(pair, key=lambda row: row["means"][at]["value"])
            for pair in combinations(found["rows"], 2)
            if abs(math.log(pair[0]["bits"][at] / pair[1]["bits"][at])) < math.log1p(margin)
        ]
        if not pairs:
            raise NotRun(f"no two methods of benchmarks/retrieval.py have one loss at {length}")
        few, many = max(pairs, key=lambda pair: _more(*pair, at, len(pairs))[1])
        more = Estimate(*_more(few, many, at, len(pairs)))
        losses = " and ".join(f"{_method(row)} {row['bits'][at]:.3f}" for row in (many, few))
        remark = f"the best of {len(pairs)} pairs, all compared; one model, {_questions(few, at)} questions"
        return Outcome(more.above(by), f"{in_words(more, points)} at {losses} bits per byte", more, remark)

    words = f"two extended models have losses within {margin:.0%} at {length:,} tokens, and one answers {100 * by:g} points more"
    return Statement(words, (), judge, json.dumps(["answers of one loss", length, margin]), (by, math.inf))


def lowest_loss_answers_less(length: int) -> Statement:
    """Of the extended models of `benchmarks/retrieval.py`, another answers more than the one of the lowest loss."""

    def judge(evidence: Evidence) -> Outcome:
        rows, at = evidence.bench("retrieval")["rows"], str(length)
        lowest = min(rows, key=lambda row: row["bits"][at])
        best = max((row for row in rows if row is not lowest), key=lambda row: row["means"][at]["value"])
        more = Estimate(*_more(lowest, best, at, len(rows) - 1))
        remark = f"{len(rows)} models, the lowest loss compared with each; {_questions(best, at)} questions"
        return Outcome(more.above(0), f"{in_words(more, points)}: {_method(best)} for {_method(lowest)}", more, remark)

    words = f"another model answers more than the one of the lowest loss at {length:,} tokens"
    return Statement(words, (), judge, json.dumps(["answers beside the lowest loss", length]), (0.0, math.inf))


def scores_fall(label: str, shuffled: bool, untrained: bool = False) -> Statement:
    """In `benchmarks/attention.py` the mean score of the farthest keys within training is below that of the key before the query.

    Args:
        label: Of the study that it read.
        shuffled: Of queries and keys that were shuffled among the positions.
        untrained: Whether instead they differ by less than `NO_FALL`, before training.
    """
    expected = (-NO_FALL, NO_FALL) if untrained else (-math.inf, 0.0)

    def judge(evidence: Evidence) -> Outcome:
        bench = evidence.bench("attention" + "-untrained" * untrained)["rows"]
        rows = [row for row in bench if (row["label"], row.get("shuffled")) == (label, shuffled)]
        seeds = sorted({row["seed"] for row in rows})
        layers = [[row["octaves"] for row in rows if row["seed"] == seed] for seed in seeds]
        if not layers:
            raise NotRun(f"the newest result of benchmarks/attention.py has no {label}")
        octaves = np.mean(layers, 1)  # [seeds, texts, octaves]
        falls = Sums(tuple(seeds), octaves[..., -1] - octaves[..., 1], np.ones(octaves.shape[:2]))
        estimate = level(falls, "mean")
        form = lambda number: f"{number:+.2f}".replace("-", "−")  # noqa: E731
        return Outcome(verdict_of(estimate, expected), in_words(estimate, form), estimate)

    how = "of shuffled queries and keys" if shuffled else "of queries and keys as they are"
    when = f"within {NO_FALL:g} of that at 1, before training" if untrained else "lower than at 1"
    words = f"with {paper(with_base(label))} the mean score {how} at the farthest distances of training is {when}"
    return Statement(words, (), judge, json.dumps(["scores", label, shuffled, untrained]), expected)


def _more(few: Row, many: Row, at: str, comparisons: int) -> tuple[float, float, float]:
    """(difference, low, high) of the answers, from both intervals (Newcombe 1998, method 10), as one of several comparisons.

    The questions are the same for both, which would make it narrower; the answers to each are not kept.
    """
    quantile = float(stats.norm.isf(0.025 / comparisons))
    (p, p_low, p_high), (q, q_low, q_high) = (
        wilson(row["means"][at]["value"], _questions(row, at), quantile) for row in (many, few)
    )
    return p - q, p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(p_high - p, q - q_low)


def _questions(row: Row, at: str) -> int:
    return sum(score["count"] for score in row["scores"] if str(score["length"]) == at)


def _method(row: Row) -> str:
    return row["method"] + f" after {row['steps']} steps" * bool(row["steps"])


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
