"""Rows of measurements as tables: one per way of measuring, models down and lengths across."""

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from longitude.measure import retrieval
from longitude.measure.config import PERPLEXITY, SAME_TARGETS, with_trained
from longitude.measure.retrieval.measurement import WEIGHTING
from longitude.measure.rows import Row
from longitude.measure.run import DIFFERENCE, Results, least_context
from longitude.report import wording
from longitude.report.wording import fixed
from longitude.statistics import proportions
from longitude.statistics.documents import paired_ratio


class Cell(NamedTuple):
    """A number as it is printed, and the 95% interval under it. trained: at the length the model was trained at."""

    value: str
    interval: str = ""
    trained: bool = False


@dataclass(frozen=True)
class Table:
    """lines: [(model's label, its positions, training length, a cell per length)]."""

    title: str
    caption: str
    lengths: list[int]
    lines: list[tuple[str, str, str, list[Cell]]]


NONE = Cell(wording.NONE)
METRICS = {"bits_per_byte": ("bits per byte", ".3f"), "perplexity": ("perplexity per token", ".2f")}
"""Metric of text -> its name in a title, and the format of a value."""


def tables(results: Results) -> list[Table]:
    """All tables of a run, perplexity first."""
    made = [
        _perplexity(results, rows, method, metric)
        for method, metric in product(("non-overlapping", "sliding", SAME_TARGETS), METRICS)
        if (rows := [row for row in results.rows if (row.task, row.method, row.metric) == ("text", method, metric)])
    ]
    if changes := [row for row in results.rows if row.metric == DIFFERENCE]:
        made.append(_more_context(results, changes))
    for task in _questions(results):
        made += [_retrieval(results, task), _paired(results, task)]
    return [table for table in made if any(cell is not NONE for *_, cells in table.lines for cell in cells)]


def _questions(results: Results) -> list[str]:
    """The tasks of a run that ask questions."""
    return [task for task in results.question["configuration"]["tasks"] if task != PERPLEXITY]


def _perplexity(results: Results, rows: list[Row], method: str, metric: str) -> Table:
    stride = results.question["configuration"]["stride"]
    moved = f"Windows move by {stride} tokens" if stride else "Windows move by half their length"
    windows = "Non-overlapping windows" if method == "non-overlapping" else moved
    name, value = METRICS[metric]
    caption = f"Lower is better. {windows}; every target counts once."
    if method == SAME_TARGETS:
        caption = f"Lower is better. {_targets(rows)}, at the end of windows of each length."
    caption += "" if metric == "bits_per_byte" else " Models with different tokenizers cannot be compared by it."
    return _by_length(results, rows, f"{name}, {method}", caption, value)


def _targets(rows: list[Row]) -> str:
    count = (rows[0].position_to or 0) - (rows[0].position_from or 0)
    return f"The same last {count} tokens of {rows[0].documents} documents"


def _more_context(results: Results, rows: list[Row]) -> Table:
    """The change of the loss of the same targets with more context."""
    least = f"windows of {least_context(results.question)} tokens"
    caption = f"Difference from {least}: below zero, more context helps. {_targets(rows)}. "
    caption += "Below: its 95% interval, paired over documents."
    return _by_length(results, rows, f"bits per byte, {SAME_TARGETS}, change by more context", caption, "+.3f", "+.3f")


def _by_length(results: Results, rows: list[Row], title: str, caption: str, value: str, ends: str = ".2f") -> Table:
    """A row of each model and length."""
    lengths = sorted({row.length for row in rows if row.length})
    by_cell = {(row.label, row.length): row for row in rows}
    cells = {label: [_cell(by_cell.get((label, at)), value, ends) for at in lengths] for label in results.labels}
    return Table(title, caption, lengths, _lines(results, cells))


def _retrieval(results: Results, task: str) -> Table:
    options = results.question["configuration"]
    trained = {about["label"]: about["trained"] for about in results.question["models"].values()}
    lengths = with_trained(options["lengths"], trained.values() if options["trained"] else ())
    cells: dict[str, list[Cell]] = {}
    for label in results.labels:
        scores = _scores(results, label, task, trained[label])
        cells[label] = [scores.get(at, NONE) for at in lengths]
    about = retrieval.TASKS[task]
    over = " Means over depths." if about.depths else ""
    caption = (
        f"{about.metric.capitalize()}, higher is better: {about.summary} ({about.source}).{over} "
        "Below: Wilson's 95% interval, and the number of questions n."
    )
    return Table(task, caption, lengths, _lines(results, cells))


def _scores(results: Results, label: str, task: str, trained: int | None) -> dict[int, Cell]:
    """Length -> the score of a model in a task, over all depths, with Wilson's interval."""
    rows, cells = [row for row in results.rows if (row.label, row.task) == (label, task)], {}
    for at, mean in retrieval.scores_by_length(rows).items():
        questions = sum(row.count or 0 for row in rows if row.length == at)
        value, low, high = proportions.wilson(mean, questions)
        cells[at] = Cell(f"{value:.0%}", f"{low:.0%} to {high:.0%}, n {questions}", at == trained)
    return cells


def _paired(results: Results, task: str) -> Table:
    """Each model against the first on the questions that both answered."""
    reference, *others = results.labels
    scores: dict[str, dict[int, dict[tuple[Any, ...], float]]] = {label: {} for label in results.labels}
    for answer in results.answers:
        if answer["task"] == task:
            at_length = scores[answer["model"]].setdefault(answer["length"], {})
            at_length[answer["depth"], answer["trial"]] = answer["score"]
    lengths = sorted({*scores[reference]} & {length for label in others for length in scores[label]})
    cells = {label: [_change(scores[label].get(at, {}), scores[reference][at]) for at in lengths] for label in others}
    caption = (
        f"Difference of the scores on the same questions. Below: its 95% interval, and on how many of the questions a model "
        f"is better and worse than {reference}."
    )
    return Table(f"{task}, compared with {reference}", caption, lengths, _lines(results, cells))


