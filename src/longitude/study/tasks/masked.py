"""The task of masked text: an encoder fills in bytes that are masked, from those on both sides (Devlin et al. 2019).

15% of the bytes are masked, and the mask token always replaces a masked byte, never another byte. A training window has a fixed
number of masked bytes, rounded and at least one, at places that the seed and the window decide. When measuring, each byte of a
document is masked with this probability, once: all lengths and models predict the same bytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.measure import DocumentLosses
from longitude.measure.windows import evaluating
from longitude.models.loss import IGNORED
from longitude.study.config import StudyConfig
from longitude.study.data import Examples, StudyData, Windows
from longitude.study.tasks.base import BYTES, Measuring, register_task
from longitude.study.tasks.text import Text

MASK = BYTES
SHARE = 0.15
BATCH = 16384
"""Bytes per forward pass."""


@register_task("masked")
class Masked(Text):
    """Bytes of a text that are masked, from those on both sides: bits per masked byte of held-out text."""

    metric, words, loss_unit = "bits_per_masked_byte", "bits per masked byte", "masked byte"
    methods, ngrams, tokenized = ("non-overlapping",), (1,), False  # bigrams would look at one side only
    stack, model_class, tokens = "encoder", "LongitudeForMaskedLM", {"vocab_size": BYTES + 1}
    defaults = {
        "methods": ("non-overlapping",),
        "encodings": ("sinusoidal", "rope", "alibi", "t5"),
        "train_length": 128,
        "test_lengths": (128, 256, 512, 1024),
        "batch_size": 16,
        "layers": 2,
        "hidden": 128,
        "heads": 4,
        "documents": 100,
        "learning_rates": (4e-3,),
        "steps": 800,
    }

    def valid_methods(self) -> tuple[str, ...]:
        return self.methods  # schemes extend decoders

    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        return MaskedWindows(self.windows(config, data, seed))

    def selection(self, config: StudyConfig, data: StudyData) -> Examples:
        windows = data.selection(config.train_length)
        return MaskedWindows(Windows(windows, config.train_length, len(windows), 0))

    def losses(self, of: Measuring) -> list[DocumentLosses]:
        losses = []
        with evaluating(of.model):
            for i, length in enumerate(of.lengths):
                losses.append(self.at_length(of.model, of.data.validation, length, of.config.test_lengths[-1]))
                of.on_progress(i + 1, len(of.lengths))
        return losses

    def at_length(self, model: Any, documents: Sequence[Tensor], window: int, span: int) -> DocumentLosses:
        """Sums over the masked bytes of each document, read in non-overlapping windows over a multiple of `span` bytes."""
        nats, counts = [], []
        for index, document in enumerate(documents):
            text = document[: (len(document) - 1) // span * span]
            hidden = torch.from_numpy(np.random.default_rng(index).random(len(document)) < SHARE)[: len(text)]
            read = text.masked_fill(hidden, MASK)
            whole = len(text) // window * window
            parts = [(each[:whole].view(-1, window), each[None, whole:]) for each in (read, text, hidden)]
            batches = zip(*(full.split(max(1, BATCH // window)) for full, _ in parts), strict=True)
            rest = [tuple(tail for _, tail in parts)] if whole < len(text) else []
            nats.append(sum(masked_nats(model, *batch) for batch in [*batches, *rest]))
            counts.append(int(hidden.sum()))
        tokens = np.array(counts, dtype=np.int64)
        return DocumentLosses(
            nats=np.array(nats),
            tokens=tokens,
            bytes=tokens,
            method="non-overlapping",
            window=window,
            stride=window,
            truncation=f"tail dropped to a multiple of {span} bytes",
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        )


def masked_nats(model: Any, read: Tensor, text: Tensor, hidden: Tensor) -> float:
    """The sum of -ln p(byte) over the hidden bytes of a batch, each [B, W]."""
    logits = model(input_ids=read.to(model.device)).logits.float().cpu()
    return F.cross_entropy(logits[hidden], text[hidden], reduction="sum").double().item()


class MaskedWindows(Examples):
    """Training windows with some bytes masked: {"input_ids": [length], "labels": [length], -100 if not masked}."""

    def __init__(self, windows: Windows):
        self.windows = windows
        self.masked = max(1, round(SHARE * windows.length))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = self.windows[index]
        text = item["input_ids"]
        random = np.random.default_rng(np.random.SeedSequence(self.windows.seed, spawn_key=(index,)))
        hidden = torch.zeros(len(text), dtype=torch.bool)
        hidden[random.permutation(len(text))[: self.masked]] = True
        del item["shift_labels"]
        return item | {"input_ids": text.masked_fill(hidden, MASK), "labels": text.masked_fill(~hidden, IGNORED)}

    def targets(self, examples: int) -> int:
        return examples * self.masked

    def read(self, examples: int) -> int:
        return examples * self.windows.length
