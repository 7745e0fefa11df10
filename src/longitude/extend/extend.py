"""`longitude extend`: decide, show, write, measure, in this order, so that what is wrong shows before anything is written."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longitude.checkpoints.keys import ropes_of
from longitude.checkpoints.load import Checkpoint, tokenizer_of
from longitude.checkpoints.source import Source, open_source
from longitude.extend import cost as costs
from longitude.extend.config import ExtendConfig
from longitude.extend.layout import Parity, layout_changes, parity
from longitude.extend.methods import everywhere
from longitude.extend.plan import ExtendPlan, original_length, plan
from longitude.extend.search import Found, search
from longitude.extend.weights import Change, size_of, tokenizer_limit, write_weights
from longitude.measure.documents import Documents
from longitude.measure.sources import Text, read_text
from longitude.measure.text import DocumentLosses
from longitude.runs.files import is_first_process, new_folder, read_json, require_space, write_json

if TYPE_CHECKING:
    from longitude.extend.fine_tune import Tuned  # loads the Trainer

SEARCH = "longrope_search.json"
"""What a search tells, beside the checkpoint: both lists of factors, the starts, how the loss fell."""

Progress = Callable[[str, float, float], None]
"""progress(what is being done, done, total)."""
Note = Callable[[str], None]
"""Hears a sentence that cannot wait for the plan."""


@dataclass
class Outcome:
    """plan: None where no length is asked for. tuned: what fine-tuning did. written: whether there is a new checkpoint."""

    plan: ExtendPlan | None = None
    tuned: Tuned | None = None
    costs: list[costs.Cost] = field(default_factory=list)
    parity: Parity | None = None
    written: bool = False


def run(
    model: str,
    config: ExtendConfig,
    out: Path | None,
    say: Callable[[ExtendPlan], None] = lambda _: None,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> Outcome:
    """All of it; say hears of the plan before anything is written. `out` is None only in a dry run. Where `accelerate launch`
    started several processes, the first does all, and the others only train.
    """
    source = open_source(model, config.allow_pickle)
    written = None if config.dry_run else out
    if config.convert_layout is not None:
        return _convert(source, config.convert_layout, written)
    if config.fine_tune is not None and not is_first_process():
        together()
        fine_tuned(source, config, out, progress)
        return Outcome()
    if config.to is not None:
        _ = source.kind  # the first thing to say of a model that cannot be extended
    text = None
    if config.fine_tune is not None or not (config.no_measure or config.dry_run):
        require_tokenizer(source)
    measured = not (config.no_measure or config.dry_run)
    if measured:
        text = read_text(config.text, "--text")
        costs.require_memory(source, source.declared or 1)
    outcome = Outcome()
    original = source.declared or 1
    if config.to is not None:
        outcome.plan = _planned(source, config, out, text, progress, note)
        original = outcome.plan.original
        if outcome.plan.nothing and config.fine_tune is not None:
            raise ValueError(f"--fine-tune: nothing of {model} is extended; there is no new checkpoint to train")
    before = None
    if text is not None and source.causal:
        longer = config.to if outcome.plan is not None and outcome.plan.nothing else None
        before = measure(source, sorted({original, longer or original}), text, progress)
    if outcome.plan is not None:
        say(outcome.plan)
        if written is not None and not outcome.plan.nothing:
            write(source, written if config.fine_tune is None else staged(written), outcome.plan.changes, outcome.plan)
            outcome.written = True
    if config.fine_tune is not None and written is not None:
        together()
        outcome.tuned = fine_tuned(source, config, written, progress)
        outcome.written = True
    if outcome.written and out is not None:
        shutil.rmtree(search_folder(out), ignore_errors=True)
    if text is not None and before is not None:
        outcome.costs = compared(before, out if outcome.written else None, text, progress)
    return outcome


def _planned(
    source: Source, config: ExtendConfig, out: Path | None, text: Text | None, progress: Progress, note: Note
) -> ExtendPlan:
    found = _searched(source, config, out, text, progress, note) if config.method == "longrope" else None
    made = plan(source, config, found and found.scheme)
    made.search = found
    if found is not None and found.note:
        made.notes.append(found.note)
    if text is not None and not source.causal:
        made.notes.append("The model does not predict next tokens, so what short texts pay is not measured.")
    return made


def require_tokenizer(source: Source) -> None:
    """ValueError where there is none: the measured cost needs it, and nothing else does."""
    try:
        tokenizer_of(source.folder, source.config)
    except ValueError as error:
        raise ValueError(f"{error}; or leave out the measured cost, which alone needs it, with --no-measure") from error


def write(source: Source, out: Path, changes: dict[str, Change], made: ExtendPlan | None = None) -> None:
    """The checkpoint into `out`, whole or not at all; made: None where the configuration stays as it is."""
    require_space(out.absolute().parent, size_of(source), "the checkpoint")
    with new_folder(out) as beside:
        write_weights(source, beside, changes)
        if made is not None and made.search is not None:
            shutil.copyfile(search_folder(out) / "search.json", beside / SEARCH)
        if made is None or not made.difference():
            shutil.copyfile(source.folder / "config.json", beside / "config.json")
            return
        write_json(beside / "config.json", made.after, allow_nan=True)
        if limit := tokenizer_limit(source, made.original, made.length):
            path = beside / "tokenizer_config.json"
            write_json(path, read_json(path) | {"model_max_length": limit[1]}, allow_nan=True)


@dataclass(frozen=True)
class Measured:
    """The original on a text: documents and losses by length."""

    documents: dict[int, Documents]
    losses: dict[int, DocumentLosses]


def measure(source: Source, lengths: list[int], text: Text, progress: Progress) -> Measured:
    """The original, before anything is written. ValueError for a text that is too short, a model that cannot be loaded or
    whose losses are no numbers.
    """
    checkpoint = costs.loaded(source.folder, source.pickled)
    documents = {length: costs.documents_for(text, checkpoint.tokenizer, length) for length in lengths}
    losses = _losses(checkpoint, documents, partial(progress, "measuring the original"))
    if not np.isfinite(losses[lengths[0]].nats).all():
        raise ValueError(
            f"{source.name}: its losses on {text.source} are not finite at {lengths[0]} tokens, before anything is extended; "
            f"look for NaN or overflow in its weights"
        )
    return Measured(documents, losses)


def compared(before: Measured, out: Path | None, text: Text, progress: Progress) -> list[costs.Cost]:
    """The original beside the checkpoint in `out`, or alone where nothing was written. One model is in memory at a time."""
    after: dict[int, DocumentLosses] = {}
    if out is not None:
        after = _losses(costs.loaded(out), before.documents, partial(progress, "measuring the new one"))
    return [costs.cost_of(found, after.get(length), length, text) for length, found in before.losses.items()]


def _losses(
    checkpoint: Checkpoint, documents: dict[int, Documents], bar: Callable[[float, float], None]
) -> dict[int, DocumentLosses]:
    found = {}
    for length, read in documents.items():
        if hasattr(checkpoint.config, "max_seq_len"):  # MPT's biases are made for so many positions
            checkpoint.model.config.max_seq_len = max(length, checkpoint.config.max_seq_len)
        found[length] = costs.losses_of(checkpoint, read, length, bar)
    return found


# ---- fine-tuning, on one process or many -----------------------------------------------------------------------------
def together() -> None:
    """Waits for the other processes, where there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState(cpu=costs.device() == "cpu").wait_for_everyone()


