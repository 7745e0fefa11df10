"""Losses: less is better. An encoding is judged on three criteria, and those that it fails are named.

* loss: at the training length within `LOSS_MARGIN` of the best label's there.
* context: it gains more than `GAIN` bits per byte from context, from the first to the last quarter of a window's positions at
  the training length, and beats the best n-grams counted on the training text (`Run.best_ngrams`).
* holding: at a longer length its loss is within `TOLERANCE` of that at the training length.

Every comparison is paired, by seed and by document, and must hold over both together (`longitude.statistics.estimates`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from longitude.report.wording import capital, percent
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, WEAK, Estimate, Sums, change, difference, level
from longitude.study.criterion import CONTEXT, HOLDING, LOSS, Cell, Column, Criterion, Finding
from longitude.study.data import BLOCKS
from longitude.study.results import FIRST, LAST, Run

TOLERANCE = 0.02
"""An encoding holds at a length when its bits per byte there are within 2% of the training length's, or less."""
LOSS_MARGIN = 0.20
"""An encoding has learned enough if its loss at the training length is at most 20% above the best: an order of n-grams."""
GAIN = 0.05
"""Bits per byte that context must bring. Trigrams gain about as much: the first byte of a window lacks one of their two."""
FLOOR = "n-grams"
"""The check of a loss against counts of n-grams, beside `LOSS` and `CONTEXT`."""


class Learned(NamedTuple):
    """Result of a label at the training length; None if it was not measured.

    Attributes:
        label: One of the study's labels.
        best: The label of the lowest loss there.
        gap: loss / loss of the best label - 1.
        gain: Loss at the first quarter of the positions minus loss at the last.
        floor: loss - loss of the best n-grams, in bits per byte.
        loss: Whether the gap is below `LOSS_MARGIN`.
        context: Whether the gain is above `GAIN` and the loss below the floor.
        checks: `FLOOR`, `CONTEXT`, `LOSS` -> the verdict, and the number it is based on.
    """

    label: str
    best: str | None = None
    gap: Estimate | None = None
    gain: Estimate | None = None
    floor: Estimate | None = None
    loss: str | None = None
    context: str | None = None
    checks: Mapping[str, tuple[str, str]] = {}


