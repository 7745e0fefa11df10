"""What a study found: values with intervals, what is said of each length, and one sentence about it.

How numbers are judged, and the words for that, are the kind of task's: `losses` and `answers`.
"""

from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from longitude.report.wording import and_, count, named, percent as percent
from longitude.study.answers import Answers
from longitude.study.judge import (
    HOLDS as HOLDS,
    LOST as LOST,
    UNCLEAR as UNCLEAR,
    Finding as Finding,
    Judge,
)
from longitude.study.losses import TOLERANCE as TOLERANCE, Losses, span as span
from longitude.study.results import CellResult, Run, read_run

JUDGES: dict[str, type[Judge]] = {"losses": Losses, "answers": Answers}


def judge_of(run: Run) -> Judge:
    return JUDGES[run.task.kind](run.task)


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
    judge = judge_of(run)
    return [_trained(run, judge.finding(run, label, length, method)) for label in run.labels for length in run.lengths]


def _trained(run: Run, found: Finding) -> Finding:
    """Beyond the training length nothing holds of which training never used a part."""
    beyond = found.verdict == HOLDS and found.length > run.train_length
    return found._replace(verdict=UNCLEAR) if beyond and run.untrained(found.label) else found


# ---- the sentence ----------------------------------------------------------------------------------------------------


def conclusion(run: Run | Path) -> str:
    """One sentence: which encodings hold at the longest length, which do not, for which the data cannot tell.

    It says nothing that the intervals do not carry: see the `Judge` of the task for the criterion.
    """
    run = read_run(run)
    if not run.methods:
        return "Losses were measured by position only, so nothing is said about longer windows."
    judge = judge_of(run)
    found = [each for each in findings(run) if each.value is not None]
    last = [each for each in found if each.length == run.lengths[-1]]
    if not found:
        clauses = ["no encoding was measured"]
    elif not last:
        clauses = [f"no encoding was measured at {run.lengths[-1]} {run.task.unit}"]
    else:
        clauses = judge.clauses(run, found, last)
        here = {each.label for each in last}
        if absent := [named(label) for label in dict.fromkeys(each.label for each in found) if label not in here]:
            clauses.append(f"{and_(absent)} {'was' if len(absent) == 1 else 'were'} not measured at that length")
    clauses += _untrained(run) + _undone(run)
    if run.sampled_positions:
        clauses.append(f"training windows had {run.sampled_positions}")
    if found:
        clauses.append(_scope(judge, found))
    sentence = "; ".join(clauses) + "."
    return sentence[0].upper() + sentence[1:]


def _undone(run: Run) -> list[str]:
    by_state: dict[str, list[str]] = {}
    for cell in run.undone:
        name = named(cell.label) + (f" (seed {cell.seed})" if len(run.of(cell.label)) > 1 else "")
        by_state.setdefault(state(cell), []).append(name)
    return [f"{and_(names)} {state}" for state, names in by_state.items()]


def _untrained(run: Run) -> list[str]:
    return [f"{named(label)} {words}" for label in run.labels if (words := run.untrained(label))]


def _scope(judge: Judge, found: list[Finding]) -> str:
    """What the intervals cover, and what they do not."""
    things, seeds = found[0].documents, sorted({each.seeds for each in found})
    if things < 2:
        return f"there is one {judge.things.removesuffix('s')} only, so no interval could be computed"
    if seeds == [1]:
        return f"intervals are over {things} {judge.things} with one seed, so they do not cover training again"
    number = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"intervals are over {things} {judge.things} and {number} seeds"


def state(cell: CellResult) -> str:
    """How a cell ended, in words after its name."""
    if cell.status == "diverged":
        return f"diverged at step {cell.step}"
    return {"done": "is done", "failed": "failed", "not run": "was not run"}.get(cell.status, "did not finish")


# ---- the terminal ----------------------------------------------------------------------------------------------------


def table(run: Run | Path) -> Table:
    """Encodings by lengths for the terminal: values ± half the 95 % interval; green is good, red is not."""
    run = read_run(run)
    if not run.methods:
        return Table(title="measured by position only: the report shows it", title_justify="left", box=None)
    judge, lines = judge_of(run), findings(run)
    found = [each for each in lines if each.value is not None]
    over = "nothing: no encoding was measured"
    if found:
        things = count(found[0].documents, judge.things.removesuffix("s"))
        over = f"{things}, {count(max(each.seeds for each in found), 'seed')}"
    notes = [f"±  half the 95% interval over {over}"]
    made = Table(
        title=judge.title(run),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    made.add_column("encoding", min_width=min(16, max(len(label) for label in run.labels)), overflow="fold")
    for length in run.lengths:
        made.add_column(str(length), justify="right")
    if (column := judge.last_column(run)) is not None:
        made.add_column(column[0], justify="right", no_wrap=True)
        notes.append(column[1])
    for label in run.labels:
        made.add_row(*_row(run, judge, label, [each for each in lines if each.label == label]))
    made.caption = "\n".join(notes + _untrained(run) + _undone(run))
    return made


STYLES: dict[str | None, str] = {HOLDS: "green", LOST: "red", UNCLEAR: "yellow", None: ""}


def _row(run: Run, judge: Judge, label: str, lines: list[Finding]) -> list[Text]:
    cells = [Text(label)]
    for each in lines:
        cells.append(Text("-", style="dim") if each.value is None else Text(judge.short(each), STYLES[each.verdict]))
    first = run.of(label)[0]
    if first.status != "done" and all(each.value is None for each in lines):
        cells[1] = Text(first.status, "red")
    if last := judge.last_cell(run, lines):
        cells.append(Text(last, STYLES[lines[-1].verdict]))
    return cells