def staged(out: Path) -> Path:
    """Where the extended checkpoint stands until it is trained."""
    return out.with_name(f".{out.name}.extended")


def fine_tuned(source: Source, config: ExtendConfig, out: Path | None, progress: Progress) -> Tuned:
    from longitude.extend.fine_tune import fine_tune

    assert out is not None and config.fine_tune is not None and config.steps is not None
    directory = source.folder if config.to is None else staged(out)

    def told(step: int, steps: int, loss: float) -> None:
        progress(f"training, perplexity {math.exp(min(loss, 700)):.4g}", step, steps)

    try:
        return fine_tune(
            directory,
            config.fine_tune,
            steps=config.steps,
            out=out,
            length=config.window,
            learning_rate=config.learning_rate,
            batch=config.batch,
            lora=config.lora,
            positions=config.positions,
            seed=config.seed,
            gradient_checkpointing=config.gradient_checkpointing,
            progress=told,
        )
    finally:
        if is_first_process():
            shutil.rmtree(staged(out), ignore_errors=True)


def _convert(source: Source, to: str, out: Path | None) -> Outcome:
    changes = layout_changes(source, to)
    outcome = Outcome(parity=parity(source, changes, to))
    if out is not None:
        write(source, out, changes)
        outcome.written = True
    return outcome


def _searched(
    source: Source, config: ExtendConfig, out: Path | None, text: Text | None, progress: Progress, note: Note
) -> Found | None:
    """What the search finds; None where the length stays, or nothing turns, as the plan will say."""
    if source.kind != "rotary":
        return None
    original = original_length(source, config, "rotary")
    length = config.to or 0
    if length <= original:
        return None
    if config.original is not None and everywhere(ropes_of(source)).scaling is not None:
        raise ValueError(f"--method longrope: {source.name} was extended already; search on the original checkpoint")
    if text is None or out is None:
        raise ValueError(
            "--method longrope searches on text, which takes a model: leave out --dry-run and --no-measure"
        )
    costs.require_memory(source, length)
    checkpoint = costs.loaded(source.folder, source.pickled)
    documents = costs.documents_for(text, checkpoint.tokenizer, length)

    def told(done: int, total: int | None, lowest: float) -> None:
        progress(f"searching, lowest perplexity {math.exp(min(lowest, 700)):.4g}", done, total or 0)

    return search(
        checkpoint.model,
        documents.ids,
        length=length,
        original_length=original,
        state=search_folder(out),
        budget=config.budget,
        seed=config.seed,
        progress=told,
        note=note,
    )


def search_folder(out: Path) -> Path:
    """Where a search keeps what it tried, so that the same command goes on after a kill; it goes when `out` is written."""
    return out.with_name(f".{out.name}.search")
