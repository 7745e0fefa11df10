"""Losses: less is better. An encoding is judged on three things, and what failed is named.

* loss: at the training length within `LOSS_MARGIN` of the best label's there.
* context: it takes at least `GAIN` bits per byte from context, from the first to the last quarter of a window's positions at the
  training length, and beats the best n-grams counted on the training text (`Run.best_ngrams`).
* holding: at a longer length its loss is within `TOLERANCE` of that at the training length.

Every comparison is paired, by seed and by document, and must hold over both (`longitude.study.estimates`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from longitude.report.wording import and_, named, percent
from longitude.study.criterion import CONTEXT, HOLDING, LOSS, Criterion, Finding
from longitude.study.estimates import HOLDS, LOST, UNCLEAR, WEAK, Estimate, change, difference, level
from longitude.study.results import FIRST, LAST, Sums

TOLERANCE = 0.02
"""An encoding holds at a length when its bits per byte there are within 2 % of the training length's, or less."""
LOSS_MARGIN = 0.20
"""At the training length an encoding has learned as the best has when its loss is at most 20 % above: an order of n-grams."""
GAIN = 0.05
"""Bits per byte that context must bring. Trigrams gain about as much: the first byte of a window lacks one of their two."""
SHORT = {HOLDS: "yes", WEAK: "-", LOST: "no", UNCLEAR: "?"}
LEARNED = {HOLDS: "enough", LOST: "too little", UNCLEAR: UNCLEAR}
"""How loss and context are judged, in words."""

FLOOR = "n-grams"
BEYOND = "{margin} above the best loss, that of {best}"
SHORTFALLS = {
    FLOOR: {
        LOST: ("does not beat {n} of the same text ({bits})", "do not beat {n} of the same text ({bits})"),
        UNCLEAR: ("may not beat {n} of the same text ({bits})",) * 2,
    },
    CONTEXT: {
        LOST: ("takes no context", "take no context"),
        UNCLEAR: ("may take no context",) * 2,
    },
    LOSS: {
        LOST: ("is more than " + BEYOND, "are more than " + BEYOND),
        UNCLEAR: ("may be more than " + BEYOND,) * 2,
    },
}  # fmt: skip
"""What a label lacks, in words that follow it: of one, of several."""


