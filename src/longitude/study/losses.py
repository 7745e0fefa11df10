"""Losses: less is better, and an encoding holds at a length where it loses nothing against the training length.

Intervals are 95 % bootstraps over the documents, and over the seeds where there are several (`longitude.measure.intervals`).
A change between two lengths is paired: the same documents at both, resampled together.
"""

from collections.abc import Sequence

import numpy as np

from longitude.measure.intervals import interval, paired_ratio
from longitude.report.wording import and_, named, percent
from longitude.study.criterion import HOLDS, LOST, UNCLEAR, Criterion, Finding

TOLERANCE = 0.02
"""An encoding holds at a length when its bits per byte there are within 2 % of the training length's, or less."""
SHORT = {HOLDS: "yes", LOST: "no", UNCLEAR: "?"}


class LossCriterion(Criterion):
    """`HOLDS` where change_high < `TOLERANCE`, `LOST` where change_low > `TOLERANCE`, else `UNCLEAR`.

    No verdict at lengths up to the training length or the reference.
    """

    things = "documents"
    verdicts = {HOLDS: HOLDS, LOST: LOST, UNCLEAR: UNCLEAR}
    verb = "hold"

    def finding(self, label: str, length: int, method: str) -> Finding:
        run, sums = self.run, self.sums(label, length, method)
        if sums is None:
            return Finding(label, length)
        seeds, documents = sums[0].shape
        value, low, high = interval(*sums)
        found = Finding(label, length, seeds, documents, value, low, high)
        start = self.sums(label, run.reference, method)
        if start is None or length == run.reference:
            return found
        change, low, high = (None if bound is None else bound - 1 for bound in paired_ratio(sums, start))
        verdict = None
        if length in run.beyond and change is not None:
            below, above = high is not None and high < TOLERANCE, low is not None and low > TOLERANCE
            verdict = HOLDS if below else LOST if above else UNCLEAR
        return found._replace(change=change, change_low=low, change_high=high, verdict=verdict)

    def sums(self, label: str, length: int, method: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(nats, bytes), each [seeds, documents]; None where nothing was measured."""
        columns = self.run.sums(label, length, method, ("nats", "bytes"))
        return None if columns is None else (columns[0], columns[1])

    def clauses(self, found: list[Finding], last: list[Finding]) -> list[str]:
        if not self.run.beyond:
            return self.values(last)
        start = self.run.reference
        criterion = f"{self.task.words} within {TOLERANCE:.0%} of those at {start}"
        criterion += "" if start == self.run.train_length else ", the nearest length measured"
        alone = [named(each.label) for each in last if each.change is None]
        others = [f"{and_(alone)} cannot be compared with the value at {start}"] if alone else []
        return self.by_verdict(last, f"({criterion})", others)

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
        return f"{self.task.words}, {run.methods[0]} windows by length in bytes, {trained}"

    def last_column(self) -> tuple[str, str] | None:
        run = self.run
        if not run.beyond:
            return None
        within = f"at {run.lengths[-1]} within {TOLERANCE:.0%} of {run.reference}, with all of the paired 95% interval"
        return "holds?", f"holds: {within}"

    def last_cell(self, lines: Sequence[Finding]) -> str:
        last = lines[-1]
        return f"{percent(last.change)} {SHORT[last.verdict]:<3}" if last.verdict else ""


def span(found: Finding) -> str:
    """The interval of the change: +41 to +43%; empty where there is none."""
    if found.change_low is None:
        return ""
    return f"{percent(found.change_low, '')} to {percent(found.change_high)}"
