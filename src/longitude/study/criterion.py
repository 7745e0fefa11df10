"""Findings for a label at a length, and criteria by which each kind of task judges and describes them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from copy import copy
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, Self

from longitude.report.wording import count, far, named
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Comparison, Estimate, Sums, compared
from longitude.study.results import Run

LISTED = 8
"""Maximum number of labels named in a line; of more labels only the number is printed."""
GAINS, LEVEL, RISES = "gains", "level", "rises"
"""Verdicts on a loss at a longer length, against that at the end of a training window."""
IS_SOLVED, NOT_SOLVED = "solved", "not solved"
"""Verdicts on a length of a task with right or wrong answers."""
LEARNED = {HOLDS: "enough", LOST: "too little", UNCLEAR: UNCLEAR}
"""Words for what was learned at the training length."""
SEEDS = 3
"""With fewer seeds there are numbers and no verdict."""


class Verdict(NamedTuple):
    """How readers see a verdict.

    Attributes:
        css: Class on the page.
        color: Color on the terminal.
    """

    css: str
    color: str


VERDICTS = {
    **dict.fromkeys((GAINS, LEVEL, IS_SOLVED, LEARNED[HOLDS]), Verdict("good", "green")),
    **dict.fromkeys((RISES, NOT_SOLVED, LEARNED[LOST]), Verdict("bad", "red")),
    UNCLEAR: Verdict("unclear", "yellow"),
}
"""The one table of words and colors: terminal, page, charts and tables read it."""


class Finding(NamedTuple):
    """Finding for a label at a length by a method: a row of terminal, page, charts and CSV. Missing values are None.

    value, low, high: the task's metric, mean over seeds, with its 95% interval, which is over `over`: seeds and documents, or
    documents for one seed. text_low, text_high: the interval over documents alone; seed_low, seed_high: that over seeds alone.
    values: one per seed. For losses also change, ...: value / the loss at the end of a training window - 1, paired, with its
    intervals.

    within: whether the value is within the criterion's margin, `HOLDS`, `LOST` or `UNCLEAR`. learned: whether enough was learned
    at the training length, alike. verdict: a key of `VERDICTS`, by both; None if the criterion does not judge this length, or
    by too few seeds. remark: what the verdict does not show, or why there is none. reason: how unfinished trials ended, and
    parts that training never used.
    """

    method: str
    label: str
    length: int
    seeds: int = 0
    documents: int = 0
    value: float | None = None
    low: float | None = None
    high: float | None = None
    over: str | None = None
    text_low: float | None = None
    text_high: float | None = None
    seed_low: float | None = None
    seed_high: float | None = None
    values: tuple[float, ...] = ()
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    text_change_low: float | None = None
    text_change_high: float | None = None
    seed_change_low: float | None = None
    seed_change_high: float | None = None
    within: str | None = None
    learned: str | None = None
    verdict: str | None = None
    remark: str | None = None
    reason: str | None = None

    @classmethod
    def of(cls, method: str, label: str, length: int, documents: int, value: Estimate) -> "Finding":
        """An estimate of a label at a length."""
        return cls(method, label, length, len(value.values), documents, value.value, *value.ends, value.values)


class Effective(NamedTuple):
    """The longest measured length up to which a label stays within the margin at every one; None: at no length.

    Attributes:
        value: The length by the means.
        low: The length up to which every interval is within: the effective length is at least this.
        high: The length up to which no interval is outside: it is at most this, or beyond what was measured.
    """

    value: int | None
    low: int | None
    high: int | None


class Cell(NamedTuple):
    """A cell of a column: its text, the interval of it in words, and the value that a page sorts by."""

    text: str
    interval: str = ""
    value: Any = ""


class Column(NamedTuple):
    """A column that says one thing of a label, over all lengths.

    Attributes:
        head: Its head.
        cell: A label's findings, in the order of lengths -> its cell.
        places: Where it is shown: on the terminal and on the page.
        place: Which of a label's findings gives its color.
    """

    head: str
    cell: Callable[[Sequence[Finding]], Cell]
    places: Collection[str] = ("terminal", "page")
    place: int = -1


class Criterion(ABC):
    """Criterion by which an encoding is judged at a length, and its wording; one subclass per kind of task.

    Attributes:
        things: Name of the items that are measured; with one seed, intervals are over them.
        metric: A name of `longitude.statistics.documents.METRICS`.
        less_is_better: Whether the smaller of two values is better.
        scale: Factor of a value for display.
        digits: Decimal digits of a displayed value.
        sign: Suffix of a displayed value.
    """

    things: str
    metric: ClassVar[str]
    less_is_better: ClassVar[bool] = True
    scale: ClassVar[float] = 1
    digits: ClassVar[int] = 2
    sign: ClassVar[str] = ""

    def __init__(self, run: Run):
        self.run, self.task = run, run.task
        self.names: dict[str, str] = {}

    def called(self, label: str) -> str:
        """A label in a sentence."""
        return self.names.get(label, named(label))

    def with_names(self, names: dict[str, str]) -> Self:
        """A copy with other names for labels, which keeps everything computed already."""
        other = copy(self)
        other.names = names
        return other

    @abstractmethod
    def finding(self, label: str, length: int, method: str) -> Finding:
        """Finding for a label at a length."""

    @abstractmethod
    def sums(self, label: str, length: int, method: str) -> Sums | None:
        """Sums from which the metric is computed; None if nothing was measured."""

    def compared(self, length: int, method: str) -> list[Comparison]:
        """Every pair of labels that were measured at a length, adjusted together; none is decided before all seeds are there."""
        sums = {label: self.sums(label, length, method) for label in self.run.labels}
        measured = {label: level for label, level in sums.items() if level is not None}
        pairs = compared(measured, length, self.metric, self.less_is_better)
        return [pair._replace(decided=pair.decided and pair.seeds >= self.seeds_needed) for pair in pairs]

    @abstractmethod
    def within(self, finding: Finding) -> tuple[bool, str | None]:
        """Whether a label is within the margin at a length by its mean, and the verdict on that."""

    def effective(self, lines: Sequence[Finding]) -> Effective:
        """Effective length of a label, from its findings in the order of lengths."""

        def reach(inside: Callable[[bool, str | None], bool]) -> int | None:
            up_to = takewhile(lambda finding: finding.value is not None and inside(*self.within(finding)), lines)
            return max((finding.length for finding in up_to), default=None)

        return Effective(
            reach(lambda by_mean, verdict: by_mean),
            reach(lambda by_mean, verdict: verdict == HOLDS),
            reach(lambda by_mean, verdict: verdict != LOST),
        )

    def reach(self, lines: Sequence[Finding]) -> tuple[str, str]:
        """The effective length in words, and its interval if that is wider: "< 256", "512", ">= 1024"."""
        beyond = [finding.length for finding in lines if finding.length > self.run.train_length] or [0]

        def in_words(length: int | None) -> str:
            if length is None or (self.less_is_better and length < beyond[0]):
                return f"< {beyond[0] if self.less_is_better else lines[0].length}"
            return f"≥ {length}" if length == lines[-1].length else str(length)

        if all(finding.value is None for finding in lines):
            return "", ""
        value, low, high = map(in_words, self.effective(lines))
        return value, "" if low == high else f"{low} to {high}"

    # ---- the three lines ----

    def result(self, last: Sequence[Finding]) -> str:
        """Result line: the labels of each verdict at the longest length, and those without a verdict for lack of seeds.

        Args:
            last: Findings at that length of labels with a value, the best first.
        """
        groups: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
        few = {finding.label: missing for finding in last if (missing := self.seeds_missing(finding))}
        for finding in last:
            if finding.verdict:
                little = " *" * self.learned_too_little(finding.label)
                groups[finding.verdict].append(self.called(finding.label) + little)
        alike = len(few) == len(last) and len({*few.values()}) == 1
        groups["no word"] = [*few.values()][:1] if alike else [f"{self.called(label)} ({few[label]})" for label in few]
        listed = len(last) <= LISTED
        parts = [f"at {last[0].length} {self.task.unit}, {far(last[0].length, self.run.train_length)}"]
        parts += [
            f"{word}: {', '.join(labels) if listed else len(labels)}" for word, labels in groups.items() if labels
        ]
        return ". ".join(part[0].upper() + part[1:] for part in parts)

    def best(self, pair: Comparison) -> str:
        """By how much the best label is ahead of the next; it is called better only if the difference is decided over seeds."""
        better, worse = self.called(pair.better), self.called(pair.worse)
        side = "below" if self.less_is_better else "above"
        ends = "" if pair.low is None or pair.high is None else f" [{self.amount(pair.low)}, {self.amount(pair.high)}]"
        by = f"{self.amount(pair.value)} {self.points}{ends}"
        if pair.decided:
            return f"{better}: {by} {side} {worse}, the next best ({count(pair.seeds, 'seed')})"
        if pair.seeds == 1 and pair.low is not None and pair.low > 0:
            return f"{better}: {by} {side} {worse} in one seed ({pair.documents} {self.things}); another training may differ"
        over = count(pair.seeds, "seed") if pair.seeds > 1 else f"one seed, {pair.documents} {self.things}"
        if pair.seeds >= self.seeds_needed and pair.low is not None and pair.low > 0 and pair.p is not None:
            adjusted = f"p = {pair.p:.2g} after correction for all pairs"
            return f"undecided: {better} is {by} {side} {worse} ({over}), but {adjusted}"
        return f"unclear between {better} and {worse}: {by} ({over})"

    @property
    def seeds_needed(self) -> int:
        """How many seeds a word needs: three, or as many as are planned."""
        return max(SEEDS, len(self.run.config.seeds))

    def seeds_missing(self, finding: Finding) -> str:
        """How many of the seeds that a verdict needs there are, if that is too few; else empty."""
        return f"{finding.seeds} of {self.seeds_needed} seeds" if finding.seeds < self.seeds_needed else ""

    @abstractmethod
    def cautions(self, last: Sequence[Finding]) -> list[str]:
        """Cautions for readers: labels that learned too little to be judged, and the numbers that show it."""

    @abstractmethod
    def learned_too_little(self, label: str) -> bool:
        """Whether a label learned too little at the training length to be judged."""

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return self.task.words

    def amount(self, value: float, more: int = 0) -> str:
        """A value or a difference, in its unit; more: digits after the point."""
        return f"{self.scale * value:.{self.digits + more}f}".replace("-", "−")

    # ---- in tables ----

    def number(self, finding: Finding) -> str:
        """The value, for the page."""
        return "" if finding.value is None else self.amount(finding.value, 1) + self.sign

    def bounds(self, finding: Finding) -> str:
        """Its interval; empty if there is none."""
        ends = self.span(finding.low, finding.high)
        return ends and ends + self.sign

    def span(self, low: float | None, high: float | None, more: int = 0) -> str:
        """Both ends of an interval of values or differences."""
        return "" if low is None or high is None else f"{self.amount(low, more)} to {self.amount(high, more)}"

    def short(self, finding: Finding, half: bool = True) -> str:
        """The value, for the terminal, and half its interval: 2.61 ±.04, 97 ±3."""
        if finding.value is None:
            return "-"
        if not half or finding.low is None or finding.high is None:
            return self.amount(finding.value)
        return f"{self.amount(finding.value)} ±{self.amount((finding.high - finding.low) / 2)}".replace("±0.", "±.")

    def trained_on(self, what: str) -> str:
        """The first sentence of the title; what: "1 to", "windows of"."""
        run = self.run
        positions = f" at {run.sampled_positions}" if run.sampled_positions else ""
        trained = f"Trained on {what} {run.train_length} {self.task.unit}{positions}"
        return f"{trained}, evaluated at up to {run.lengths[-1]}."

    @abstractmethod
    def title(self) -> str:
        """Title of the table in the terminal: the trained models and the metric."""

    def columns(self, place: str) -> list[Column]:
        """The columns beside those of lengths that are shown in a place."""
        return [column for column in self.every_column() if place in column.places]

    @abstractmethod
    def every_column(self) -> list[Column]:
        """The columns beside those of lengths, in their order: a new one stands here and nowhere else."""

    def effective_cell(self, lines: Sequence[Finding]) -> Cell:
        """The effective length; none sorts below every length."""
        text, interval = self.reach(lines)
        return Cell(text, interval, text.replace("< ", "0.").replace("≥ ", ""))

    def verdict_cell(self, lines: Sequence[Finding]) -> Cell:
        """The verdict at the longest length."""
        last = lines[-1]
        little = "learned too little" if last.verdict and self.learned_too_little(last.label) else ""
        return Cell(last.verdict or "", little or last.remark or "", last.verdict or "")

    @abstractmethod
    def key(self) -> list[str]:
        """Legend of the words in the table."""