class LossCriterion(Criterion):
    """`LOST` if the loss rises; else `WEAK` if the model learned too little to judge; `HOLDS` if it learned and does not rise.

    Else `UNCLEAR`, also if it was not measured whether the model learned: the loss of a model that learned nothing cannot rise,
    so it never holds. No verdict at lengths up to the training length or the reference.
    """

    things, metric = "documents", "bits_per_byte"

    def __init__(self, run: Run):
        super().__init__(run)
        if BLOCKS in run.study["data"].get("unit", ""):
            self.things = BLOCKS

    def finding(self, label: str, length: int, method: str) -> Finding:
        run, sums = self.run, self.sums(label, length, method)
        if sums is None:
            return Finding(method, label, length)
        finding = Finding.of(method, label, length, sums.of.shape[1], level(sums, self.metric))
        learned = self.learned[label]
        finding = finding._replace(loss=learned.loss, context=learned.context)
        start = self.sums(label, run.reference, method)
        if length != run.reference and start and (moved := change(sums, start, self.metric)):
            finding = finding._replace(
                change=moved.value, change_low=moved.low, change_high=moved.high,
                text_change_low=moved.text_low, text_change_high=moved.text_high,
                seed_change_low=moved.seed_low, seed_change_high=moved.seed_high,
            )  # fmt: skip
            if length in run.beyond and moved.value is not None:
                finding = judged(finding._replace(holding=moved.below(TOLERANCE)))
        return finding

    def sums(self, label: str, length: int, method: str) -> Sums | None:
        return self.run.sums(label, length, method, ("nats", "bytes"))

    @cached_property
    def learned(self) -> dict[str, Learned]:
        """Results of every label at the training length, by the first method."""
        run, method = self.run, next(iter(self.run.methods), "")
        at_start = {label: self.sums(label, run.reference, method) for label in run.labels}
        levels = {label: level(sums, self.metric) for label, sums in at_start.items() if sums}
        levels_at_start = {label: level.value for label, level in levels.items() if level.value is not None}
        best = min(levels_at_start, key=lambda label: levels_at_start[label], default=None)
        return {label: self._learned(label, best, at_start, levels.get(label)) for label in run.labels}

    def _learned(
        self, label: str, best: str | None, at_start: dict[str, Sums | None], loss: Estimate | None
    ) -> Learned:
        run, sums = self.run, at_start[label]
        if sums is None or best is None or loss is None:
            return Learned(label)
        first, last = (self.sums(label, run.train_length, quarter) for quarter in (FIRST, LAST))
        gap = change(sums, at_start[best] or sums, self.metric)
        gain = difference(first, last, self.metric) if first and last else None
        best_ngrams = run.best_ngrams
        floor = loss.less(best_ngrams[1]) if best_ngrams else None
        if floor and len(floor.values) > 1:  # the n-grams read the same documents
            floor = floor._replace(low=floor.seed_low, high=floor.seed_high)
        checks = {}
        if floor and loss.value is not None:
            beats = floor.below(0)
            # n-grams were counted in windows of the training length: at another length a higher loss may be due to the length
            comparable = beats == HOLDS or run.reference == run.train_length
            checks[FLOOR] = beats if comparable else UNCLEAR, f"{loss.value:.2f}"
        if gain and gain.value is not None:
            checks[CONTEXT] = gain.above(GAIN), signed(gain.value)
        if gap and gap.value is not None:
            checks[LOSS] = HOLDS if label == best else gap.below(LOSS_MARGIN), percent(gap.value)
        verdicts = {name: verdict for name, (verdict, _) in checks.items()}
        context = _all([verdict for name, verdict in verdicts.items() if name != LOSS])
        return Learned(label, best, gap, gain, floor, verdicts.get(LOSS), context, checks)

    def within(self, finding: Finding) -> tuple[bool, str | None]:
        """Lengths up to the training length, at which nothing is compared, count as within."""
        if finding.length not in self.run.beyond:
            return True, HOLDS
        return finding.change is not None and finding.change < TOLERANCE, finding.holding

    def result(self, last: Sequence[Finding]) -> str:
        if self.run.beyond:
            return super().result(last)
        if self.run.lengths[-1] > self.run.train_length:
            return "Nothing is known about length: one length was measured"
        return "Nothing is known about length: no length beyond the training length was measured"

    def doubt(self, label: str) -> str:
        """Why it is not certain that a label learned enough, as text to follow its name; empty if it is."""
        if self.learned_too_little(label):
            return f"learned too little at {self.run.reference}: it {self._why(label)}"
        unclear = self._shown(label, UNCLEAR)
        return f"may have learned too little at {self.run.reference} ({unclear})" if unclear else ""

    def learned_too_little(self, label: str) -> bool:
        return any(verdict == LOST for verdict, _ in self.learned[label].checks.values())

    def cautions(self, last: Sequence[Finding]) -> list[str]:
        labels = [finding.label for finding in last]
        little = [label for label in labels if self.learned_too_little(label)]
        unsure = [label for label in labels if label not in little and self._shown(label, UNCLEAR)]
        alone = [self.called(finding.label) for finding in last if finding.change is None] if self.run.beyond else []
        at = f"at {self.run.reference}"
        unclear = [f"{self.called(label)} ({self._shown(label, UNCLEAR)})" for label in unsure]
        groups = {f"unclear {at} whether enough was learned": unclear, f"no value {at} to compare with": alone}
        why = {label: self.doubt(label) for label in little}
        starred = [f"* {self.called(label)} {reason}" for label, reason in why.items()]
        return [*starred, *(f"{reason}: {', '.join(names)}" for reason, names in groups.items() if names)]

    def _why(self, label: str) -> str:
        """The checks that a label failed, with their numbers, as the end of a sentence."""
        learned, (ngrams, bits) = self.learned[label], self.run.best_ngrams or ("", 0)
        of = {check: number for check, (verdict, number) in learned.checks.items() if verdict == LOST}
        level = []
        if FLOOR in of:
            level.append(f"worse than {ngrams} ({of[FLOOR]} against {bits:.2f})")
        if LOSS in of:
            level.append(f"{of[LOSS].removeprefix('+')} above {self.called(learned.best or '')}")
        loss = [f"is {', '.join(level)}"] * bool(level)
        if CONTEXT not in of:
            return loss[0]
        nothing = learned.gain is None or (learned.gain.value or 0) <= 0
        gain = f"gains {'nothing' if nothing else 'too little'} from context ({of[CONTEXT]})"
        return ", and ".join([*loss, gain])

    def _shown(self, label: str, verdict: str) -> str:
        """The numbers of the checks with this verdict; empty if there are none."""
        learned, (ngrams, bits) = self.learned[label], self.run.best_ngrams or ("", 0)
        reasons = {
            FLOOR: f"{{}} against {bits:.2f} of {ngrams}",
            CONTEXT: "{} from context",
            LOSS: f"{{}} above {self.called(learned.best or '')}",
        }
        shown = {
            check: number for check, (verdict_of_check, number) in learned.checks.items() if verdict_of_check == verdict
        }
        return "; ".join(reasons[check].format(number) for check, number in shown.items())

    def title(self) -> str:
        sentence = f"{capital(self.task.words)}, lower is better, {self.run.methods[0]} windows."
        return f"{self.trained_on('windows of')}\n{sentence}"

    def every_column(self) -> list[Column]:
        run = self.run
        judged = [
            Column(f"change, {run.reference} to {run.lengths[-1]}", change_cell, ("terminal", "page")),
            Column("loss", lambda lines: Cell(self.verdict_cell(lines).text), ("terminal",)),  # the label has a star
        ]
        return [*judged * bool(run.beyond), Column("effective length", self.effective_cell, ("page", "paper"))]

    def key(self) -> list[str]:
        run, checks = self.run, {check for learned in self.learned.values() for check in learned.checks}
        floor = f", or not below {run.best_ngrams[0]} of the same text" if run.best_ngrams and FLOOR in checks else ""
        gain = f", or less than {GAIN} bits gained from the first to the last quarter of a window"
        gain = gain if CONTEXT in checks else ""
        starred = f"*        more than {LOSS_MARGIN:.0%} above the best loss at {run.reference}{floor}{gain}"
        little = [starred] if any(map(self.learned_too_little, run.labels)) else []
        if not run.beyond:
            return little
        within = f"within {TOLERANCE:.0%} of the loss at {run.reference}, with the whole 95% interval (paired)"
        return [f"holds    {within}; rises: above, all of it; unclear: neither, or * too little learned", *little]


