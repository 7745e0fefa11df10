"""Losses: less is better, and an encoding holds at a length where it loses nothing against the training length.

Intervals are 95 % bootstraps over the documents, and over the seeds where there are several (`longitude.measure.intervals`).
A change between two lengths is paired: the same documents at both, resampled together.
"""

from longitude.measure.intervals import interval, paired_ratio
from longitude.report.wording import and_, far, named, percent
from longitude.study.judge import HOLDS, LISTED, LOST, UNCLEAR, Finding, Judge
from longitude.study.results import Run

TOLERANCE = 0.02
"""An encoding holds at a length when its bits per byte there are within 2 % of the training length's, or less."""
SHORT = {HOLDS: "yes", LOST: "no", UNCLEAR: "?"}


class Losses(Judge):
    """`HOLDS` where change_high < `TOLERANCE`, `LOST` where change_low > `TOLERANCE`, else `UNCLEAR`; nothing is said at lengths
    up to the training length or the reference.
    """

    things = "documents"
    verdicts = {HOLDS: HOLDS, LOST: LOST, UNCLEAR: UNCLEAR}

    def finding(self, run: Run, label: str, length: int, method: str) -> Finding:
        sums = run.sums(label, length, method)
        if sums is None:
            return Finding(label, length)
        seeds, documents = sums[0].shape
        value, low, high = interval(*sums)
        found = Finding(label, length, seeds, documents, value, low, high)
        start = run.sums(label, run.reference, method)
        if start is None or length == run.reference:
            return found
        change, low, high = (None if bound is None else bound - 1 for bound in paired_ratio(sums, start))
        verdict = _verdict(change, low, high) if length in run.beyond else None
        return found._replace(change=change, change_low=low, change_high=high, verdict=verdict)

    def clauses(self, run: Run, found: list[Finding], last: list[Finding]) -> list[str]:
        return self.changes(run, last) if run.beyond else self.values(run, last)

    def changes(self, run: Run, last: list[Finding]) -> list[str]:
        """Who holds at the longest length, who does not, of whom the data cannot tell."""
        longest, start = run.lengths[-1], run.reference
        criterion = f"{self.task.words} within {TOLERANCE:.0%} of those at {start}"
        criterion += "" if start == run.train_length else ", the nearest length measured"
        hold, lost, unclear = ([each for each in last if each.verdict == verdict] for verdict in (HOLDS, LOST, UNCLEAR))
        listed = _listed if len(last) <= LISTED else _ranged
        clauses = []
        if hold:
            clauses.append(f"{listed(hold, True)} {'holds' if len(hold) == 1 else 'hold'} ({criterion})")
        if lost:
            not_hold = "do not" if len(lost) > 1 else "does not"
            clauses.append(f"{listed(lost, not hold)} {not_hold}" + ("" if hold else f" hold ({criterion})"))
        if unclear:
            they = "they hold" if len(unclear) > 1 else "it holds"
            explained = "" if clauses else f" whether {they} ({criterion})"
            clauses.append(f"for {listed(unclear, not clauses)} the data cannot tell{explained}")
        if uncompared := [named(each.label) for each in last if each.change is None]:
            clauses.append(f"{and_(uncompared)} cannot be compared with the value at {start}")
        return [f"at {longest} {self.task.unit}, {far(longest, run.train_length)}, {clauses[0]}", *clauses[1:]]

    def values(self, run: Run, last: list[Finding]) -> list[str]:
        """No length beyond the training length, or none to compare with: values, and no claim about length."""
        words = []
        for each in sorted(last, key=lambda each: each.value or 0):
            said = "" if words else "95% interval "
            bounds = "" if each.low is None else f" ({said}{each.low:.2f} to {each.high:.2f})"
            words.append(f"{each.value:.2f}{bounds} for {named(each.label)}")
        beyond = run.lengths[-1] > run.train_length
        why = "it was measured at one length only" if beyond else "no length beyond the training length was measured"
        where = f"at {run.lengths[-1]} {self.task.unit}, after training on {run.train_length}"
        return [
            f"{where}, {self.task.words} are {and_(words)}",
            f"{why}, so nothing is known about how loss changes with length",
        ]

    def number(self, found: Finding) -> str:
        return "" if found.value is None else f"{found.value:.3f}"

    def bounds(self, found: Finding) -> str:
        return "" if found.low is None else f"{found.low:.2f} to {found.high:.2f}"

    def short(self, found: Finding) -> str:
        """2.60 ±.04"""
        if found.low is None or found.high is None:
            return f"{found.value:.2f}"
        half = f"{(found.high - found.low) / 2:.2f}".removeprefix("0")
        return f"{found.value:.2f} ±{half}"

    def title(self, run: Run) -> str:
        trained = f"trained on {run.train_length}" + (f" at {run.sampled_positions}" if run.sampled_positions else "")
        return f"{self.task.words}, {run.methods[0]} windows of so many bytes, {trained}"

    def last_column(self, run: Run) -> tuple[str, str] | None:
        if not run.beyond:
            return None
        within = f"at {run.lengths[-1]} within {TOLERANCE:.0%} of {run.reference}, with all of the paired 95% interval"
        return "holds?", f"holds: {within}"

    def last_cell(self, run: Run, lines: list[Finding]) -> str:
        last = lines[-1]
        return f"{percent(last.change)} {SHORT[last.verdict]:<3}" if last.verdict else ""


def _verdict(change: float | None, low: float | None, high: float | None) -> str | None:
    if change is None:
        return None
    if high is not None and high < TOLERANCE:
        return HOLDS
    if low is not None and low > TOLERANCE:
        return LOST
    return UNCLEAR


def _listed(group: list[Finding], first: bool) -> str:
    """Rope (+42%, 95% interval +41 to +43%) and t5 (+3.1%, +2.7 to +3.5%); the words are said once in a sentence."""
    words = []
    for each in group:
        said = "95% interval " if first and not words else ""
        words.append(f"{named(each.label)} ({percent(each.change)}{', ' + said + span(each) if span(each) else ''})")
    return and_(words)


def _ranged(group: list[Finding], first: bool) -> str:
    """Rope and t5 (+3.1% to +42%)"""
    changes = [each.change for each in group if each.change is not None]
    ends = dict.fromkeys((percent(min(changes)), percent(max(changes))))
    return f"{and_([named(each.label) for each in group])} ({' to '.join(ends)})"


def span(found: Finding) -> str:
    """The interval of the change: +41 to +43%; empty where there is none."""
    if found.change_low is None:
        return ""
    return f"{percent(found.change_low, '')} to {percent(found.change_high)}"
