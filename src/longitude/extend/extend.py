"""`extend`: decide, measure, show, write, measure, in this order, so that errors are raised before anything is written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from longitude.checkpoints.declared import of_full_attention
from longitude.checkpoints.load import Source, open_source, ropes_of
from longitude.errors import UsageError
from longitude.extend.fine_tune import Training, fine_tune
from longitude.extend.plan import ROTATED_VALUES, ExtendPlan, Target, original_length, pairs_of, plan_extension
from longitude.extend.search import SearchResult, search, windows_of
from longitude.extend.serve import FILE, page
from longitude.extend.short_contexts import MINUTES, CostMeasurement, Progress, ShortContextLoss
from longitude.extend.units import working
from longitude.extend.weights import write_checkpoint
from longitude.runs.files import place
from longitude.runs.store import Store, Unit


@dataclass
class Extension:
    """Result of `extend`.

    Attributes:
        plan: The plan of the extension.
        costs: Bits per byte before and after, at the original length; empty if it was not measured.
        training: Result of `fine_tune`.
    """

    plan: ExtendPlan
    costs: list[ShortContextLoss] = field(default_factory=list)
    training: Training | None = None


def extend(
    model: str | Path,
    out: Path | None,
    *,
    to: int,
    method: str,
    factor: float | None = None,
    base: float | None = None,
    original: int | None = None,
    text: str | None = "stdlib",
    minutes: float = MINUTES,
    budget: float = 4.0,
    seed: int = 0,
    train: Mapping[str, Any] | None = None,
    on_plan: Callable[[ExtendPlan], None] = lambda plan: None,
    on_progress: Progress = lambda what, done, total: None,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> Extension:
    """Write a checkpoint with a longer context for unmodified Transformers, and measure the cost on short contexts.

    Args:
        model: Folder of a Hugging Face checkpoint, or a name on the hub.
        out: Folder of the new checkpoint, written whole or not at all; None: only decide (a dry run).
        to: The new length in tokens.
        method: "linear", "ntk", "dynamic", "ntk-by-parts", "yarn", "longrope", "llama3", "drope", "base", or
            a registered scheme that needs no more than a factor and the original length.
        factor: The scheme's factor; by default `to` over the original length.
        base: With "base": the new rope_theta.
        original: The training length, if the configuration does not contain it.
        text: Text on which the cost is measured, and "longrope" searches: a file, a folder, "datasets:NAME" or "stdlib". None:
            measure nothing, and do not check whether the new length fits into memory.
        minutes: Approximate time for measuring the cost; if windows of the original length take longer, shorter ones are used.
        budget: With "longrope": minutes to search.
        seed: Random seed of the search.
        train: Options of `fine_tune`, its text included, to train the extended checkpoint before it is written; None: none.
        on_plan: Called with the plan before anything is written.
        on_progress: Called as on_progress(description, done, total).
        on_note: Called with a sentence for the user before the plan.

    Returns:
        The plan, the costs, and the training.

    Raises:
        ValueError: For a model that was already extended, keys that contradict each other, unreadable weights or text, or a
            class that would not rotate as intended.

    Source:
        The schemes, with their papers: lg.scaling. "drope": Gelberg et al. 2025, arXiv 2512.12167,
        https://arxiv.org/abs/2512.12167. "longrope": Ding et al. 2024, arXiv 2402.13753, https://arxiv.org/abs/2402.13753.
    """
    target = Target(to=to, method=method, factor=factor, base=base, original=original)
    source = open_source(str(model))
    original_length(source, target)  # ValueError for a model that cannot be extended comes first
    quantized = source.quantization
    if quantized is not None and (train is not None or target.searched):
        needs = "--fine-tune trains them" if train is not None else f"--method {method} searches with them"
        raise UsageError(
            source.name,
            f"plain weights, since {needs}",
            f"quantized ones ({quantized})",
            "extend the original checkpoint, or choose a method that needs config.json alone",
        )
    with nullcontext() if out is None else working(out) as store:
        cost = None
        if text is not None and store is not None and quantized is None:
            cost = CostMeasurement(source, text, store, on_progress, minutes, on_note)
        factors = _search(source, target, cost, budget, seed, on_progress, on_note) if target.searched else None
        plan = plan_extension(source, target, factors, must_fit=text is not None)
        if quantized is not None and text is not None and out is not None:
            plan.notes.append(
                f"The weights are quantized ({quantized}): they are copied unread, and nothing is measured. "
                f"`longitude check {out}` tries the model, on a machine with what transformers needs for {quantized}."
            )
        if cost is not None:
            cost.measure_original(plan.original)
        on_plan(plan)
        if store is None or out is None:
            return Extension(plan)
        return _written(plan, out, store, cost, train)


def _written(
    plan: ExtendPlan, out: Path, store: Store, cost: CostMeasurement | None, train: Mapping[str, Any] | None
) -> Extension:
    """Write the checkpoint into the folder of a unit; rename it when it is measured or trained.

    Other processes with the same command wait for the one that writes.
    """
    extension = Extension(plan)

    def write(_: int, folder: Path) -> list[ShortContextLoss]:
        aside, limit = folder / "model", plan.tokenizer_limit()
        shutil.rmtree(aside, ignore_errors=True)  # a killed process left it
        try:
            write_checkpoint(
                plan.source,
                aside,
                config=plan.config,
                tokenizer_length=limit[1] if limit else None,
                check=plan.require_written,
            )
            if train is not None:
                extension.training = fine_tune(aside, out=out, **train)
            written = aside if train is None else out
            (written / FILE).write_text(page(plan, train is not None), encoding="utf-8")
            costs = [] if cost is None else [cost.compare(written)]
            if train is None:
                place(aside, out)
            return costs
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    trained = {name: str(option) for name, option in (train or {}).items() if not callable(option)}
    inputs = {"model": str(plan.source.folder), "config": sha256(repr(plan.config).encode()).hexdigest()}
    unit = Unit("checkpoint", out.name, inputs | {"measured": cost is not None, "trained": trained})
    [extension.costs] = store.results([unit], write, list[ShortContextLoss])
    return extension


def _search(
    source: Source,
    target: Target,
    cost: CostMeasurement | None,
    budget: float,
    seed: int,
    on_progress: Progress,
    on_note: Callable[[str], None],
) -> SearchResult:
    """The factors of longrope."""
    if target.original is not None and of_full_attention(ropes_of(source)).scaling is not None:
        raise ValueError(
            f"--method {target.method}: {source.name} was extended already; search on the original checkpoint"
        )
    if (kind := source.config.model_type) in ROTATED_VALUES:
        factors = "its candidates may multiply cos and sin"
        raise ValueError(
            f"--method {target.method}: {factors}, and a {kind} model rotates its values by them; take yarn"
        )
    if cost is None:
        raise ValueError(
            f"--method {target.method} searches on text with the model: leave out --dry-run and --no-measure"
        )
    cost.require_memory(target.to)
    checkpoint = cost.load()
    pairs = pairs_of(source, original_length(source, target), target.to)
    windows = windows_of(cost.excerpts(checkpoint.tokenizer, target.to).ids, target.to)

    def searching(done: int, total: int | None, lowest: float) -> None:
        on_progress(f"searching, lowest perplexity {math.exp(min(lowest, 700)):.4g}", done, total or 0)

    return search(
        checkpoint.model,
        pairs,
        windows,
        store=cost.store,
        budget=budget,
        seed=seed,
        on_progress=searching,
        on_note=on_note,
    )
