"""The cost on short contexts: a model before and after, on the same windows of the original length, over the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from longitude.checkpoints.load import Checkpoint, Source, load, tokenizer_of
from longitude.checkpoints.positions import last_position
from longitude.extend.units import SAMPLE, digest_of_weights
from longitude.measure.documents import Documents, bos_of, documents_of
from longitude.measure.sources import read_text
from longitude.measure.text import DocumentLosses, losses_by_length
from longitude.measure.windows import Bounded, memory_to_read
from longitude.runs.costs import flops_per_second, forward_flops
from longitude.runs.machine import available_memory, device_of, require_memory
from longitude.runs.quiet import quiet
from longitude.runs.store import Store, Unit
from longitude.statistics.documents import Interval, interval, paired_difference

TOKENS, DOCUMENTS, FEWEST = 65_536, 32, 4
"""Approximate maximum of scored tokens, maximum of documents, and minimum of windows."""
SHORTEST = 64
"""Windows of this many tokens or fewer are not shortened to save time."""
TIMED = 256
"""Tokens of the window by which this machine is timed."""
MINUTES = 1.0
"""Approximate minutes for measuring both models."""
BATCH = 4096
"""Tokens read at once, or one window if that is longer."""
WITHOUT = "leave out the measured cost with --no-measure"

Progress = Callable[[str, float, float], None]
"""on_progress(what is being done, done, total)."""


@dataclass(frozen=True)
class ShortContextLoss:
    """Bits per byte at one length, with 95% intervals over documents.

    Attributes:
        length: Window length in tokens.
        before: Result of the original model.
        after: Result of the extended model.
        difference: after - before, paired over documents.
        documents: Number of scored documents.
        tokens: Number of scored tokens.
        text: Description of the text.
    """

    length: int
    before: Interval
    after: Interval
    difference: Interval
    documents: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Sample:
    """Sample of a text that two models score.

    Attributes:
        length: Window length in tokens.
        tokens: Total number of tokens.
        seconds: Estimated time of all models on this machine; None if the class cannot be timed.
    """

    length: int
    tokens: int
    seconds: float | None


@dataclass(frozen=True)
class Sums:
    """The result of a unit, a number for each document: nats (None if they are not finite), bytes and tokens."""

    nats: list[float | None]
    bytes: list[int]
    tokens: list[int]

    @classmethod
    def of(cls, losses: DocumentLosses) -> Sums:
        """The sums of losses for which bytes are known."""
        nats = [nats if math.isfinite(nats) else None for nats in losses.nats.tolist()]
        return cls(nats, losses.sums[1].tolist(), losses.tokens.tolist())

    @property
    def pair(self) -> tuple[np.ndarray, np.ndarray]:
        """Nats and bytes per document, from which intervals are computed."""
        return np.array(self.nats, dtype=float), np.array(self.bytes)


def sample_within(
    source: Source, length: int, minutes: float, models: int = 2, shortest: int = SHORTEST, fewest: int = FEWEST
) -> Sample:
    """Windows of `length` tokens, or shorter ones if `fewest` of these take the models longer than `minutes`."""
    try:
        flops = forward_flops(source.skeleton)
        width = min(length, TIMED, last_position(source.skeleton) or TIMED)
        rate = flops_per_second(source.skeleton, width, dtype=source.dtype, times=2)
    except ValueError:
        length = min(length, max(shortest, TIMED))
        return Sample(length, fewest * length, None)

    def seconds(width: int) -> float:
        return models * flops.of(width) / rate

    while length > shortest and fewest * seconds(length) > 60 * minutes:
        length //= 2
    windows = max(fewest, min(TOKENS // length, int(60 * minutes / seconds(length))))
    return Sample(length, windows * length, windows * seconds(length))


def inputs_of(checkpoint: Checkpoint, config: Any) -> dict[str, Any]:
    """Inputs of a unit for a model that rotates as by a configuration."""
    digest = sha256(config.to_json_string().encode()).hexdigest()
    return {"weights": digest_of_weights(checkpoint.model), "config": digest, "device": checkpoint.model.device.type}


class CostMeasurement:
    """Measurement of a checkpoint and its extension on the same text.

    store: store of the results. minutes: approximate time for both. ValueError, before any model is loaded, if it has no
    tokenizer, or the text cannot be read.
    """

    def __init__(
        self,
        source: Source,
        text: str,
        store: Store,
        on_progress: Progress,
        minutes: float = MINUTES,
        on_note: Callable[[str], None] = lambda sentence: None,
    ):
        try:
            tokenizer_of(source.folder, source.config)
        except ValueError as error:
            raise ValueError(f"{error}; only measuring needs it: --no-measure, with one --method") from error
        self.source, self.store, self.minutes = source, store, minutes
        self.on_progress, self.on_note = on_progress, on_note
        self.text = read_text(text, "--text")

    def require_memory(self, length: int) -> None:
        """ValueError when the model with one window of `length` tokens is larger than what is free."""
        what = f"{self.source.name}: reading {length} tokens at once takes"
        needs = memory_to_read(self.source.skeleton, self.source.dtype, length, BATCH, chunk=length)
        require_memory(needs.total, available_memory(device_of().type), what, WITHOUT)

    def require_finite(self, sums: Sums, length: int) -> None:
        """ValueError unless the losses of the original model are finite."""
        if None in sums.nats:
            where = f"{self.source.name}: its losses on {self.text.source} are not finite at {length} tokens"
            raise ValueError(f"{where}, before anything is extended; look for NaN or overflow in its weights")

    def load(self, folder: Path | None = None) -> Checkpoint:
        """The model in a folder, or the original, on the device."""
        with quiet():
            return load(folder or self.source.folder, device=device_of(), images=True)

    def excerpts(self, tokenizer, length: int, tokens: int | None = None) -> Documents:
        """One or more windows of `length` tokens of each document. ValueError for a text that is too short."""
        tokens = TOKENS if tokens is None else tokens
        documents = min(DOCUMENTS, max(FEWEST, tokens // length))
        windows = max(1, tokens // (documents * length))
        with suppress(ValueError):
            return documents_of(self.text, tokenizer, windows * length, documents)
        try:
            return documents_of(self.text, tokenizer, length, documents)
        except ValueError as error:
            raise ValueError(f"{error}; or {WITHOUT}") from error

    def measure_original(self, length: int) -> None:
        """Measure the original, before anything is written, within the minutes; a note says first how long it takes.

        ValueError for a text that is too short, more memory than is free, or losses that are not finite.
        """
        self.on_progress("timing a few layers", 0, 0)
        sample = self.sample(length, self.minutes)
        self.length = sample.length
        self.require_memory(sample.length)
        takes = "" if sample.seconds is None else f", about {sample.seconds:.0f} s"
        shorter = f"; windows of {length} take more than --cost-minutes" if sample.length < length else ""
        self.on_note(
            f"measuring: {sample.tokens} tokens in windows of {sample.length}, before and after{takes}{shorter}"
        )
        checkpoint = self.load()
        self.documents = self.excerpts(checkpoint.tokenizer, sample.length, sample.tokens)
        self.before = self._sums(checkpoint, "measuring the original")

    def compare(self, folder: Path) -> ShortContextLoss:
        """The original compared with the checkpoint in `folder`. One model is in memory at a time."""
        before, after = self.before, self._sums(self.load(folder), "measuring the new one", must_be_finite=False)
        return ShortContextLoss(
            self.length,
            interval(*before.pair),
            interval(*after.pair),
            paired_difference(after.pair, before.pair),
            len(before.nats),
            sum(before.tokens),
            self.text.source,
        )

    def sample(self, length: int, minutes: float, **how: int) -> Sample:
        """`sample_within` by the first timing of this machine, stored so that it is the same after a kill."""
        config = sha256((self.source.folder / "config.json").read_bytes()).hexdigest()
        of = {"config": config, "dtype": str(self.source.dtype), "length": length, "minutes": minutes, **how}
        [sample] = self.store.results(
            [Unit(SAMPLE, str(length), of)], lambda *_: sample_within(self.source, length, minutes, **how), Sample
        )
        return sample

    def losses(
        self, checkpoint: Checkpoint, documents: Documents, length: int, what: str, **how: Any
    ) -> list[DocumentLosses]:
        """The losses of a model in windows of `length` tokens; what: words for progress."""
        return losses_by_length(
            checkpoint.model,
            documents.ids,
            lengths=[length],
            token_bytes=documents.sizes,
            batch_tokens=max(BATCH, length),
            progress=lambda done, total: self.on_progress(what, done, total),
            reader=Bounded(checkpoint.model, None, bos=bos_of(checkpoint.tokenizer, "tokenizer")),
            **how,
        )

    def _sums(self, checkpoint: Checkpoint, what: str, must_be_finite: bool = True) -> Sums:
        """Sums in non-overlapping windows. ValueError for losses that are not finite but must be."""
        bos, length = bos_of(checkpoint.tokenizer, "tokenizer"), self.length

        def measured(*_: object) -> Sums:
            how: Any = {"methods": ["non-overlapping"], "span": len(self.documents.ids[0]) - 1}
            [losses] = self.losses(checkpoint, self.documents, length, what, **how)
            sums = Sums.of(losses)
            if must_be_finite:  # here, so that no unit keeps them
                self.require_finite(sums, length)
            return sums

        inputs = {"bos": bos, "length": length, "text": self.documents.digest}
        unit = Unit("short-contexts", str(length), inputs_of(checkpoint, checkpoint.config) | inputs)
        [sums] = self.store.results([unit], measured, Sums)
        return sums