def span(finding: Finding) -> str:
    """The interval of the change: +41 to +43%; empty if there is none."""
    return "" if finding.change_low is None else f"{percent(finding.change_low, '')} to {percent(finding.change_high)}"


def change_cell(lines: Sequence[Finding]) -> Cell:
    """The change up to the longest length, with its interval."""
    last = lines[-1]
    return Cell(percent(last.change), span(last), "" if last.change is None else last.change)


def judged(finding: Finding) -> Finding:
    """The finding with `failed` and `verdict` from its loss, context and holding."""
    of = {LOSS: finding.loss, CONTEXT: finding.context, HOLDING: finding.holding}
    failed = tuple(name for name, verdict in of.items() if verdict == LOST)
    verdict = _all([verdict or UNCLEAR for verdict in of.values()])
    if verdict == LOST and finding.holding != LOST:
        verdict = WEAK
    return finding._replace(failed=failed, verdict=verdict)


def signed(bits: float) -> str:
    """+0.23 bits."""
    return f"{bits:+.2f} bits".replace("-", "−")


def _all(verdicts: Sequence[str]) -> str | None:
    """`LOST` if one of them is, else `UNCLEAR` if one is, else `HOLDS`; None for an empty list."""
    return next((verdict for verdict in (LOST, UNCLEAR, HOLDS) if verdict in verdicts), None)