def _change(ours: dict[tuple[Any, ...], float], theirs: dict[tuple[Any, ...], float]) -> Cell:
    both = [(ours[question], theirs[question]) for question in ours.keys() & theirs.keys()]
    if not both:
        return NONE
    value, low, high = proportions.paired(*zip(*both, strict=True))
    better, worse = (sum(sign * (a - b) > 0 for a, b in both) for sign in (1, -1))
    return Cell(f"{value:+.0%}", f"{low:+.0%} to {high:+.0%}, {better} and {worse} of {len(both)}")


def by_position(results: Results) -> tuple[int, dict[tuple[int, int], list[str]]] | None:
    """(the longest window, perplexity of every model by position in it); the first positions, with little context, left out."""
    rows = [row for row in results.rows if (row.method, row.metric, row.task) == ("per-position", "perplexity", "text")]
    longest = max((row.length or 0 for row in rows), default=0)
    values: dict[tuple[int, int], dict[str | None, str]] = {}
    for row in rows:
        if row.position_from is None or row.position_to is None or row.position_from < longest // 64:
            continue
        place = values.setdefault((row.position_from, row.position_to), {})
        place[row.label] = wording.NOT_FINITE if row.value is None else f"{row.value:.4g}"
    table = {place: [values[place].get(label, wording.NONE) for label in results.labels] for place in sorted(values)}
    return (longest, table) if table else None


WRONG = 2
"""Wrong answers of each model and task that the report shows."""


def wrong_answers(results: Results) -> list[dict[str, Any]]:
    """The first answers of each model and task, at the shortest length, that are not wholly right."""
    wrong: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for answer in sorted(results.answers, key=lambda answer: answer["length"]):
        if answer["score"] < 1:
            wrong.setdefault((answer["model"], answer["task"]), []).append(answer)
    return [answer for answers in wrong.values() for answer in answers[:WRONG]]


def _lines(results: Results, cells: dict[str, list[Cell]]) -> list[tuple[str, str, str, list[Cell]]]:
    return [
        (about["label"], about["positions"], str(about["trained"] or "?"), cells[about["label"]])
        for about in results.question["models"].values()
        if about["label"] in cells
    ]


def _cell(row: Row | None, value: str, ends: str) -> Cell:
    """A row in the formats of its value and its interval."""
    if row is None or row.reason is not None:
        return NONE
    interval = "" if row.low is None else f"{fixed(row.low, ends)} to {fixed(row.high, ends)}"
    return Cell(fixed(row.value, value), interval, row.value is not None and row.length == row.train_length)


# ---- sentences --------------------------------------------------------------------------------------------------------
def sentences(results: Results) -> list[str]:
    """The cost on short contexts compared with the first model; values that are missing, and why; failures."""
    return [*_costs(results), *_missing(results), *results.failures]


def _costs(results: Results) -> list[str]:
    (first, reference), *others = results.question["models"].items()
    lines = []
    sums = {
        (unit.model, unit.part.length): unit.documents
        for unit in results.measured
        if (unit.part.task, unit.part.way) == (PERPLEXITY, "non-overlapping") and unit.documents
    }
    for model, about in others:
        length = about["trained"]
        ours, theirs = (sums.get((name, length)) for name in (model, first))
        if ours is None or theirs is None or ours["bytes"] != theirs["bytes"]:
            continue  # other tokens: no pairs
        change = paired_ratio((ours["nats"], ours["bytes"]), (theirs["nats"], theirs["bytes"]))
        if change.value is None:
            continue
        amount = f"{change.value - 1:+.1%} bits per byte at {length} tokens, its training length"
        line = f"{about['label']}: {amount}, against {reference['label']}"
        if change.low is not None and change.high is not None:
            line += f" (95% interval {change.low - 1:+.1%} to {change.high - 1:+.1%}, paired over documents)"
        lines.append(line)
    return lines


def _missing(results: Results) -> list[str]:
    models = results.question["models"]
    absent: list[Any] = [
        (models[unit.model]["label"], unit.part.task, unit.part.length, unit.reason)
        for unit in results.measured
        if unit.reason
    ]
    absent += [(row.label, row.task, row.length, row.reason) for row in results.rows if row.reason is not None]
    lengths: dict[tuple[str, str, str], dict[int | None, None]] = {}
    for label, task, length, reason in absent:  # once for each depth
        lengths.setdefault((label, task, reason), {})[length] = None
    lines = [
        f"{label} has no {task} at {' '.join(map(str, which))}: {reason}"
        for (label, task, reason), which in lengths.items()
    ]
    whole = {(row.label, row.prefill) for row in results.rows if row.prefill and row.prefill.startswith("one pass:")}
    return lines + [f"{label}: windows are read in {prefill}" for label, prefill in sorted(whole, key=str)]


def effective(results: Results) -> dict[str, Any]:
    """Label -> effective length over all retrieval tasks of the run; empty if there are none."""
    with_tasks = {row.label for row in results.rows if row.weighting == WEIGHTING}
    labels = [label for label in results.labels if label in with_tasks]
    return {label: retrieval.effective_length(row for row in results.rows if row.label == label) for label in labels}
