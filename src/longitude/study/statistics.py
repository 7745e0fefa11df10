"""What a study found: values with intervals, what changed past the training length, and one sentence about it.

Every interval is a 95 % bootstrap over the documents, and over the seeds where there are several
(`longitude.measure.intervals`). A change between two lengths is paired: the same documents at both, resampled together.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from longitude.measure.intervals import interval, paired_ratio
from longitude.study.results import CellResult, Run, read_run

TOLERANCE = 0.02
"""An encoding holds at a length when its bits per byte there are within 2 % of the training length's, or less."""
HOLDS, LOST, UNCLEAR = "holds", "does not hold", "cannot tell"
LISTED = 6
"""Encodings that the sentence lists with their numbers; beyond that it gives ranges."""


class Finding(NamedTuple):
    """One label at one length. What is missing is None.

    value, low, high: bits per byte, mean over seeds, with its 95 % interval. change, change_low, change_high: value /
    value at the reference length - 1, paired. verdict: `HOLDS` where change_high < `TOLERANCE`, `LOST` where
    change_low > `TOLERANCE`, else `UNCLEAR`; None at lengths up to the training length or the reference.
    """

    label: str
    length: int
    seeds: int = 0
    documents: int = 0
    value: float | None = None
    low: float | None = None
    high: float | None = None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    verdict: str | None = None


def summary(run: Run | Path, method: str | None = None) -> pd.DataFrame:
    """`findings` as a table: a column for each field of `Finding`, a row for each label and length."""
    return pd.DataFrame(findings(run, method), columns=pd.Index(Finding._fields), dtype=object)


def findings(run: Run | Path, method: str | None = None) -> list[Finding]:
    """What was measured of each label at each length, and how it changed from the reference length.

    method: by default the first that the study measured. ValueError for one that it did not measure.
    """
    run = read_run(run)
    if not run.methods:
        raise ValueError(f"{run.path} was measured by position only; add non-overlapping or sliding to --methods")
    method = run.methods[0] if method is None else method
    if method not in run.methods:
        raise ValueError(f"{run.path} was not measured by {method!r}, but by {' and '.join(run.methods)}")
    return [_finding(run, label, length, method) for label in run.labels for length in run.lengths]


def _finding(run: Run, label: str, length: int, method: str) -> Finding:
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


def _verdict(change: float | None, low: float | None, high: float | None) -> str | None:
    if change is None:
        return None
    if high is not None and high < TOLERANCE:
        return HOLDS
    if low is not None and low > TOLERANCE:
        return LOST
    return UNCLEAR


# ---- the sentence ----------------------------------------------------------------------------------------------------


def conclusion(run: Run | Path) -> str:
    """One sentence: which encodings hold at the longest length, which do not, for which the data cannot tell.

    It says nothing that the paired intervals do not carry: see `Finding` for the criterion.
    """
    run = read_run(run)
    if not run.methods:
        return "Losses were measured by position only, so nothing is said about longer windows."
    found = [each for each in findings(run) if each.value is not None]
    last = [each for each in found if each.length == run.lengths[-1]]
    if not found:
        clauses = ["no encoding was measured"]
    elif not last:
        clauses = [f"no encoding was measured at {run.lengths[-1]} bytes"]
    else:
        clauses = _changes(run, last) if run.beyond else _values(run, last)
        here = {each.label for each in last}
        if absent := [named(label) for label in dict.fromkeys(each.label for each in found) if label not in here]:
            clauses.append(f"{and_(absent)} {'was' if len(absent) == 1 else 'were'} not measured at that length")
    clauses += _undone(run)
    if run.sampled_positions:
        clauses.append(f"training windows had {run.sampled_positions}")
    if found:
        clauses.append(_scope(found))
    sentence = "; ".join(clauses) + "."
    return sentence[0].upper() + sentence[1:]


def _changes(run: Run, last: list[Finding]) -> list[str]:
    """Who holds at the longest length, who does not, of whom the data cannot tell."""
    longest, start = run.lengths[-1], run.reference
    criterion = f"bits per byte within {TOLERANCE:.0%} of those at {start}"
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
    far = f"{longest // run.train_length} times the training length"
    far = far if longest % run.train_length == 0 else f"after training on {run.train_length}"
    return [f"at {longest} bytes, {far}, {clauses[0]}", *clauses[1:]]


def _listed(group: list[Finding], first: bool) -> str:
    """rope (+42%, 95% interval +41 to +43%) and t5 (+3.1%, +2.7 to +3.5%); the words are said once in a sentence."""
    words = []
    for each in group:
        said = "95% interval " if first and not words else ""
        words.append(f"{named(each.label)} ({percent(each.change)}{', ' + said + span(each) if span(each) else ''})")
    return and_(words)


def _ranged(group: list[Finding], first: bool) -> str:
    """rope and t5 (+3.1% to +42%)"""
    changes = [each.change for each in group if each.change is not None]
    ends = dict.fromkeys((percent(min(changes)), percent(max(changes))))
    return f"{and_([named(each.label) for each in group])} ({' to '.join(ends)})"


