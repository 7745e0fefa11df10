"""Exact answers: more is better, and an encoding solves a length where nearly all of its answers are right.

Intervals are Wilson's over the examples, 95 %, which has a width for 200 right ones of 200, too. With several seeds they reach
at least as far as a bootstrap that draws seeds and examples. Examples of two lengths are different ones: nothing is paired.
"""

import numpy as np

from longitude.measure.intervals import interval
from longitude.measure.retrieval import scoring
from longitude.report.wording import and_, far, named
from longitude.study.judge import HOLDS, LISTED, LOST, UNCLEAR, Finding, Judge
from longitude.study.results import Run

SOLVED = 0.9
"""A length is solved when at least 90 % of its answers are exact."""


class Answers(Judge):
    """`HOLDS` where low >= `SOLVED`, `LOST` where high < `SOLVED`, else `UNCLEAR`, at every length."""

    things = "examples"
    verdicts = {HOLDS: "solved", LOST: "not solved", UNCLEAR: UNCLEAR}

    def finding(self, run: Run, label: str, length: int, method: str) -> Finding:
        stacked = run.stacked(label, length, method, ("exact",))
        if stacked is None:
            return Finding(label, length)
        [exact] = stacked
        value, low, high = share(exact)
        verdict = HOLDS if low >= SOLVED else LOST if high < SOLVED else UNCLEAR
        seeds, examples = exact.shape
        return Finding(label, length, seeds, examples, value, low, high, verdict=verdict)

    def clauses(self, run: Run, found: list[Finding], last: list[Finding]) -> list[str]:
        longest = run.lengths[-1]
        hold, lost, unclear = ([each for each in last if each.verdict == verdict] for verdict in (HOLDS, LOST, UNCLEAR))
        task = f"{self.task.name} (at least {SOLVED:.0%} of the answers exact)"
        listed = _listed if len(last) <= LISTED else _ranged
        clauses = []
        if hold:
            clauses.append(f"{listed(hold, True)} {'solves' if len(hold) == 1 else 'solve'} {task}")
        if lost:
            not_solve = "does not" if len(lost) == 1 else "do not"
            clauses.append(f"{listed(lost, not hold)} {not_solve}" + ("" if hold else f" solve {task}"))
        if unclear:
            they = "they solve" if len(unclear) > 1 else "it solves"
            clauses.append(
                f"for {listed(unclear, not clauses)} the data cannot tell"
                + ("" if clauses else f" whether {they} {task}")
            )
        clauses[0] = f"at {longest} {self.task.unit}, {far(longest, run.train_length)}, {clauses[0]}"
        solved = {each.label for each in hold}
        others = [label for label in dict.fromkeys(each.label for each in found) if label not in solved]
        if reached := self.reached(run, found, others):
            clauses.append(reached)
        return clauses

    def reached(self, run: Run, found: list[Finding], labels: list[str]) -> str:
        """t5 solves up to 20, rope up to 16 and alibi no length; empty where there is no shorter length, or no label."""
        if len(run.lengths) < 2:
            return ""
        groups: dict[int | None, list[str]] = {}
        for label in labels:
            groups.setdefault(reach([each for each in found if each.label == label]), []).append(named(label))
        words = []
        for length in sorted(groups, key=lambda length: -(length or 0)):
            verb = "" if words else " solves" if len(groups[length]) == 1 else " solve"
            words.append(f"{and_(groups[length])}{verb} {'no length' if length is None else f'up to {length}'}")
        return and_(words) if words else ""

    def number(self, found: Finding) -> str:
        return "" if found.value is None else f"{found.value:.1%}"

    def bounds(self, found: Finding) -> str:
        return "" if found.low is None or found.high is None else between(found)

    def short(self, found: Finding) -> str:
        """97 ±2, in per cent"""
        assert found.value is not None and found.low is not None and found.high is not None
        return f"{100 * found.value:.0f} ±{50 * (found.high - found.low):.0f}"

    def title(self, run: Run) -> str:
        trained = f"1 to {run.train_length}" + (f" at {run.sampled_positions}" if run.sampled_positions else "")
        return f"{self.task.name}: % of answers exact at so many {self.task.unit}, trained on {trained}"

    def last_column(self, run: Run) -> tuple[str, str] | None:
        least = f"at least {SOLVED:.0%} of the answers exact, with all of the 95% interval"
        return "solved to", f"solved: {least}, there and at every shorter length"

    def last_cell(self, run: Run, lines: list[Finding]) -> str:
        return "" if all(each.value is None for each in lines) else str(reach(lines) or "-")


def share(right: np.ndarray) -> tuple[float, float, float]:
    """Right [seeds, examples], each 0 to 1 -> (mean, low, high)."""
    value, low, high = scoring.mean(right.ravel().tolist())
    if len(right) > 1:
        drawn = interval(right, np.ones_like(right), metric="mean")
        if drawn.low is not None and drawn.high is not None:  # there is one where there are several examples
            low, high = min(low, drawn.low), max(high, drawn.high)
    return value, low, high


def reach(lines: list[Finding]) -> int | None:
    """The longest measured length up to which every one is solved; lines: of one label, ascending."""
    longest = None
    for each in lines:
        if each.verdict != HOLDS:
            break
        longest = each.length
    return longest


def between(found: Finding) -> str:
    """94 to 98%"""
    assert found.low is not None and found.high is not None
    return f"{100 * found.low:.0f} to {found.high:.0%}"


def _listed(group: list[Finding], first: bool) -> str:
    """Rope (42%, 95% interval 35 to 49%) and t5 (3%, 1 to 6%); the words are said once in a sentence."""
    words = []
    for each in group:
        said = "95% interval " if first and not words else ""
        words.append(f"{named(each.label)} ({each.value:.0%}, {said}{between(each)})")
    return and_(words)


def _ranged(group: list[Finding], first: bool) -> str:
    """Rope and t5 (3% to 42%)"""
    values = sorted(each.value for each in group if each.value is not None)
    ends = dict.fromkeys(f"{value:.0%}" for value in (values[0], values[-1]))
    return f"{and_([named(each.label) for each in group])} ({' to '.join(ends)})"
