"""Losses: less is better. A label is judged by the change of its loss, if it is known to have learned enough to be judged.

* change: its loss at a length against its own in the last quarter of a training window, which has no short contexts. The word is
  `RISES`, `LEVEL` or `GAINS`; or `UNCLEAR`, also if it does not rise and may have learned too little.
* learned enough: at the training length its loss is below the best n-grams counted on the training text (`Run.best_ngrams`),
  and below its blind control (`longitude.study.blind`). No other label matters.

Every comparison is paired, by seed and by document, and must hold over both together (`longitude.statistics.estimates`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from longitude.report.wording import capital, percent
from longitude.statistics.estimates import (
    HOLDS,
    LOST,
    UNCLEAR,
    Estimate,
    Sums,
    change,
    change_beyond,
    difference,
    level,
)
from longitude.study.blind import control_for, control_of
from longitude.study.criterion import GAINS, LEVEL, RISES, Cell, Column, Criterion, Finding
from longitude.study.data import BLOCKS
from longitude.study.results import FAR, LAST, NEAR, Run

TOLERANCE = 0.02
"""A loss is level at a length if it is less than 2% above that at the end of a training window."""
FLOOR, CONTROL = "n-grams", "blind control"
"""The checks of what was learned."""


class Learned(NamedTuple):
    """Result of a label at the training length; None if it was not measured.

    Attributes:
        label: One of the study's labels.
        floor: loss - loss of the best n-grams, in bits per byte.
        control: loss - loss of the blind control.
        checks: `FLOOR`, `CONTROL` -> whether the loss is lower, and both losses in words.
    """

    label: str
    floor: Estimate | None = None
    control: Estimate | None = None
    checks: Mapping[str, tuple[str, str]] = {}

    @property
    def verdict(self) -> str:
        """Whether enough was learned: every check is needed."""
        verdicts = [self.checks.get(check, (UNCLEAR, ""))[0] for check in (FLOOR, CONTROL)]
        return next(verdict for verdict in (LOST, UNCLEAR, HOLDS) if verdict in verdicts)


class LossCriterion(Criterion):
    """No verdict at lengths up to the training length or the reference, and none on a blind control."""

    things, metric = "documents", "bits_per_byte"

    def __init__(self, run: Run):
        super().__init__(run)
        if BLOCKS in run.study["data"].get("unit", ""):
            self.things = BLOCKS

    def finding(self, label: str, length: int, method: str) -> Finding:
        run, sums = self.run, self.sums(label, length, method)
        if sums is None:
            return Finding(method, label, length)
        learned = None if self.run.is_blind(label) else self.learned[label].verdict
        finding = Finding.of(method, label, length, sums.of.shape[1], level(sums, self.metric))._replace(
            learned=learned
        )
        start = self.start(label, method)
        if length == run.reference or start is None or (moved := change(sums, start, self.metric)) is None:
            return finding
        finding = finding._replace(
            change=moved.value, change_low=moved.low, change_high=moved.high,
            text_change_low=moved.text_low, text_change_high=moved.text_high,
            seed_change_low=moved.seed_low, seed_change_high=moved.seed_high,
        )  # fmt: skip
        if length not in run.beyond or moved.value is None:
            return finding
        finding = finding._replace(within=moved.below(TOLERANCE))
        if self.run.is_blind(label):
            return finding._replace(remark=run.sight(label))
        if finding.within == LOST:
            return finding._replace(verdict=RISES)
        if finding.within == UNCLEAR or learned != HOLDS:
            return finding._replace(verdict=UNCLEAR)
        verdict = GAINS if moved.below(0) == HOLDS else LEVEL
        return finding._replace(verdict=verdict, remark=self.no_better(label, length, method))

    def sums(self, label: str, length: int, method: str) -> Sums | None:
        return self.run.sums(label, length, method, ("nats", "bytes"))

    def start(self, label: str, method: str) -> Sums | None:
        """What the change of a label is from: the last quarter of a training window; of copies, all of it.

        All of it, too, in older studies, of which a seed has no losses of quarters.
        """
        place = self.run.train_length, LAST
        known = all(place in trial.measured for trial in self.run.of(label) if trial.status == "done")
        quarter = self.sums(label, *place) if known and method not in (NEAR, FAR) else None
        return quarter or self.sums(label, self.run.reference, method)

    def no_better(self, label: str, length: int, method: str) -> str | None:
        """That the change of a label is not below its blind control's, in words; None if it is."""
        control = control_of(label, self.run.labels, self.run.train_length)
        if control is None:
            return None
        after, before = self.sums(label, length, method), self.start(label, method)
        of_control, before_control = self.sums(control, length, method), self.start(control, method)
        if after is None or before is None or of_control is None or before_control is None:
            return None
        further = change_beyond(after, before, of_control, before_control, self.metric)
        lower = further is not None and further.below(0) == HOLDS
        return None if lower else f"no better than a model that {self.run.sight(control)}"

    @cached_property
    def learned(self) -> dict[str, Learned]:
        """Results of every label at the training length, by the first method."""
        return {label: self._learned(label, next(iter(self.run.methods), "")) for label in self.run.labels}

    def _learned(self, label: str, method: str) -> Learned:
        run = self.run
        sums = self.sums(label, run.train_length, method)
        loss = sums and level(sums, self.metric)
        if not sums or not loss or loss.value is None:
            return Learned(label)
        floor = control = None
        checks = {}
        if run.best_ngrams:
            name, bits = run.best_ngrams
            floor = loss.less(bits)
            if len(floor.values) > 1:  # the n-grams read the same documents
                floor = floor._replace(low=floor.seed_low, high=floor.seed_high)
            checks[FLOOR] = floor.below(0), f"{self.amount(loss.value, 1)} against {self.amount(bits, 1)} of {name}"
        blind = control_of(label, run.labels, run.train_length)
        others = blind and self.sums(blind, run.train_length, method)
        if blind and others and (control := difference(sums, others, self.metric)) and control.value is not None:
            lower = control.below(0) if len(control.values) == len(loss.values) else UNCLEAR
            there = self.amount(loss.value - control.value, 1)
            checks[CONTROL] = lower, f"{self.amount(loss.value, 1)} against {there} of a model that {run.sight(blind)}"
        return Learned(label, floor, control, checks)

    def within(self, finding: Finding) -> tuple[bool, str | None]:
        """Lengths up to the training length, at which nothing is compared, count as within."""
        if finding.length not in self.run.beyond:
            return True, HOLDS
        return finding.change is not None and finding.change < TOLERANCE, finding.within

    def result(self, last: Sequence[Finding]) -> str:
        if self.run.beyond:
            return super().result(last)
        if self.run.lengths[-1] > self.run.train_length:
            return "Nothing is known about length: one length was measured"
        return "Nothing is known about length: no length beyond the training length was measured"

    def doubt(self, label: str) -> str:
        """Why it is not certain that a label learned enough, as text to follow its name; empty if it is."""
        learned, run = self.learned[label], self.run
        if learned.verdict == HOLDS or run.is_blind(label):
            return ""
        why = [words for verdict, words in learned.checks.values() if verdict == learned.verdict]
        if learned.verdict == UNCLEAR and FLOOR not in learned.checks:
            why.append("no value to compare with n-grams")
        if learned.verdict == UNCLEAR and CONTROL not in learned.checks:
            control = control_of(label, run.labels, run.train_length)
            missing = f"no value of {control}" if control else f"no blind control: add {control_for(run.train_length)}"
            why.append(missing)
        may = "learned" if learned.verdict == LOST else "may have learned"
        return f"{may} too little at {run.train_length} ({'; '.join(why)})"

    def learned_too_little(self, label: str) -> bool:
        return self.learned[label].verdict == LOST and not self.run.is_blind(label)

    def cautions(self, last: Sequence[Finding]) -> list[str]:
        run = self.run
        groups: dict[str, list[str]] = {}

        def note(reason: str, finding: Finding) -> None:
            groups.setdefault(reason, []).append(self.called(finding.label))

        little = [finding.label for finding in last if self.learned_too_little(finding.label)]
        for finding in last:
            judged = finding.verdict and finding.learned == UNCLEAR
            if judged and (doubt := self.doubt(finding.label)):
                note(doubt, finding)
            if finding.verdict and finding.remark:
                note(finding.remark, finding)
            far = FAR in run.methods and finding.verdict and self.finding(finding.label, finding.length, FAR).remark
            if far:
                note(f"on far copies {far}", finding)
            if run.beyond and finding.change is None:
                note(f"no value at {run.reference} to compare with", finding)
            elif run.beyond and self.sums(finding.label, run.train_length, LAST) is None:
                note(f"change from the mean at {run.reference}, which short contexts raise", finding)
        starred = [f"* {self.called(label)} {self.doubt(label)}" for label in little]
        return [*starred, *(f"{', '.join(names)}: {reason}" for reason, names in groups.items())]

    def title(self) -> str:
        sentence = f"{capital(self.task.words)}, lower is better, {self.run.methods[0]} windows."
        return f"{self.trained_on('windows of')}\n{sentence}"

    def every_column(self) -> list[Column]:
        run = self.run
        columns = [
            Column(f"at {run.lengths[-1]}", lambda lines: word_cell(lines[-1]), ("terminal",)),
            Column(f"change, {run.train_length} to {run.lengths[-1]}", lambda lines: change_cell(lines[-1]), ("page",)),
        ]
        if len(run.beyond) > 1:  # the length must not choose the word
            place = run.lengths.index(run.beyond[0])
            first = Column(f"at {run.beyond[0]}", lambda lines: Cell(word_cell(lines[place]).text), place=place)
            columns.insert(0, first)
        effective = Column("effective length", self.effective_cell, ("page",))
        return [*columns * bool(run.beyond), effective]

    def key(self) -> list[str]:
        run = self.run
        if not run.beyond:
            return []
        change = "the whole 95% interval (paired) of the change from the last quarter of a training window"
        words = f"{change} is below 0; level: below {TOLERANCE:+.0%}; rises: above it; cannot tell: neither"
        starred = f"not below the best n-grams and a model that sees little, at {run.train_length}"
        little = [f"*        {starred}"] if any(map(self.learned_too_little, run.labels)) else []
        return [f"gains    {words}, or not known to have learned enough", *little]


def span(finding: Finding) -> str:
    """The interval of the change: +41 to +43%; empty if there is none."""
    return "" if finding.change_low is None else f"{percent(finding.change_low, '')} to {percent(finding.change_high)}"


def change_cell(finding: Finding) -> Cell:
    """The change up to a length, with its interval."""
    return Cell(percent(finding.change), span(finding), "" if finding.change is None else finding.change)


def word_cell(finding: Finding) -> Cell:
    """The verdict at a length with the change: rises +43%."""
    text = " ".join(filter(None, (finding.verdict, percent(finding.change))))
    return Cell(text, span(finding), "" if finding.change is None else finding.change)
