"""What a study found: values with intervals, what changed past the training length, and one sentence about it.

Every interval is a 95 % bootstrap over the documents, and over the seeds where there are several
(`longitude.measure.intervals`). A change between two lengths is paired: the same documents at both, resampled together.
"""

from collections.abc import Sequence
from pathlib import Path

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


def summary(run: Run | Path, method: str | None = None) -> pd.DataFrame:
    """Label by length: what was measured, and how it changed from the reference length (if measured, the training one).

    Columns: label, length (bytes), seeds, documents, value, low, high (bits per byte, mean over seeds, 95 % interval),
    change, change_low, change_high (value / value at the reference - 1, paired), verdict. What is missing is None.
    verdict: `HOLDS` where change_high < `TOLERANCE`, `LOST` where change_low > `TOLERANCE`, else `UNCLEAR`; None at
    lengths up to the reference. method: by default the first that the study measured. ValueError for one it did not.
    """
    run = read_run(run)
    if not run.methods:
        raise ValueError(f"{run.path} was measured by position only; add non-overlapping or sliding to --methods")
    method = run.methods[0] if method is None else method
    if method not in run.methods:
        raise ValueError(f"{run.path} was not measured by {method!r}, but by {' and '.join(run.methods)}")
    lines = [_line(run, label, length, method) for label in run.labels for length in run.lengths]
    columns = ("label", "length", "seeds", "documents", "value", "low", "high")
    columns += ("change", "change_low", "change_high", "verdict")
    return pd.DataFrame(lines, columns=list(columns), dtype=object)


