"""Right or wrong answers: more is better, and an encoding solves a length if nearly all of its answers are right.

An encoding that does not solve the training length, if that was measured, has not learned the task: its answers at longer
lengths say nothing about position.

Intervals over examples are Wilson's, 95%, whose width is above 0 even if 200 of 200 answers are right. Intervals over several
seeds are t-intervals. The combined intervals are over both. All stay within 0 and 1. Two lengths have different examples, so
their values are not paired.
"""

from collections.abc import Sequence

import numpy as np

from longitude.statistics import proportions
from longitude.statistics.documents import Interval
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Estimate, Sums, estimated
from longitude.statistics.seeds import t_interval
from longitude.study.criterion import IS_SOLVED, NOT_SOLVED, Cell, Column, Criterion, Finding
from longitude.study.results import RULE

SOLVED = 0.9
"""A length is solved when at least 90% of its answers are right."""


class AnswerCriterion(Criterion):
    """`IS_SOLVED` if the interval is above `SOLVED`, `NOT_SOLVED` if below, else `UNCLEAR`, at every length."""

    things, metric, less_is_better = "examples", "mean", False
    scale, digits, sign = 100, 0, "%"

    def finding(self, label: str, length: int, method: str) -> Finding:
        sums = self.sums(label, length, method)
        if sums is None:
            return Finding(method, label, length)
        value = share(sums.of)
        right = value.above(SOLVED)
        verdict = {HOLDS: IS_SOLVED, LOST: NOT_SOLVED, UNCLEAR: UNCLEAR}[right]
        learned = HOLDS if self.learned(label, method) else LOST
        finding = Finding.of(method, label, length, sums.of.shape[1], value)
        return finding._replace(within=right, learned=learned, verdict=verdict)

    def learned(self, label: str, method: str) -> bool:
        """Whether a label may have learned the task: False only if it does not solve the training length."""
        run = self.run
        sums = self.sums(label, run.train_length, method) if run.train_length in run.lengths else None
        return sums is None or share(sums.of).above(SOLVED) != LOST

    def sums(self, label: str, length: int, method: str) -> Sums | None:
        sums = self.run.sums(label, length, method, ("exact", "exact"))
        return sums and sums._replace(over=np.ones_like(sums.of))

    def within(self, finding: Finding) -> tuple[bool, str | None]:
        return finding.value is not None and finding.value >= SOLVED, finding.within

    def learned_too_little(self, label: str) -> bool:
        return not self.learned(label, next(iter(self.run.methods), ""))

    def cautions(self, last: Sequence[Finding]) -> list[str]:
        run, at = self.run, self.run.train_length
        failed = [label for label in run.labels if self.learned_too_little(label)]
        if not failed:
            return []
        shares = {label: self.sums(label, at, run.methods[0]) for label in failed}
        names = [f"{self.called(label)} ({sums.of.mean():.0%})" for label, sums in shares.items() if sums is not None]
        floor = f" ({RULE}: {run.guessing[at]:.0%})" if run.guessing.get(at) else ""
        cautions = [f"* task not learned at {at}{floor}, so longer lengths say nothing: {', '.join(names)}"]
        data = run.study["data"]
        if "ceiling" in data and failed == run.labels and data["ceiling"] not in run.labels:
            cautions.append(f"known to learn {self.task.name} at its defaults: {data['ceiling'] or 'no label'}")
        return cautions

    @property
    def right(self) -> str:
        """Name of the counted items, to follow "90% of the"."""
        return "answers exact" if self.task.metric == "exact_match" else "symbols right"

    @property
    def points(self) -> str:
        return "points of a hundred"

    def title(self) -> str:
        return f"{self.trained_on('1 to')}\nTask {self.task.name}: % of {self.right}, higher is better."

    def every_column(self) -> list[Column]:
        return [Column("solved to", self.solved_cell)]

    def solved_cell(self, lines: Sequence[Finding]) -> Cell:
        """The length up to which every length is solved."""
        length = self.effective(lines).low
        measured = any(each.value is not None for each in lines)
        return Cell(str(length or "-"), value=length or 0) if measured else Cell("")

    def key(self) -> list[str]:
        whole = "with the whole 95% interval, at every length up to it"
        return [f"solved   at least {SOLVED:.0%} of the {self.right}, {whole}"]


def share(right: np.ndarray) -> Estimate:
    """Mean of right answers [seeds, examples], each 0 to 1, with a t-interval over seeds and Wilson's over examples."""
    _, low, high = t_interval(right.mean(1))
    seeds = None if low is None or high is None else (max(0.0, low), min(1.0, high))
    text = Interval(*proportions.mean(right.mean(0).tolist()))
    found = estimated(right.mean(1), text, seeds and Interval(float(right.mean()), *seeds))
    low, high = (end if end is None else min(1.0, max(0.0, end)) for end in (found.low, found.high))
    return found._replace(low=low, high=high)
