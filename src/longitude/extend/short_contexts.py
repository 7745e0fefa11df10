"""The cost on short contexts: a model before and after, on the same windows of the original length, over the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longitude.checkpoints.calibration import flops_per_second, forward_flops
from longitude.checkpoints.config import FULL, head_dim_of
from longitude.checkpoints.load import Checkpoint, load, tokenizer_of
from longitude.checkpoints.quiet import quiet
from longitude.checkpoints.source import Source
from longitude.measure.documents import Documents, bos_of, documents_of
from longitude.measure.sources import read_text
from longitude.measure.text import DocumentLosses, losses_by_length
from longitude.measure.windows import LOGITS, Bounded
from longitude.runs.device import device_of
from longitude.runs.memory import available_memory, forward_memory
from longitude.statistics.documents import Interval, interval, paired_difference

TOKENS, DOCUMENTS, FEWEST = 65_536, 32, 4
"""What is scored at most: about this many tokens, of this many documents; and no fewer windows than FEWEST."""
SHORTEST = 64
"""Tokens of a window that is not made shorter to save time."""
TIMED = 256
"""Tokens of the window by which this machine is timed."""
MINUTES = 1.0
"""About how long measuring may take, of both models."""
BATCH = 4096
"""Tokens read at once, or one window where it is longer."""
WITHOUT = "leave out the measured cost with --no-measure"

Progress = Callable[[str, float, float], None]
"""on_progress(what is being done, done, total)."""


@dataclass(frozen=True)
class Cost:
    """Bits per byte at one length, with 95 % intervals over documents.

    Attributes:
        length: Of the windows, in tokens.
        before: Of the model as it was.
        after: Of the extended one.
        difference: after - before, paired over documents.
        documents: How many were scored.
        tokens: Likewise.
        text: What was read.
    """

    length: int
    before: Interval
    after: Interval | None
    difference: Interval | None
    documents: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Sample:
    """What is read of a text, by each of two models.

    Attributes:
        length: Of the windows, in tokens.
        tokens: In all.
        seconds: Of both models on this machine, about; None where its class cannot be timed.
    """

    length: int
    tokens: int
    seconds: float | None


def sample_within(source: Source, length: int, minutes: float) -> Sample:
    """Windows of `length` tokens, or shorter ones where FEWEST of these take two models longer than `minutes`."""
    try:
        flops = forward_flops(source.skeleton)
        rate = flops_per_second(source.skeleton, min(length, TIMED), dtype=source.dtype, times=2)
    except ValueError:
        length = min(length, TIMED)
        return Sample(length, FEWEST * length, None)

    def seconds(width: int) -> float:
        return 2 * flops.of(width) / rate

    while length > SHORTEST and FEWEST * seconds(length) > 60 * minutes:
        length //= 2
    windows = max(FEWEST, min(TOKENS // length, int(60 * minutes / seconds(length))))
    return Sample(length, windows * length, windows * seconds(length))


class CostMeasurement:
    """Measures a checkpoint and what was made of it on one text.

    minutes: about how long both may take. ValueError, before any model is loaded, where it has no tokenizer, or the text
    cannot be read.
    """

    def __init__(
        self,
        source: Source,
        text: str,
        on_progress: Progress,
        minutes: float = MINUTES,
        on_note: Callable[[str], None] = lambda sentence: None,
    ):
        try:
            tokenizer_of(source.folder, source.config)
        except ValueError as error:
            raise ValueError(f"{error}; or {WITHOUT}, which alone needs it") from error
        self.source, self.on_progress, self.minutes, self.on_note = source, on_progress, minutes, on_note
        self.text = read_text(text, "--text")
        self.documents: dict[int, Documents] = {}
        self.before: dict[int, DocumentLosses] = {}

    def require_memory(self, length: int) -> None:
        """ValueError when the model with one window of `length` tokens is larger than what is free."""
        source, rows = self.source, max(1, BATCH // length)
        needs = forward_memory(
            source.skeleton, head_dim_of(source.config, FULL), source.dtype, length, rows, chunk=length, logits=LOGITS
        )
        if needs.total > (free := available_memory(device_of().type)):
            problem = f"reading {length} tokens at once takes {needs}, and {free / 1e9:.1f} GB are free"
            raise ValueError(f"{source.name}: {problem}; {WITHOUT}")

    def load(self, folder: Path | None = None) -> Checkpoint:
        """The model in a folder, or the original, on the device."""
        with quiet():
            return load(folder or self.source.folder, allow_pickle=self.source.pickled, device=device_of())

    def excerpts(self, tokenizer, length: int, tokens: int | None = None) -> Documents:
        """One window of `length` tokens or more of each document. ValueError for a text that is too short."""
        tokens = TOKENS if tokens is None else tokens
        documents = min(DOCUMENTS, max(FEWEST, tokens // length))
        windows = max(1, tokens // (documents * length))
        with suppress(ValueError):
            return documents_of(self.text, tokenizer, windows * length, documents)
        try:
            return documents_of(self.text, tokenizer, length, documents)
        except ValueError as error:
            raise ValueError(f"{error}; or {WITHOUT}") from error

    def measure_original(self, lengths: Sequence[int]) -> None:
        """Before anything is written, as much as fits into the minutes; a note says first how long it takes.

        ValueError for a text that is too short, more memory than is free, or losses that are not finite.
        """
        self.on_progress("timing a few layers", 0, 0)
        samples: dict[int, Sample] = {}
        for length in lengths:
            sample = sample_within(self.source, length, self.minutes / len(lengths))
            self.require_memory(sample.length)
            samples[sample.length] = sample
            takes = "" if sample.seconds is None else f", about {sample.seconds:.0f} s"
            shorter = f"; windows of {length} take more than --cost-minutes" if sample.length < length else ""
            self.on_note(
                f"measuring: {sample.tokens} tokens in windows of {sample.length}, before and after{takes}{shorter}"
            )
        checkpoint = self.load()
        self.documents = {n: self.excerpts(checkpoint.tokenizer, n, each.tokens) for n, each in samples.items()}
        self.before = self._losses(checkpoint, "measuring the original")
        first = next(iter(samples))
        if not np.isfinite(self.before[first].nats).all():
            losses = f"{self.source.name}: its losses on {self.text.source} are not finite at {first} tokens"
            raise ValueError(f"{losses}, before anything is extended; look for NaN or overflow in its weights")

    def compare(self, folder: Path | None) -> list[Cost]:
        """The original compared with the checkpoint in `folder`, or alone. One model is in memory at a time."""
        after = {} if folder is None else self._losses(self.load(folder), "measuring the new one")
        costs = []
        for length, losses in self.before.items():
            value = interval(*losses.sums, metric=losses.metric)
            new = difference = None
            if length in after:
                new = interval(*after[length].sums, metric=losses.metric)
                difference = paired_difference(after[length].sums, losses.sums, metric=losses.metric)
            tokens = int(losses.tokens.sum())
            costs.append(Cost(length, value, new, difference, len(losses.nats), tokens, self.text.source))
        return costs

    def _losses(self, checkpoint: Checkpoint, what: str) -> dict[int, DocumentLosses]:
        """Sums over the documents in windows that do not overlap, with their bytes."""
        losses = {}
        for length, documents in self.documents.items():
            if hasattr(checkpoint.config, "max_seq_len"):  # MPT's biases are made for this many positions
                checkpoint.model.config.max_seq_len = max(length, checkpoint.config.max_seq_len)
            bos = bos_of(checkpoint.tokenizer, "tokenizer")
            [losses[length]] = losses_by_length(
                checkpoint.model,
                documents.ids,
                lengths=[length],
                methods=["non-overlapping"],
                span=len(documents.ids[0]) - 1,
                token_bytes=documents.sizes,
                batch_tokens=max(BATCH, length),
                progress=lambda done, total: self.on_progress(what, done, total),
                reader=Bounded(checkpoint.model, None, bos=bos),
            )
        return losses
