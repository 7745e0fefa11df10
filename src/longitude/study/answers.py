"""Answers right or wrong: more is better, and an encoding solves a length where nearly all of its answers are right.

Where a task's training length was measured, one that does not solve that has not learned the task: what it does at longer
lengths says nothing about position.

Over the examples intervals are Wilson's, 95 %, which has a width for 200 right ones of 200, too; over several seeds they are
t-intervals, within 0 and 1. Examples of two lengths are different ones: their values are not paired.
"""

from collections.abc import Sequence

import numpy as np

from longitude.measure.intervals import Interval
from longitude.measure.retrieval import scoring
from longitude.measure.seeds import t_interval
from longitude.report.wording import and_, named
from longitude.study.criterion import HOLDING, Criterion, Finding
from longitude.study.estimates import HOLDS, LOST, UNCLEAR, Estimate, estimated
from longitude.study.results import Sums

SOLVED = 0.9
"""A length is solved when at least 90 % of its answers are right."""
LEARNING = "learning"
"""What failed where the training length is not solved."""


class AnswerCriterion(Criterion):
    """`HOLDS` where low >= `SOLVED`, `LOST` where high < `SOLVED`, else `UNCLEAR`, at every length."""

    things, metric, less_is_better = "examples", "mean", False
    verdicts = {HOLDS: "solved", LOST: "not solved", UNCLEAR: UNCLEAR}
    verb = "solve"

    @property
    def object(self) -> str:
        return self.task.name

    def finding(self, label: str, length: int, method: str) -> Finding:
        sums = self.sums(label, length, method)
        if sums is None:
            return Finding(label, length)
        value = share(sums.of)
        verdict = value.above(SOLVED)
        failed = () if verdict != LOST else (HOLDING,) if self.learned(label, method) else (LEARNING,)
        return Finding.of(label, length, sums.of.shape[1], value)._replace(failed=failed, verdict=verdict)

    def learned(self, label: str, method: str) -> bool:
        """Whether a label may have learned the task: unless it does not solve the training length."""
        run = self.run
        sums = self.sums(label, run.train_length, method) if run.train_length in run.lengths else None
        return sums is None or share(sums.of).above(SOLVED) != LOST

    def sums(self, label: str, length: int, method: str) -> Sums | None:
        sums = self.run.sums(label, length, method, ("exact", "exact"))
        return sums and sums._replace(over=np.ones_like(sums.of))

    def within(self, found: Finding) -> tuple[bool, str | None]:
        return found.value is not None and found.value >= SOLVED, found.verdict

    def clauses(self, found: list[Finding], last: list[Finding]) -> list[str]:
        what = f"{self.object} (at least {SOLVED:.0%} of the {self.right})"
        return self.by_verdict(last, what, self.also(found, last))

    def also(self, found: list[Finding], last: list[Finding]) -> list[str]:
        clauses = []
        solved = {each.label for each in last if each.verdict == HOLDS}
        others = [label for label in dict.fromkeys(each.label for each in found) if label not in solved]
        if others and len(self.run.lengths) > 1:
            clauses.append(self.solved_lengths(found, others))
        start = [each for each in found if each.length == self.run.train_length and each.failed]
        if start:
            floor = self.run.guessing.get(self.run.train_length)
            guess = f", where a rule without positions reaches {floor:.0%}" if floor else ""
            names = and_([f"{named(each.label)} ({each.value:.0%})" for each in start])
            it = "it" if len(start) == 1 else "them"
            clauses.append(
                f"{names} did not learn the task at {self.run.train_length}{guess}, so longer lengths say nothing about {it}"
            )
            clauses += self.advice({each.label for each in start})
        return clauses

    def advice(self, failed: set[str]) -> list[str]:
        """What to add where every label failed to learn the task; nothing where the study has what solves it."""
        data, labels = self.run.study["data"], self.run.labels
        if "ceiling" not in data or failed != {*labels} or data["ceiling"] in labels:
            return []
        if data["ceiling"] is None:
            return [f"no label is known that learns {self.object} at the defaults of its task"]
        return [f"add {named(data['ceiling'])}, which learns {self.object} at the defaults of its task"]

    @property
    def right(self) -> str:
        """What is counted, after "90 % of the"."""
        return "answers exact" if self.task.metric == "exact_match" else "symbols right"

    def solved_lengths(self, found: list[Finding], labels: list[str]) -> str:
        """t5 solves up to 20, rope up to 16 and alibi no length."""
        groups: dict[int | None, list[str]] = {}
        for label in labels:
            longest = longest_solved([each for each in found if each.label == label])
            groups.setdefault(longest, []).append(named(label))
        words = []
        for length in sorted(groups, key=lambda length: -(length or 0)):
            verb = "" if words else " solves" if len(groups[length]) == 1 else " solve"
            words.append(f"{and_(groups[length])}{verb} {'no length' if length is None else f'up to {length}'}")
        return and_(words)

    @property
    def points(self) -> str:
        return "points of a hundred"

    def amount(self, value: float) -> str:
        return f"{100 * value:.0f}".replace("-", "−")

    def headline(self, found: Finding) -> tuple[str, str]:
        return f"{found.value:.0%}", between(found)

    def number(self, found: Finding) -> str:
        return "" if found.value is None else f"{found.value:.1%}"

    def bounds(self, found: Finding) -> str:
        return "" if found.low is None else between(found)

    def short(self, found: Finding) -> str:
        """97 ±2, in per cent."""
        assert found.value is not None and found.low is not None and found.high is not None
        return f"{100 * found.value:.0f} ±{50 * (found.high - found.low):.0f}"

    def title(self) -> str:
        run = self.run
        trained = f"1 to {run.train_length}" + (f" at {run.sampled_positions}" if run.sampled_positions else "")
        return f"{self.task.name}: % of {self.right} by length in {self.task.unit}, trained on {trained}"

    def last_column(self) -> tuple[str, str] | None:
        least = f"at least {SOLVED:.0%} of the {self.right}, with all of the 95% interval"
        return "solved to", f"solved: {least}, there and at every shorter length"

    def last_cell(self, lines: Sequence[Finding]) -> str:
        return "" if all(each.value is None for each in lines) else str(longest_solved(lines) or "-")


def share(right: np.ndarray) -> Estimate:
    """Right [seeds, examples], each 0 to 1 -> its mean, with a t-interval within 0 to 1 and Wilson's."""
    _, low, high = t_interval(right.mean(1))
    seeds = None if low is None or high is None else (max(0.0, low), min(1.0, high))
    text = Interval(*scoring.mean(right.mean(0).tolist()))
    return estimated(right.mean(1), text, seeds and Interval(float(right.mean()), *seeds))


def longest_solved(lines: Sequence[Finding]) -> int | None:
    """The longest measured length up to which every one is solved; lines: of one label, ascending."""
    longest = None
    for each in lines:
        if each.verdict != HOLDS:
            break
        longest = each.length
    return longest


def between(found: Finding) -> str:
    """94 to 98%."""
    assert found.low is not None and found.high is not None
    return f"{100 * found.low:.0f} to {found.high:.0%}"