def _values(run: Run, last: list[Finding]) -> list[str]:
    """No length beyond the training length, or none to compare with: values, and no claim about length."""
    words = []
    for each in sorted(last, key=lambda each: each.value or 0):
        said = "" if words else "95% interval "
        bounds = "" if each.low is None else f" ({said}{each.low:.2f} to {each.high:.2f})"
        words.append(f"{each.value:.2f}{bounds} for {named(each.label)}")
    beyond = run.lengths[-1] > run.train_length
    why = "it was measured at one length only" if beyond else "no length beyond the training length was measured"
    return [
        f"at {run.lengths[-1]} bytes, after training on {run.train_length}, bits per byte are {and_(words)}",
        f"{why}, so nothing is known about how loss changes with length",
    ]


def _undone(run: Run) -> list[str]:
    by_state: dict[str, list[str]] = {}
    for cell in run.undone:
        name = named(cell.label) + (f" (seed {cell.seed})" if len(run.of(cell.label)) > 1 else "")
        by_state.setdefault(state(cell), []).append(name)
    return [f"{and_(names)} {state}" for state, names in by_state.items()]


def _scope(found: list[Finding]) -> str:
    """What the intervals cover, and what they do not."""
    documents, seeds = found[0].documents, sorted({each.seeds for each in found})
    if documents < 2:
        return "there is one document only, so no interval could be computed"
    if seeds == [1]:
        return f"intervals are over {documents} documents with one seed, so they do not cover training again"
    number = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"intervals are over {documents} documents and {number} seeds"


def state(cell: CellResult) -> str:
    """How a cell ended, in words after its name."""
    if cell.status == "diverged":
        return f"diverged at step {cell.step}"
    return {"done": "is done", "failed": "failed", "not run": "was not run"}.get(cell.status, "did not finish")


def named(label: str) -> str:
    """A label inside a sentence, where the encoding called none is not a count."""
    return '"none"' if label == "none" else label


def and_(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def span(found: Finding) -> str:
    """The interval of the change: +41 to +43%; empty where there is none."""
    if found.change_low is None:
        return ""
    return f"{percent(found.change_low, '')} to {percent(found.change_high)}"


def percent(ratio: float | None, unit: str = "%") -> str:
    """0.421 -> +42%, -0.0123 -> −1.2%: signed, one digit after the point where it matters; empty for None."""
    if ratio is None:
        return ""
    number = 100 * ratio
    text = f"{number:+.1f}" if abs(number) < 9.95 else f"{number:+.0f}"
    return text.replace("-", "−").replace("−0.0", "0.0").replace("+0.0", "0.0") + unit


# ---- the terminal ----------------------------------------------------------------------------------------------------


def table(run: Run | Path) -> Table:
    """Encodings by lengths for the terminal: bits per byte ± half the 95 % interval; green holds, red does not."""
    run = read_run(run)
    if not run.methods:
        return Table(title="measured by position only: the report shows it", title_justify="left", box=None)
    lines = findings(run)
    found = [each for each in lines if each.value is not None]
    over = "nothing: no encoding was measured"
    if found:
        over = f"{count(found[0].documents, 'document')}, {count(max(each.seeds for each in found), 'seed')}"
    notes = [f"±  half the 95% interval over {over}"]
    trained = f"trained on {run.train_length}" + (f" at {run.sampled_positions}" if run.sampled_positions else "")
    made = Table(
        title=f"bits per byte, {run.methods[0]} windows of so many bytes, {trained}",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    made.add_column("encoding", min_width=min(16, max(len(label) for label in run.labels)), overflow="fold")
    for length in run.lengths:
        made.add_column(str(length), justify="right")
    if run.beyond:
        made.add_column("holds?", justify="right", no_wrap=True)
        within = f"at {run.lengths[-1]} within {TOLERANCE:.0%} of {run.reference}, with all of the paired 95% interval"
        notes.append(f"holds: {within}")
    for label in run.labels:
        made.add_row(*_row(run, label, [each for each in lines if each.label == label]))
    made.caption = "\n".join(notes + _undone(run))
    return made


STYLES: dict[str | None, str] = {HOLDS: "green", LOST: "red", UNCLEAR: "yellow", None: ""}
SHORT = {HOLDS: "yes", LOST: "no", UNCLEAR: "?"}


def _row(run: Run, label: str, lines: list[Finding]) -> list[Text]:
    cells = [Text(label)]
    for each in lines:
        cells.append(Text("-", style="dim") if each.value is None else Text(_value(each), STYLES[each.verdict]))
    first, last = run.of(label)[0], lines[-1]
    if first.status != "done" and all(each.value is None for each in lines):
        cells[1] = Text(first.status, "red")
    if last.verdict:
        cells.append(Text(f"{percent(last.change)} {SHORT[last.verdict]:<3}", STYLES[last.verdict]))
    return cells


def _value(found: Finding) -> str:
    """2.60 ±.04"""
    if found.low is None or found.high is None:
        return f"{found.value:.2f}"
    half = f"{(found.high - found.low) / 2:.2f}".removeprefix("0")
    return f"{found.value:.2f} ±{half}"


def count(number: int, thing: str) -> str:
    """1 seed, 2 seeds"""
    return f"{number} {thing}" + ("" if number == 1 else "s")
