"""What was found of a label at a length, and how a kind of task judges it and words it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import ClassVar, NamedTuple

from longitude.report.wording import and_, far, named
from longitude.study.comparisons import Comparison, compared
from longitude.study.estimates import HOLDS, LOST, UNCLEAR, WEAK, Estimate
from longitude.study.results import Run, Sums

LISTED = 6
"""Encodings that the sentence lists with their numbers; beyond that it gives ranges."""
LOSS, CONTEXT, HOLDING = "loss", "context", "holding"
"""What an encoding is judged on."""


class Finding(NamedTuple):
    """One label at one length. What is missing is None.

    value, low, high: the task's metric, mean over seeds, with its 95 % interval, which is over `over`: the seeds, or of one seed
    the documents. text_low, text_high: the interval over documents, whatever the number of seeds. values: one per seed. Of
    losses also change, ...: value / value at the reference length - 1, paired, likewise.

    loss, context, holding: how it is judged on each, `HOLDS`, `LOST` or `UNCLEAR`; None where that was not measured. failed:
    those that are `LOST`. verdict: of all together, by the `Criterion`; None where it judges nothing.
    """

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
    values: tuple[float, ...] = ()
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    text_change_low: float | None = None
    text_change_high: float | None = None
    loss: str | None = None
    context: str | None = None
    holding: str | None = None
    failed: tuple[str, ...] = ()
    verdict: str | None = None

    @classmethod
    def of(cls, label: str, length: int, documents: int, value: Estimate) -> "Finding":
        """An estimate of a label at a length."""
        ends = (value.low, value.high, value.over, value.text_low, value.text_high)
        return cls(label, length, len(value.values), documents, value.value, *ends, value.values)


class Effective(NamedTuple):
    """The longest measured length up to which a label stays within the margin at every one; None: at no length.

    Attributes:
        value: By the means.
        low: With every interval within: it is at least this.
        high: With no interval outside: it is at most this, or beyond what was measured.
    """

    value: int | None
    low: int | None
    high: int | None


class Criterion(ABC):
    """When an encoding holds at a length, and the words for that; one subclass per kind of task.

    Attributes:
        things: What intervals are over, with one seed.
        metric: Of `longitude.measure.intervals.METRICS`.
        less_is_better: Of two values.
        verdicts: Verdict -> its word on the page.
        verb: What an encoding does that holds; the plural form.
    """

    things: ClassVar[str]
    metric: ClassVar[str]
    less_is_better: ClassVar[bool] = True
    verdicts: ClassVar[dict[str, str]]
    verb: ClassVar[str]

    def __init__(self, run: Run):
        self.run, self.task = run, run.task

    @abstractmethod
    def finding(self, label: str, length: int, method: str) -> Finding:
        """What was found of a label at a length."""

    @abstractmethod
    def sums(self, label: str, length: int, method: str) -> Sums | None:
        """What the metric is computed from; None where nothing was measured."""

    def compared(self, length: int, method: str) -> list[Comparison]:
        """Every pair of labels that were measured at a length, adjusted together."""
        sums = {label: self.sums(label, length, method) for label in self.run.labels}
        measured = {label: each for label, each in sums.items() if each is not None}
        return compared(measured, length, self.metric, self.less_is_better)

    @abstractmethod
    def within(self, found: Finding) -> tuple[bool, str | None]:
        """Whether a label is within the margin at a length by its mean, and the verdict on that."""

    def effective(self, lines: Sequence[Finding]) -> Effective:
        """Of a label, whose findings are given in the order of lengths."""

        def reach(inside: Callable[[bool, str | None], bool]) -> int | None:
            up_to = takewhile(lambda each: each.value is not None and inside(*self.within(each)), lines)
            return max((each.length for each in up_to), default=None)

        return Effective(
            reach(lambda by_mean, verdict: by_mean),
            reach(lambda by_mean, verdict: verdict == HOLDS),
            reach(lambda by_mean, verdict: verdict != LOST),
        )

    # ---- in a sentence ----

    @abstractmethod
    def clauses(self, found: list[Finding], last: list[Finding]) -> list[str]:
        """The conclusion, in parts. found: all that was measured; last: at the longest length."""

    @abstractmethod
    def headline(self, found: Finding) -> tuple[str, str]:
        """The number that a verdict is drawn from, and its interval, empty where there is none."""

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return self.task.words

    @abstractmethod
    def amount(self, value: float) -> str:
        """A difference, in its unit."""

    def beats(self, pair: Comparison) -> str:
        """Alibi beats rope, the next best, by 0.31 [0.28, 0.35] bits per byte (3 seeds): only where that is no noise of seeds."""
        better, worse = named(pair.better), named(pair.worse)
        by = self.amount(pair.value)
        if pair.low is not None and pair.high is not None:
            by += f" [{self.amount(pair.low)}, {self.amount(pair.high)}]"
        by += f" {self.points}"
        over = f"{pair.seeds} seeds" if pair.over == "seeds" else f"one seed, {pair.documents} {self.things}"
        if pair.decided:
            return f"{better} beats {worse}, the next best, by {by} ({over})"
        if pair.seeds == 1 and pair.low is not None and pair.low > 0:
            side, of = "below" if self.less_is_better else "above", f"in one seed ({pair.documents} {self.things})"
            return f"{better} is {by} {side} {worse}, the next best, {of}, which says nothing of training again"
        return f"{better} and {worse} cannot be distinguished ({by}; {over})"

    @property
    def object(self) -> str:
        """Of the verb, in the verdict."""
        return ""

    def verdict(self, found: list[Finding], last: list[Finding]) -> str:
        """The conclusion in a few words: names, and no numbers."""

        def names(group: list[Finding], first: bool) -> str:
            return and_([named(each.label) for each in group])

        return "; ".join(self.by_verdict(last, self.object, self.also(found, last), names))

    @abstractmethod
    def also(self, found: list[Finding], last: list[Finding]) -> list[str]:
        """What else stands in the verdict."""

    def by_verdict(
        self,
        last: list[Finding],
        what: str,
        others: Sequence[str] = (),
        listed: Callable[[list[Finding], bool], str] | None = None,
    ) -> list[str]:
        """Which labels hold at the longest length, which do not, of which the data cannot tell; then other clauses.

        Those that learned too little to judge are a group of their own, and so are those of which only that is unclear.

        what: the object of the verb. listed: the words for a group, and whether it is the first; by default with its numbers.
        """
        groups = {
            verdict: [each for each in last if each.verdict == verdict] for verdict in (HOLDS, WEAK, LOST, UNCLEAR)
        }
        hold, weak, lost, unclear = groups.values()
        listed = listed or (self._listed if len(last) <= LISTED else self._ranged)
        what = f" {what}" if what else ""
        clauses = []
        if hold:
            clauses.append(f"{listed(hold, True)} {self.verb}{'s' * (len(hold) == 1)}{what}")
        if lost:
            do_not = "does not" if len(lost) == 1 else "do not"
            clauses.append(f"{listed(lost, not clauses)} {do_not}" + ("" if clauses else f" {self.verb}{what}"))
        if weak:
            clauses.append(f"{listed(weak, not clauses)} learned too little to judge")
        stable = [each for each in unclear if each.holding == HOLDS]
        moving = [each for each in unclear if each.holding != HOLDS]
        if moving:
            they = f"they {self.verb}" if len(moving) > 1 else f"it {self.verb}s"
            clauses.append(
                f"for {listed(moving, not clauses)} the data cannot tell whether {they}"
                + ("" if hold or lost else what)
            )
        if stable:
            learned = f"keep{'s' * (len(stable) == 1)} the loss, but the data cannot tell whether"
            clauses.append(
                f"{listed(stable, not clauses)} {learned} {'they' if len(stable) > 1 else 'it'} learned from context"
            )
        first, *rest = [*clauses, *others]
        longest = self.run.lengths[-1]
        return [f"at {longest} {self.task.unit}, {far(longest, self.run.train_length)}, {first}", *rest]

    def _listed(self, group: list[Finding], first: bool) -> str:
        """Rope (+42%, 95% interval +41 to +43%) and t5 (+3.1%, +2.7 to +3.5%); the words stand once in a sentence."""
        words = []
        for each in group:
            value, span = self.headline(each)
            explained = "95% interval " if first and not words else ""
            words.append(f"{named(each.label)} ({value}{f', {explained}{span}' if span else ''})")
        return and_(words)

    def _ranged(self, group: list[Finding], first: bool) -> str:
        """Rope and t5 (+3.1% to +42%)."""
        ordered = sorted(group, key=lambda each: (each.value if each.change is None else each.change) or 0)
        ends = dict.fromkeys(self.headline(each)[0] for each in (ordered[0], ordered[-1]))
        return f"{and_([named(each.label) for each in group])} ({' to '.join(ends)})"

    # ---- in tables ----

    @abstractmethod
    def number(self, found: Finding) -> str:
        """The value, for the page."""

    @abstractmethod
    def bounds(self, found: Finding) -> str:
        """Its interval; empty where there is none."""

    @abstractmethod
    def short(self, found: Finding) -> str:
        """The value with half its interval, for the terminal."""

    @abstractmethod
    def title(self) -> str:
        """Of the table in the terminal."""

    @abstractmethod
    def last_column(self) -> tuple[str, str] | None:
        """The head of the table's last column in the terminal, and a note that explains it; None: there is no such column."""

    @abstractmethod
    def last_cell(self, lines: Sequence[Finding]) -> str:
        """The last column of a label, whose findings are given in the order of lengths."""
