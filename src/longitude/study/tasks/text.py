"""The task of text: a decoder predicts the next byte, or token."""

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from longitude.measure import DocumentLosses, Row, default_bins, losses_by_length
from longitude.study.config import StudyConfig
from longitude.study.data import Examples, StudyData, Windows
from longitude.study.results import FIRST, LAST
from longitude.study.tasks.base import Measuring, Task, register_task, sampler_of


@register_task("text")
class Text(Task):
    """The next byte or token of a text, from those before it: bits per byte of held-out text."""

    metric, words, loss_unit = "bits_per_byte", "bits per byte", "byte"
    methods = ("non-overlapping", "sliding", "per-position")
    tokenized = True
    ngrams = (2, 3)

    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        count = config.steps * config.batch_size
        return Windows(data.training, config.train_length, count, seed, sampler_of(config))

    def selection(self, config: StudyConfig, data: StudyData) -> Examples:
        return Windows(data.selection, config.train_length, len(data.selection), 0)

    def measure(self, of: Measuring) -> tuple[list[Row], list[pd.DataFrame]]:
        losses = self.losses(of) if of.lengths else []
        rows = [replace(each.row(**of.labels), metric=self.metric) for each in losses]
        whole = [each for each in losses if each.position_from is None]
        tables = [
            of.per_document(each.method, each.window, nats=each.nats, tokens=each.tokens, bytes=each.bytes)
            for each in whole
        ]
        return rows, [*tables, *self.quarters(of, losses)]

    def quarters(self, of: Measuring, losses: list[DocumentLosses]) -> Iterator[pd.DataFrame]:
        """The losses at the first and the last quarter of the positions, at the training length."""
        length = of.config.train_length
        quarter = max(1, length // 4)
        bins = {(each.position_from, each.position_to): each for each in losses if each.window == length}
        for name, start, stop in ((FIRST, 0, quarter), (LAST, length - quarter, length)):
            inside = [each for (low, high), each in bins.items() if high and start <= (low or 0) and high <= stop]
            if inside:
                sums = {key: sum(getattr(each, key) for each in inside) for key in ("nats", "tokens", "bytes")}
                yield of.per_document(name, length, **sums)

    def losses(self, of: Measuring) -> list[DocumentLosses]:
        """Sums over each validation document, by length and method, and by position of the windows of every length."""
        bins = {length: default_bins(length) for length in of.lengths}
        if (trained := of.config.train_length) in bins:
            quarter = max(1, trained // 4)
            bins[trained] = sorted({*bins[trained], quarter, trained - quarter})
        return losses_by_length(
            of.model,
            of.data.validation,
            lengths=of.lengths,
            methods=of.config.methods,
            stride=of.config.stride,
            span=of.config.test_lengths[-1],
            token_bytes=of.data.token_bytes or 1,
            bins=bins,
            progress=of.on_progress,
        )
