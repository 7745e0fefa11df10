"""`extend --method all`: the model, loaded once, rotates by one method after the other, and its loss is compared by position."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from longitude.checkpoints.load import Source, open_source
from longitude.errors import UsageError
from longitude.extend.factors import rotating_with
from longitude.extend.plan import Target, original_length, plan_extension
from longitude.extend.short_contexts import (
    FEWEST,
    MINUTES,
    CostMeasurement,
    Progress,
    Sample,
    Sums,
    inputs_of,
)
from longitude.measure.documents import bos_of, documents_of
from longitude.positions.scaling.base import METHODS, SCHEMES
from longitude.runs.store import Store, Unit
from longitude.statistics.documents import Interval, interval, paired_difference

UNCHANGED = "unchanged"
MOST = 3
"""Approximate number of buckets of positions beyond the training length."""


def compared() -> list[str]:
    """Methods that need no search, no training and no additional option."""
    SCHEMES.load()
    alone = (method for method in METHODS.values() if not method.searched and not method.needs_training)
    return [method.name for method in alone if method.extends]


@dataclass(frozen=True)
class Candidates:
    """The methods that are compared on a checkpoint.

    Attributes:
        source: The checkpoint.
        original: The training length in tokens; for a checkpoint that was extended already, the length that it declares.
        length: The new length.
        options: Options to add to the command that extends the checkpoint by one of them.
        configs: Method -> the configuration that it writes, or the reason why it does not fit the model.
    """

    source: Source
    original: int
    length: int
    options: list[str]
    configs: dict[str, PreTrainedConfig | str]

    @property
    def fitting(self) -> dict[str, PreTrainedConfig]:
        """Configurations of the methods that fit the model, and its own."""
        fitting = {name: config for name, config in self.configs.items() if isinstance(config, PreTrainedConfig)}
        return {UNCHANGED: self.source.config} | fitting

    @property
    def edges(self) -> list[int]:
        """Positions at which buckets begin, and the length: a few up to the training length, and a few beyond it, by doubling."""
        doubled = [self.original << i for i in range(1, 25) if self.original << i < self.length]
        beyond = doubled[:: -math.ceil(len(doubled) / (MOST - 1))] if doubled else [(self.original + self.length) // 2]
        return sorted({0, self.original // 4, self.original // 2, self.original, *beyond, self.length})


@dataclass(frozen=True)
class Comparison:
    """Losses of methods by position, on the same windows.

    Attributes:
        candidates: The methods.
        profiles: Method -> its losses in each bucket of positions, of the methods that fit the model.
        text: Description of the text.
    """

    candidates: Candidates
    profiles: dict[str, list[Sums]]
    text: str

    @cached_property
    def perplexities(self) -> dict[str, list[Interval]]:
        """Method -> perplexity per token in each bucket, with 95% intervals over windows."""
        return {
            name: [self._told(interval(*_per_token(sums), metric="perplexity")) for sums in buckets]
            for name, buckets in self.profiles.items()
        }

    def _told(self, whole: Interval) -> Interval:
        """The interval, or only its value if there are too few windows to resample."""
        return whole if self.windows >= FEWEST else Interval(whole.value, None, None)

    @property
    def best(self) -> list[str | None]:
        """The method with the lowest perplexity in each bucket."""
        columns = [{name: row[i].value for name, row in self.perplexities.items()} for i in range(len(self.sizes))]
        finite = [{name: value for name, value in column.items() if value is not None} for column in columns]
        return [min(column, key=column.__getitem__, default=None) for column in finite]

    @property
    def sizes(self) -> list[int]:
        """Tokens scored in each bucket."""
        return [sum(sums.tokens) for sums in self.profiles[UNCHANGED]]

    @property
    def windows(self) -> int:
        return len(self.profiles[UNCHANGED][0].nats)

    @cached_property
    def beyond(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Method -> nats and tokens of each window beyond the training length, lowest first; only methods with finite nats."""
        first = self.candidates.edges.index(self.candidates.original)
        sums = {
            name: tuple(np.sum([_per_token(bucket) for bucket in buckets[first:]], axis=0))
            for name, buckets in self.profiles.items()
        }
        finite = {name: (nats, tokens) for name, (nats, tokens) in sums.items() if np.isfinite(nats).all()}
        return dict(sorted(finite.items(), key=lambda item: item[1][0].sum()))

    @cached_property
    def against_best(self) -> dict[str, Interval]:
        """Method -> its perplexity beyond the training length, divided by that of the best, paired over windows."""
        best, *others = self.beyond or [UNCHANGED]
        ratios = {}
        for name in others:
            logs = self._told(paired_difference(self.beyond[name], self.beyond[best], metric="mean"))
            ratios[name] = Interval(*(None if log is None else _exp(log) for log in logs))
        return ratios

    @property
    def undecided(self) -> list[str]:
        """The best method and those that may be as good: their interval has 1, or is unknown; empty if there are none."""
        alike = [name for name, ratio in self.against_best.items() if ratio.low is None or ratio.low <= 1]
        return [next(iter(self.beyond)), *alike] if alike else []

    @property
    def recommendation(self) -> str:
        """The recommendation as a sentence, with its numbers."""
        where = f"beyond {self.candidates.original} tokens"
        if len(self.beyond) < 2:
            why = f"no two have finite losses {where}" if len(self.profiles) > 1 else "none fits the model"
            return f"No method is recommended: {why}."
        best, second = list(self.beyond)[:2]
        nats, tokens = self.beyond[best]
        windows = f"{len(nats)} window{'s' * (len(nats) != 1)}"
        rests = f"paired over {windows} with {int(tokens.sum()):,} tokens there"
        ratio = self.against_best[second]
        between = "" if ratio.low is None else f"95% interval {ratio.low:.3f} to {ratio.high:.3f}, "
        lowest = f"the lowest perplexity {where}, {_exp(nats.sum() / tokens.sum()):.4g}"
        times = f"{second} has {ratio.value:.3f} times that ({between}{rests})"
        if self.windows < FEWEST:
            few = f"an interval needs {FEWEST} windows or more (give more --cost-minutes)"
            return f"Undecided, because {few}: {best} has {lowest}, and {times}."
        if self.undecided:
            names = f"{', '.join(self.undecided[:-1])} and {self.undecided[-1]}"
            return f"Undecided between {names}: {best} has {lowest}, and {times}."
        return f"Recommended: {best}, which has {lowest}; the next, {times}."

    @property
    def command(self) -> str | None:
        """The command that writes the best extended checkpoint; None if no method fits."""
        writing = next((name for name in self.beyond if name != UNCHANGED), None)
        if writing is None:
            return None
        to = ["--method", writing, "--to", str(self.candidates.length)]
        return shlex.join(["longitude", "extend", self.candidates.source.name, *to, *self.candidates.options])


