"""The task of masked text: an encoder fills in bytes that are masked, from those on both sides (Devlin et al. 2019).

15 % of the bytes are masked, and a masked byte is always the mask, never itself or another byte. In a training window that is
a number of places, rounded and at least one, which the seed and the window decide. When measuring, chance decides for each byte
of a document, once: all lengths and models are asked for the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.measure import DocumentLosses, Row
from longitude.measure.windows import evaluating
from longitude.models.encoder import LongitudeForMaskedLM
from longitude.models.loss import IGNORED
from longitude.study.config import StudyConfig
from longitude.study.data import Windows, prepare
from longitude.study.text import documents_frame
from longitude.study.work import BYTES, Examples, StudyData, TaskRunner, sampler_of

MASK = BYTES
SHARE = 0.15
BATCH = 16384
"""Bytes per forward pass."""


class Masked(TaskRunner):
    """Bits per masked byte of held-out text."""

    model = LongitudeForMaskedLM

    def prepare(self, config: StudyConfig) -> StudyData:
        return prepare(config)

    def shape(self, config: StudyConfig) -> dict[str, Any]:
        return {"vocab_size": BYTES + 1}

    def try_out(self, model: Any, config: StudyConfig) -> None:
        model(torch.zeros(1, 2, dtype=torch.long))

    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        count = config.steps * config.batch_size
        return MaskedWindows(Windows(data.training, config.train_length, count, seed, sampler_of(config)))

    def measure(
        self,
        model: Any,
        config: StudyConfig,
        data: StudyData,
        lengths: Sequence[int],
        labels: dict[str, Any],
        heard: Callable[[int, int], None],
    ) -> tuple[list[Row], pd.DataFrame]:
        losses = []
        with evaluating(model):
            for i, length in enumerate(lengths):
                losses.append(self.losses(model, data.validation, length, config.test_lengths[-1]))
                heard(i + 1, len(lengths))
        rows = [replace(each.row(**labels), metric=self.task.metric) for each in losses]
        return rows, documents_frame(losses, labels)

    def losses(self, model: Any, documents: Sequence[Tensor], window: int, span: int) -> DocumentLosses:
        """Sums over the masked bytes of each document, read in windows laid end to end over a multiple of `span` bytes."""
        nats, counts = [], []
        for index, document in enumerate(documents):
            text = document[: (len(document) - 1) // span * span]
            hidden = torch.from_numpy(np.random.default_rng(index).random(len(document)) < SHARE)[: len(text)]
            read = text.masked_fill(hidden, MASK)
            pieces = zip(read.split(window), text.split(window), hidden.split(window), strict=True)
            whole, rest = [], []
            for piece in pieces:
                (whole if len(piece[0]) == window else rest).append(piece)
            at_once = max(1, BATCH // window)
            batches = [whole[i : i + at_once] for i in range(0, len(whole), at_once)] + ([rest] if rest else [])
            nats.append(sum(masked_nats(model, *map(torch.stack, zip(*batch, strict=True))) for batch in batches))
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
    """Training windows with some bytes masked: {"input_ids": [length], "labels": [length], -100 where nothing is asked}."""

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