def _line(run: Run, label: str, length: int, method: str) -> tuple:
    sums = run.sums(label, length, method)
    if sums is None:
        return (label, length, 0, 0, *[None] * 7)
    seeds, documents = sums[0].shape
    change, verdict = (None, None, None), None
    start = run.sums(label, run.reference, method)
    if start is not None and length != run.reference:
        ratio = paired_ratio(sums, start)
        change = tuple(None if bound is None else bound - 1 for bound in ratio)
        if length in run.beyond:
            verdict = _verdict(*change)
    return (label, length, seeds, documents, *interval(*sums), *change, verdict)


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

    It says nothing that the paired intervals do not carry: see `summary` for the criterion.
    """
    run = read_run(run)
    if not run.methods:
        return "Losses were measured by position only, so nothing is said about longer windows."
    frame = summary(run)
    found = frame[frame["value"].notna()]
    clauses = _at_one_length(run, found) if not run.beyond else _at_the_longest(run, found)
    clauses += _undone(run)
    if len(found):
        clauses.append(_scope(found))
    sentence = "; ".join(clauses) + "."
    return sentence[0].upper() + sentence[1:]


def _at_the_longest(run: Run, found: pd.DataFrame) -> list[str]:
    longest, start = run.lengths[-1], run.reference
    last = found[found["length"] == longest]
    if not len(found):
        return ["no encoding was measured"]
    if not len(last):
        return [f"no encoding was measured at {longest} bytes"]
    clauses, full = [], len(last) <= LISTED
    criterion = f"bits per byte within {TOLERANCE:.0%} of those at {start}"
    criterion += "" if start == run.train_length else ", the nearest length measured"
    groups = {verdict: last[last["verdict"] == verdict] for verdict in (HOLDS, LOST, UNCLEAR)}
    interval_word = [", 95% interval "]  # said once, then understood

    def listed(group: pd.DataFrame) -> str:
        names = [named(label) for label in group["label"]]
        if not full:
            ends = percent(group["change"].min()), percent(group["change"].max())
            return and_(names) + (f" ({' to '.join(ends)})" if ends[0] != ends[1] else f" ({ends[0]})")
        numbers = []
        for line in group.itertuples():
            span = "" if line.change_low is None else f"{percent(line.change_low, '')} to {percent(line.change_high)}"
            numbers.append(f" ({percent(line.change)}{interval_word[0] + span if span else ''})")
            interval_word[0] = ", " if span else interval_word[0]
        return and_([name + number for name, number in zip(names, numbers, strict=True)])

    if len(groups[HOLDS]):
        clauses.append(f"{listed(groups[HOLDS])} {_verb(groups[HOLDS], 'holds', 'hold')} ({criterion})")
        if len(groups[LOST]):
            clauses.append(f"{listed(groups[LOST])} {_verb(groups[LOST], 'does', 'do')} not")
    elif len(groups[LOST]):
        clauses.append(f"{listed(groups[LOST])} {_verb(groups[LOST], 'does', 'do')} not hold ({criterion})")
    if len(groups[UNCLEAR]):
        explained = "" if clauses else f" whether {_verb(groups[UNCLEAR], 'it holds', 'they hold')} ({criterion})"
        clauses.append(f"for {listed(groups[UNCLEAR])} the data cannot tell{explained}")
    far = f"{longest // run.train_length} times the training length"
    far = far if longest % run.train_length == 0 else f"after training on {run.train_length}"
    clauses[0] = f"at {longest} bytes, {far}, {clauses[0]}"
    if absent := [label for label in dict.fromkeys(found["label"]) if label not in set(last["label"])]:
        was = "was" if len(absent) == 1 else "were"
        clauses.append(f"{and_([named(label) for label in absent])} {was} not measured at that length")
    if uncompared := last[last["verdict"].isna()]["label"].tolist():
        clauses.append(f"{and_([named(label) for label in uncompared])} cannot be compared with its value at {start}")
    return clauses


def _at_one_length(run: Run, found: pd.DataFrame) -> list[str]:
    """No length beyond the training length, or none to compare with: values, and no claim about length."""
    last = found[found["length"] == run.lengths[-1]].sort_values("value")
    if not len(last):
        return ["no encoding was measured"]
    values = []
    for line in last.itertuples():
        said = "" if values else "95% interval "
        span = "" if line.low is None else f" ({said}{line.low:.2f} to {line.high:.2f})"
        values.append(f"{line.value:.2f}{span} for {named(line.label)}")
    beyond = run.lengths[-1] > run.train_length
    why = "it was measured at one length only" if beyond else "no length beyond the training length was measured"
    return [
        f"at {run.lengths[-1]} bytes, after training on {run.train_length}, bits per byte are {and_(values)}",
        f"{why}, so nothing is known about how loss changes with length",
    ]


def _undone(run: Run) -> list[str]:
    by_state: dict[str, list[str]] = {}
    for cell in run.undone:
        name = named(cell.label) + (f" (seed {cell.seed})" if len(run.of(cell.label)) > 1 else "")
        by_state.setdefault(state(cell), []).append(name)
    return [f"{and_(names)} {state}" for state, names in by_state.items()]


def _scope(found: pd.DataFrame) -> str:
    """What the intervals cover, and what they do not."""
    documents, seeds = found["documents"].max(), sorted(set(found["seeds"]))
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


def _verb(group: pd.DataFrame, one: str, many: str) -> str:
    return one if len(group) == 1 else many


def percent(ratio: float, unit: str = "%") -> str:
    """0.421 -> +42%, -0.0123 -> −1.2%: signed, one digit after the point where it matters."""
    number = 100 * ratio
    text = f"{number:+.1f}" if abs(number) < 9.95 else f"{number:+.0f}"
    return text.replace("-", "−").replace("−0.0", "0.0").replace("+0.0", "0.0") + unit


# ---- the terminal ----------------------------------------------------------------------------------------------------


def table(run: Run | Path) -> Table:
    """Encodings by lengths for the terminal: bits per byte ± half the 95 % interval; green holds, red does not."""
    run = read_run(run)
    frame = summary(run)
    found = frame[frame["documents"] > 0]
    half = f"half the 95% interval over {count(found['documents'].max(), 'document')}, " if len(found) else ""
    half += count(found["seeds"].max(), "seed") if len(found) else "nothing was measured"
    notes = [f"±  {half}"]
    made = Table(
        title=f"bits per byte, {run.methods[0]} windows of so many bytes, trained on {run.train_length}",
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
        made.add_row(*_row(run, label, frame[frame["label"] == label]))
    made.caption = "\n".join(notes + _undone(run))
    return made


STYLES: dict[str | None, str] = {HOLDS: "green", LOST: "red", UNCLEAR: "yellow", None: ""}
SHORT = {HOLDS: "yes", LOST: "no", UNCLEAR: "?"}


def _row(run: Run, label: str, lines: pd.DataFrame) -> list[Text]:
    cells = [Text(label)]
    for line in lines.itertuples():
        cells.append(Text("-", style="dim") if line.value is None else Text(_value(line), STYLES[line.verdict]))
    cell = run.of(label)[0]
    if lines["value"].isna().all():
        cells[1] = Text(cell.status if cell.status != "done" else "-", "red")
    last = lines.iloc[-1]
    if last["verdict"]:
        cells.append(Text(f"{percent(last['change'])} {SHORT[last['verdict']]:<3}", STYLES[last["verdict"]]))
    return cells


def _value(line) -> str:
    """2.60 ±.04"""
    if line.low is None:
        return f"{line.value:.2f}"
    half = f"{(line.high - line.low) / 2:.2f}".removeprefix("0")
    return f"{line.value:.2f} ±{half}"


def count(number: int, thing: str) -> str:
    """1 seed, 2 seeds"""
    return f"{number} {thing}" + ("" if number == 1 else "s")