def candidates(model: str | Path, to: int, factor: float | None = None, original: int | None = None) -> Candidates:
    """The methods for a checkpoint, decided without its weights. ValueError for a model that no method could extend."""
    source = open_source(str(model))
    got = source.quantization or source.kind
    if got != "rotary":
        raise UsageError("--method all", "a model with rotary positions and plain weights", f"{source.name}, {got}")
    targets = {name: Target(to=to, method=name, factor=factor, original=original) for name in compared()}
    try:
        trained = original_length(source, next(iter(targets.values())))
    except ValueError:
        if source.declared is None:
            raise
        trained = source.declared  # extended already: a reason in each row
    if to <= trained:
        raise UsageError("--method all", f"--to beyond {trained}, the length that {source.name} was trained at", to)
    configs: dict[str, PreTrainedConfig | str] = {}
    for name, target in targets.items():
        try:
            plan = plan_extension(source, target, must_fit=False)
            configs[name] = plan.read_config().get_text_config(decoder=True)
        except ValueError as error:
            configs[name] = str(error)
    numbers = {"--factor": factor, "--original": original}
    options = [word for name, value in numbers.items() if value is not None for word in (name, f"{value:g}")]
    return Candidates(source, trained, to, options, configs)


def too_slow(chosen: Candidates, sample: Sample, minutes: float) -> UsageError | None:
    """The error if one window takes longer than `minutes`, with the minutes that are enough; None if it does not."""
    if sample.seconds is None or sample.seconds <= 60 * minutes:
        return None
    needed, several = (math.ceil(n * sample.seconds / 6) / 10 for n in (1, FEWEST))
    what = f"one window of {chosen.length} tokens by {len(chosen.fitting)} methods takes about {needed} minutes here"
    enough = f"{FEWEST}, from which intervals are made, {several}"
    return UsageError("--cost-minutes", f"{needed} or more", f"{minutes:g}", f"{what}, and {enough}")


def compare(
    chosen: Candidates,
    store: Store,
    *,
    text: str = "stdlib",
    minutes: float = MINUTES,
    on_progress: Progress = lambda what, done, total: None,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> Comparison:
    """Losses by position of every method on the same windows of the new length. Nothing is written except to the store.

    Each window is the start of another document, read whole. The losses of a method are those of the checkpoint that it writes.

    Args:
        chosen: Result of `candidates`.
        store: Stores the losses of each method, so that the same call continues.
        text: A file, a folder, "datasets:NAME" or "stdlib".
        minutes: Approximate time for all methods.
        on_progress: Called as on_progress(description, done, total).
        on_note: Called with a sentence on the time that it takes, before any window is read.

    Raises:
        ValueError: For a text that is too short, more memory than is free, fewer minutes than a few windows take, and a model
            whose losses are not finite.
    """
    cost = CostMeasurement(chosen.source, text, store, on_progress, minutes, on_note)
    on_progress("timing a few layers", 0, 0)
    length, configs = chosen.length, chosen.fitting
    sample = cost.sample(length, minutes, models=len(configs), shortest=length, fewest=1)
    if refused := too_slow(chosen, sample, minutes):
        raise refused
    cost.require_memory(length)
    takes = "" if sample.seconds is None else f", about {sample.seconds:.0f} s"
    most = sample.tokens // length
    on_note(f"measuring: {most} windows of {length} tokens, each by {len(configs)} methods{takes}")
    checkpoint = cost.load()
    documents = documents_of(cost.text, checkpoint.tokenizer, length, most)

    def measured(i: int, _: Path) -> list[Sums]:
        name, config = list(configs.items())[i]
        how: Any = {"methods": ["per-position"], "bins": chosen.edges}
        with rotating_with(checkpoint.model, config):
            losses = cost.losses(checkpoint, documents, length, f"measuring {name}", **how)
        buckets = [Sums.of(bucket) for bucket in losses]
        if name == UNCHANGED:
            cost.require_finite(buckets[0], length)
        return buckets

    bos = bos_of(checkpoint.tokenizer, "tokenizer")
    inputs = {"bos": bos, "text": documents.digest, "edges": chosen.edges}
    units = [Unit("positions", name, inputs_of(checkpoint, config) | inputs) for name, config in configs.items()]
    profiles = store.results(units, measured, list[Sums])
    return Comparison(chosen, dict(zip(configs, profiles, strict=True)), cost.text.source)


def _per_token(sums: Sums) -> tuple[np.ndarray, np.ndarray]:
    return np.array(sums.nats, dtype=float), np.array(sums.tokens)


def _exp(nats: float) -> float:
    return math.exp(min(nats, 700.0))