class Learned(NamedTuple):
    """What a label learned at the training length; None where it was not measured.

    Attributes:
        label: Of the study.
        best: The label of the lowest loss there.
        gap: loss / that of the best - 1.
        gain: Loss at the first quarter of the positions less that at the last.
        floor: loss - that of the best n-grams, in bits per byte.
        loss: Whether the gap is below `LOSS_MARGIN`.
        context: Whether the gain is above `GAIN` and the loss below the floor.
        checks: `FLOOR`, `CONTEXT`, `LOSS` -> the verdict, and the number that it is drawn from.
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
    """`LOST` where the loss rises; else `WEAK` where the model learned too little to judge; `HOLDS` where both are well.

    Else `UNCLEAR`, also where whether it learned was not measured: a model that learned nothing has nothing to lose, so it never
    holds. No verdict at lengths up to the training length or the reference.
    """

    things, metric = "documents", "bits_per_byte"
    verdicts = {HOLDS: HOLDS, WEAK: WEAK, LOST: LOST, UNCLEAR: UNCLEAR}
    verb = "hold"

    def finding(self, label: str, length: int, method: str) -> Finding:
        run, sums = self.run, self.sums(label, length, method)
        if sums is None:
            return Finding(label, length)
        found = Finding.of(label, length, sums.of.shape[1], level(sums, self.metric))
        learned = self.learned[label]
        found = found._replace(loss=learned.loss, context=learned.context)
        start = self.sums(label, run.reference, method)
        if length != run.reference and start and (moved := change(sums, start, self.metric)):
            found = found._replace(
                change=moved.value, change_low=moved.low, change_high=moved.high,
                text_change_low=moved.text_low, text_change_high=moved.text_high,
            )  # fmt: skip
            if length in run.beyond and moved.value is not None:
                found = judged(found._replace(holding=moved.below(TOLERANCE)))
        return found

    def sums(self, label: str, length: int, method: str) -> Sums | None:
        return self.run.sums(label, length, method, ("nats", "bytes"))

    @cached_property
    def learned(self) -> dict[str, Learned]:
        """Of every label, by the first method."""
        run, method = self.run, next(iter(self.run.methods), "")
        at_start = {label: self.sums(label, run.reference, method) for label in run.labels}
        levels = {label: level(sums, self.metric) for label, sums in at_start.items() if sums}
        levels_at_start = {label: each.value for label, each in levels.items() if each.value is not None}
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
        if floor and floor.over == "seeds":  # the n-grams read the same documents
            floor = floor._replace(text_low=floor.low, text_high=floor.high)
        checks = {}
        if floor and loss.value is not None:
            beats = floor.below(0)
            # n-grams were counted in windows of the training length: at another length a higher loss may be due to the length
            checks[FLOOR] = (
                beats if beats == HOLDS or run.reference == run.train_length else UNCLEAR,
                f"{loss.value:.2f}",
            )
        if gain and gain.value is not None:
            checks[CONTEXT] = gain.above(GAIN), signed(gain.value)
        if gap and gap.value is not None:
            checks[LOSS] = HOLDS if label == best else gap.below(LOSS_MARGIN), percent(gap.value)
        verdicts = {name: verdict for name, (verdict, _) in checks.items()}
        context = _all([verdict for name, verdict in verdicts.items() if name != LOSS])
        return Learned(label, best, gap, gain, floor, verdicts.get(LOSS), context, checks)

    def within(self, found: Finding) -> tuple[bool, str | None]:
        """Lengths that nothing is compared at, up to the training length, are within."""
        if found.length not in self.run.beyond:
            return True, HOLDS
        return found.change is not None and found.change < TOLERANCE, found.holding

    def clauses(self, found: list[Finding], last: list[Finding]) -> list[str]:
        if not self.run.beyond:
            return self.values(last)
        start = self.run.reference
        criterion = f"{self.task.words} within {TOLERANCE:.0%} of those at {start}"
        criterion += "" if start == self.run.train_length else ", the nearest length measured"
        alone = [named(each.label) for each in last if each.change is None]
        others = [f"{and_(alone)} cannot be compared with the value at {start}"] if alone else []
        return self.by_verdict(last, f"({criterion})", [*self.shortfalls(last), *others])

    def verdict(self, found: list[Finding], last: list[Finding]) -> str:
        return super().verdict(found, last) if self.run.beyond else self.values(last)[1]

    def also(self, found: list[Finding], last: list[Finding]) -> list[str]:
        """Which labels learned nothing."""
        lost = {check: [each.label for each in last if self.learned[each.label].checks.get(check, ("",))[0] == LOST]
                for check in (FLOOR, CONTEXT)}  # fmt: skip
        ngrams, _ = self.run.best_ngrams or ("", None)
        words = {
            FLOOR: f"learned less than {ngrams}",
            CONTEXT: "learned nothing from context",
        }
        return [
            f"{and_([named(label) for label in labels])} {words[check]}" for check, labels in lost.items() if labels
        ]

    def shortfalls(self, last: list[Finding]) -> Iterator[str]:
        """Which labels did not learn enough at the training length, and what they lack."""
        run, learned = self.run, [self.learned[each.label] for each in last]
        start, (ngrams, bits) = f"at {run.reference} ", run.best_ngrams or ("", 0)
        for check, words in SHORTFALLS.items():
            for verdict, (one, several) in words.items():
                lacking = [each for each in learned if check in each.checks and each.checks[check][0] == verdict]
                if lacking:
                    names = and_([f"{named(each.label)} ({each.checks[check][1]})" for each in lacking])
                    what = (one if len(lacking) == 1 else several).format(
                        n=ngrams,
                        bits=f"{bits:.2f}",
                        margin=f"{LOSS_MARGIN:.0%}",
                        best=named(lacking[0].best or ""),
                    )
                    yield f"{start}{names} {what}"
                    start = ""

    def values(self, last: list[Finding]) -> list[str]:
        """No length beyond the training length, or none to compare with: values, and no claim about length."""
        words, run = [], self.run
        for each in sorted(last, key=lambda each: each.value or 0):
            explained = "" if words else "95% interval "
            bounds = "" if each.low is None else f" ({explained}{each.low:.2f} to {each.high:.2f})"
            words.append(f"{each.value:.2f}{bounds} for {named(each.label)}")
        beyond = run.lengths[-1] > run.train_length
        why = "it was measured at one length only" if beyond else "no length beyond the training length was measured"
        where = f"at {run.lengths[-1]} {self.task.unit}, after training on {run.train_length}"
        return [
            f"{where}, {self.task.words} are {and_(words)}",
            f"{why}, so nothing is known about how loss changes with length",
        ]

    def amount(self, value: float) -> str:
        return f"{value:.2f}".replace("-", "−")

    def headline(self, found: Finding) -> tuple[str, str]:
        return percent(found.change), span(found)

    def number(self, found: Finding) -> str:
        return "" if found.value is None else f"{found.value:.3f}"

    def bounds(self, found: Finding) -> str:
        return "" if found.low is None else f"{found.low:.2f} to {found.high:.2f}"

    def short(self, found: Finding) -> str:
        """2.60 ±.04."""
        if found.low is None or found.high is None:
            return f"{found.value:.2f}"
        half = f"{(found.high - found.low) / 2:.2f}".removeprefix("0")
        return f"{found.value:.2f} ±{half}"

    def title(self) -> str:
        run = self.run
        trained = f"trained on {run.train_length}" + (f" at {run.sampled_positions}" if run.sampled_positions else "")
        return f"{self.task.words}, {run.methods[0]} windows by length in {self.task.unit}, {trained}"

    def last_column(self) -> tuple[str, str] | None:
        run = self.run
        if not run.beyond:
            return None
        within = f"at {run.lengths[-1]} within {TOLERANCE:.0%} of {run.reference}, with all of the paired 95% interval"
        learned = f"not loss: at {run.reference} more than {LOSS_MARGIN:.0%} above the best; not context: gains less than {GAIN} "
        learned += "bits from the first to the last quarter of a window" + (
            " or n-grams of the same text are better" if run.floor else ""
        )
        return "holds?", f"holds: {within}\n{learned}"

    def last_cell(self, lines: Sequence[Finding]) -> str:
        last = lines[-1]
        if not last.verdict:
            return ""
        also = [name for name in last.failed if name != HOLDING]
        return f"{percent(last.change)} {SHORT[last.verdict]}" + (f", not {' '.join(also)}" if also else "")


def span(found: Finding) -> str:
    """The interval of the change: +41 to +43%; empty where there is none."""
    if found.change_low is None:
        return ""
    return f"{percent(found.change_low, '')} to {percent(found.change_high)}"


def judged(found: Finding) -> Finding:
    """With what failed, and the verdict of all three together."""
    of = {LOSS: found.loss, CONTEXT: found.context, HOLDING: found.holding}
    failed = tuple(name for name, verdict in of.items() if verdict == LOST)
    learned = _all([found.loss or UNCLEAR, found.context or UNCLEAR])
    verdict = (
        LOST
        if found.holding == LOST
        else WEAK
        if learned == LOST
        else _all([learned or UNCLEAR, found.holding or UNCLEAR])
    )
    return found._replace(failed=failed, verdict=verdict)


def signed(bits: float) -> str:
    """+0.23 bits."""
    return f"{bits:+.2f} bits".replace("-", "−")


def _all(verdicts: Sequence[str]) -> str | None:
    """`LOST` where one is, else `UNCLEAR` where one is, else `HOLDS`; None of none."""
    return next((each for each in (LOST, UNCLEAR, HOLDS) if each in verdicts), None)
