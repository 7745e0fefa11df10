"""What an extension costs on short texts: both models on the same windows of the original length, over the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longitude.checkpoints.load import Checkpoint, load
from longitude.checkpoints.quiet import quiet
from longitude.checkpoints.source import Source
from longitude.measure import memory
from longitude.measure.documents import Documents, documents_of
from longitude.measure.intervals import Interval, interval, paired_difference
from longitude.measure.sources import Text
from longitude.measure.text import DocumentLosses, losses_by_length
from longitude.measure.windows import LOGITS, Bounded

TOKENS, DOCUMENTS, FEWEST = 65_536, 32, 4
"""What is scored: about so many tokens, of so many documents; of long windows no fewer than FEWEST."""
BATCH = 4096
"""Tokens read at once, or one window where it is longer."""


@dataclass(frozen=True)
class Cost:
    """Bits per byte at `length` tokens: of the model as it was, of the extended one, and the difference, with 95 %
    intervals over documents.
    """

    length: int
    before: Interval
    after: Interval | None
    difference: Interval | None
    documents: int
    tokens: int
    text: str


def documents_for(text: Text, tokenizer: Any, length: int) -> Documents:
    """Excerpts of one window or more of `length` tokens. ValueError for a text that is too short."""
    documents = min(DOCUMENTS, max(FEWEST, TOKENS // length))
    windows = max(1, TOKENS // (documents * length))
    for long in (windows * length, length):
        try:
            return documents_of(text, tokenizer, long, documents)
        except ValueError as error:
            said = error
    raise ValueError(f"{said}; or leave out what is measured with --no-measure")


def losses_of(
    checkpoint: Checkpoint, documents: Documents, length: int, progress: Callable[[int, int], None] | None = None
) -> DocumentLosses:
    """Sums over the documents in windows that do not overlap, with their bytes."""
    [found] = losses_by_length(
        checkpoint.model,
        documents.ids,
        lengths=[length],
        methods=["non-overlapping"],
        span=len(documents.ids[0]) - 1,
        token_bytes=documents.bytes,
        batch_tokens=max(BATCH, length),
        progress=progress,
        reader=Bounded(checkpoint.model, None),
    )
    return found


def cost_of(before: DocumentLosses, after: DocumentLosses | None, length: int, text: Text) -> Cost:
    return Cost(
        length,
        interval(*before.sums, metric=before.metric),
        None if after is None else interval(*after.sums, metric=after.metric),
        None if after is None else paired_difference(after.sums, before.sums, metric=before.metric),
        len(before.nats),
        int(before.tokens.sum()),
        text.source,
    )


def device() -> str:
    """Where it is measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def loaded(folder: Path, allow_pickle: bool = False) -> Checkpoint:
    """The model in a folder, on the device."""
    with quiet():
        return load(folder, allow_pickle=allow_pickle, device=device())


def require_memory(source: Source, length: int) -> None:
    """ValueError when a model with one window of `length` tokens is larger than what is free."""
    dtype = getattr(torch, str(source.config.dtype or "float32").removeprefix("torch."))
    rows = max(1, BATCH // length)
    needs = memory.needed(source.skeleton, dtype, length, rows, length, LOGITS)
    if needs.total > (free := memory.available(device())):
        raise ValueError(
            f"{source.name}: reading {length} tokens at once takes {needs}, and {free / 1e9:.1f} GB are free; leave out what "
            f"is measured with --no-measure"
        )
