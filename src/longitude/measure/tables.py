"""What rows of measurements say side by side: a table per way of measuring, models down and lengths across."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from longitude.measure import retrieval
from longitude.measure.config import PERPLEXITY, with_trained
from longitude.measure.intervals import paired_ratio
from longitude.measure.retrieval.summary import WEIGHTING
from longitude.measure.rows import Row
from longitude.measure.run import Results


class Cell(NamedTuple):
    """A number as the reader sees it, and the 95 % interval under it. trained: at the length the model was trained at."""

    value: str
    interval: str = ""
    trained: bool = False


@dataclass(frozen=True)
class Table:
    """lines: [(model's label, its positions, trained length, a cell per length and per extra column)]."""

    title: str
    caption: str
    lengths: list[int]
    extra: list[str]
    lines: list[tuple[str, str, str, list[Cell]]]


NONE = Cell("–")


def tables(results: Results) -> list[Table]:
    """All tables of a run, perplexity first."""
    tasks = results.about["configuration"]["tasks"]
    made = [_perplexity(results, method) for method in ("non-overlapping", "sliding")] if PERPLEXITY in tasks else []
    made += [_retrieval(results, task) for task in tasks if task != PERPLEXITY]
    return [table for table in made if any(cell is not NONE for *_, cells in table.lines for cell in cells)]


def _perplexity(results: Results, method: str) -> Table:
    rows = [row for row in results.rows if row.task == "text" and row.method == method]
    laid = "laid end to end" if method == "non-overlapping" else _moving(results)
    return _table(
        results, rows, f"bits per byte, {method}", f"Lower is better. Windows {laid}; every target counts once.", 3
    )


def _moving(results: Results) -> str:
    stride = results.about["configuration"]["stride"]
    return f"move by {stride} tokens" if stride else "move by half their length"


def _table(results: Results, rows: list[Row], title: str, caption: str, digits: int) -> Table:
    lengths = sorted({row.length for row in rows if row.length})
    by_place = {(row.label, row.length): row for row in rows}
    lines = []
    for about in results.about["models"].values():
        cells = [_cell(by_place.get((about["label"], length)), digits) for length in lengths]
        lines.append((about["label"], about["positions"], str(about["trained"] or "?"), cells))
    return Table(title, caption, lengths, [], lines)


def _cell(row: Row | None, digits: int) -> Cell:
    if row is None:
        return NONE
    if row.value is None:
        return NONE if row.truncation and row.truncation.startswith("not asked") else Cell("not finite")
    interval = "" if row.low is None else f"{row.low:.2f} to {row.high:.2f}"
    return Cell(f"{row.value:.{digits}f}", interval, row.length == row.train_length)


def _retrieval(results: Results, task: str) -> Table:
    rows = [row for row in results.rows if row.task == task]
    lengths = with_trained(
        results.about["configuration"]["lengths"], [about["trained"] for about in results.about["models"].values()]
    )
    depths = any(retrieval.depth_of(row) is not None for row in rows)
    lines = []
    for about in results.about["models"].values():
        own = [row for row in rows if row.label == about["label"]]
        scores = retrieval.scores_by_length(own)
        single = {row.length: row for row in own}
        cells = [
            NONE if length not in scores
            else Cell(f"{scores[length]:.0%}", trained=length == about["trained"]) if depths
            else _percent(single[length])
            for length in lengths
        ]  # fmt: skip
        effective = retrieval.effective_length(own)
        cells.append(Cell(str(effective) if effective else "none") if scores else NONE)
        lines.append((about["label"], about["positions"], str(about["trained"] or "?"), cells))
    chosen = retrieval.TASKS[task]
    caption = f"{chosen.metric.capitalize()}, higher is better: {chosen.summary} ({chosen.source})."
    return Table(task, caption + (" Means over depths." if depths else ""), lengths, ["effective length"], lines)


def _percent(row: Row) -> Cell:
    if row.value is None:
        return NONE
    interval = "" if row.low is None or row.high is None else f"{row.low:.0%} to {row.high:.0%}"
    return Cell(f"{row.value:.0%}", interval, row.length == row.train_length)


# ---- sentences --------------------------------------------------------------------------------------------------------


def sentences(results: Results) -> list[str]:
    """What short context costs beside the first model; what is not in the tables, and why; what failed."""
    return [*_costs(results), *_missing(results), *results.failures]


def _costs(results: Results) -> list[str]:
    models = list(results.about["models"].items())
    said = []
    first, reference = models[0]
    for model, about in models[1:]:
        length = about["trained"]
        key = "perplexity {} non-overlapping {}"
        ours, theirs = (results.documents.get(key.format(length, name)) for name in (model, first))
        if ours is None or theirs is None or ours["bytes"] != theirs["bytes"]:
            continue  # other tokens: no pairs
        change = paired_ratio((ours["nats"], ours["bytes"]), (theirs["nats"], theirs["bytes"]))
        if change.value is None:
            continue
        words = (
            f"{about['label']}: {change.value - 1:+.1%} bits per byte at {length} tokens, its trained length, against "
        )
        words += reference["label"]
        if change.low is not None and change.high is not None:
            words += f" (95 % interval {change.low - 1:+.1%} to {change.high - 1:+.1%}, paired over documents)"
        said.append(words)
    return said


def _missing(results: Results) -> list[str]:
    models = results.about["models"]
    absent = [(models[unit.model]["label"], unit.task, unit.length, reason) for unit, reason in results.absent]
    absent += [
        (row.label, row.task, row.length, row.truncation)
        for row in results.rows
        if row.value is None and row.truncation and row.truncation.startswith("not asked")
    ]
    reasons: dict[tuple[str | None, str, str], tuple[str, list[int | None]]] = {}
    for label, task, length, reason in absent:  # the first of those that differ in numbers alone, by depth or length
        kind = (label, task, re.sub(r"\d+", "", reason))
        reasons.setdefault(kind, (reason, []))[1].append(length)
    said = [
        f"{label} has no {task} at {' '.join(map(str, dict.fromkeys(lengths)))}: {reason}"
        for (label, task, _), (reason, lengths) in reasons.items()
    ]
    longest = results.about["configuration"]["lengths"][-1]
    for about in models.values():
        trained = about["trained"]
        if trained is None:
            said.append(f"{about['label']}: its config.json does not say at which length it was trained")
        elif trained > longest:
            said.append(f"{about['label']} was trained at {trained}: all of these lengths are short context to it")
    whole = {(row.label, row.prefill) for row in results.rows if row.prefill and row.prefill.startswith("one pass:")}
    said += [f"{label}: windows are read in {prefill}" for label, prefill in sorted(whole, key=str)]
    bos = [about["label"] for about in models.values() if about.get("adds_bos")]
    if bos and any(row.task == "text" for row in results.rows):
        said.append(f"no token begins a window of text; the tokenizer of {' '.join(bos)} would put one before a prompt")
    return said


def effective(results: Results) -> dict[str, Any]:
    """Label -> effective length over all retrieval tasks of the run; empty where there are none."""
    asked = {row.label for row in results.rows if row.weighting == WEIGHTING}
    labels = [label for label in results.labels if label in asked]
    return {label: retrieval.effective_length(row for row in results.rows if row.label == label) for label in labels}
