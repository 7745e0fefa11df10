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

from longitude.extend import cost as costs
from longitude.extend.config import ExtendConfig
from longitude.extend.keys import ropes_of
from longitude.extend.layout import Parity, layout_changes, parity
from longitude.extend.methods import everywhere
from longitude.extend.plan import Plan, original_length, plan
from longitude.extend.search import Found, search
from longitude.extend.source import Source, kind_of, open_source
from longitude.extend.weights import Change, size_of, tokenizer_limit, write_weights
from longitude.extend.write import first_process, new_folder, read_json, write_json
from longitude.measure.checkpoint import Checkpoint, load, tokenizer_of
from longitude.measure.files import require_space
from longitude.measure.sources import Text, read_text
from longitude.measure.text import DocumentLosses

if TYPE_CHECKING:
    from longitude.extend.fine_tune import Tuned  # loads the Trainer

SEARCH = "longrope_search.json"
"""What a search tells, beside the checkpoint: both lists of factors, the starts, how the loss fell."""

Progress = Callable[[str, float, float], None]
"""progress(what is being done, done, total)."""


@dataclass
class Outcome:
    """plan: None where no length is asked for. tuned: what fine-tuning did. written: whether there is a new checkpoint."""

    plan: Plan | None = None
    tuned: Tuned | None = None
    costs: list[costs.Cost] = field(default_factory=list)
    parity: Parity | None = None
    written: bool = False


def run(
    model: str,
    config: ExtendConfig,
    out: Path | None,
    say: Callable[[Plan], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """All of it; say hears of the plan before anything is written. `out` is None only in a dry run. Where `accelerate launch`
    started several processes, the first does all, and the others only train."""
    source = open_source(model, config.allow_pickle)
    written = None if config.dry_run else out
    if config.convert_layout is not None:
        return _convert(source, config.convert_layout, written)
    if config.fine_tune is not None and not first_process():
        together()
        fine_tuned(source, config, out, progress)
        return Outcome()
    if config.to is not None:
        kind_of(source)  # the first thing to say of a model that cannot be extended
    text = None
    if config.fine_tune is not None or not (config.no_measure or config.dry_run):
        require_tokenizer(source)
    measured = not (config.no_measure or config.dry_run)
    if measured:
        text = read_text(config.text, "--text")
        costs.require_memory(source, source.declared or 1)
    outcome = Outcome()
    if config.to is not None:
        outcome.plan = _planned(source, config, out, text, progress)
        say(outcome.plan)
        if outcome.plan.nothing and config.fine_tune is not None:
            raise ValueError(f"--fine-tune: nothing of {model} is extended; there is no new checkpoint to train")
        if written is not None and not outcome.plan.nothing:
            write(source, written if config.fine_tune is None else staged(written), outcome.plan.changes, outcome.plan)
            outcome.written = True
    if config.fine_tune is not None and written is not None:
        together()
        outcome.tuned = fine_tuned(source, config, written, progress)
        outcome.written = True
    if outcome.written and out is not None:
        shutil.rmtree(search_folder(out), ignore_errors=True)
    if text is not None and source.causal:
        original = outcome.plan.original if outcome.plan else source.declared or 1
        lengths = sorted({original, config.to or original}) if outcome.plan and outcome.plan.nothing else [original]
        outcome.costs = measure(source, lengths, out if outcome.written else None, text, progress)
    return outcome


def _planned(source: Source, config: ExtendConfig, out: Path | None, text: Text | None, progress: Progress) -> Plan:
    found = _searched(source, config, out, text, progress) if config.method == "longrope" else None
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


def write(source: Source, out: Path, changes: dict[str, Change], made: Plan | None = None) -> None:
    """The checkpoint into `out`, whole or not at all; made: None where the configuration stays as it is."""
    require_space(out.absolute().parent, size_of(source), "the checkpoint")
    with new_folder(out) as beside:
        write_weights(source, beside, changes)
        if made is not None and made.search is not None:
            shutil.copyfile(search_folder(out) / "search.json", beside / SEARCH)
        if made is None or not made.difference():
            shutil.copyfile(source.folder / "config.json", beside / "config.json")
            return
        write_json(beside / "config.json", made.after)
        if limit := tokenizer_limit(source, made.original, made.length):
            path = beside / "tokenizer_config.json"
            write_json(path, read_json(path) | {"model_max_length": limit[1]})


def measure(source: Source, lengths: list[int], out: Path | None, text: Text, progress: Progress) -> list[costs.Cost]:
    """At each length, the model before and the checkpoint in `out`; the model alone where nothing was written. One model is
    in memory at a time."""
    before = costs.loaded(source)
    documents = {length: costs.documents_for(text, before.tokenizer, length) for length in lengths}

    def losses(checkpoint: Checkpoint, what: str) -> list[DocumentLosses]:
        found = []
        for length in lengths:
            if out is None and hasattr(checkpoint.config, "max_seq_len"):  # MPT's biases are made for so many positions
                checkpoint.model.config.max_seq_len = max(length, checkpoint.config.max_seq_len)
            bar = partial(progress, f"measuring {what}")
            found.append(costs.losses_of(checkpoint, documents[length], length, bar))
        return found

    first = losses(before, "the original")
    del before
    second = [None for _ in lengths] if out is None else losses(load(out, device=costs.device()), "the new one")
    return [costs.cost_of(*each, text) for each in zip(first, second, lengths, strict=True)]


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
        if first_process():
            shutil.rmtree(staged(out), ignore_errors=True)


def _convert(source: Source, to: str, out: Path | None) -> Outcome:
    changes = layout_changes(source, to)
    outcome = Outcome(parity=parity(source, changes, to))
    if out is not None:
        write(source, out, changes)
        outcome.written = True
    return outcome


def _searched(
    source: Source, config: ExtendConfig, out: Path | None, text: Text | None, progress: Progress
) -> Found | None:
    """What the search finds; None where the length stays, or nothing turns, as the plan will say."""
    if kind_of(source) != "rotary":
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
    checkpoint = costs.loaded(source)
    documents = costs.documents_for(text, checkpoint.tokenizer, length)

    def told(done: int, total: int | None, lowest: float) -> None:
        progress(f"searching, lowest perplexity {math.exp(lowest):.4g}", done, total or 0)

    return search(
        checkpoint.model,
        documents.ids,
        length=length,
        original_length=original,
        state=search_folder(out),
        budget=config.budget,
        seed=config.seed,
        progress=told,
    )


def search_folder(out: Path) -> Path:
    """Where a search keeps what it tried, so that the same command goes on after a kill; it goes when `out` is written."""
    return out.with_name(f".{out.name}.search")
