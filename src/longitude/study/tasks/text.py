"""The task of text: a decoder predicts the next byte."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from longitude.measure import DocumentLosses, Row, losses_by_length
from longitude.study.config import StudyConfig
from longitude.study.data import Examples, StudyData, Windows
from longitude.study.tasks.base import OnProgress, Task, register_task, sampler_of


@register_task("text")
class Text(Task):
    """The next byte of a text, from those before it: bits per byte of held-out text."""

    metric, words, loss_unit = "bits_per_byte", "bits per byte", "byte"
    methods = ("non-overlapping", "sliding", "per-position")

    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        count = config.steps * config.batch_size
        return Windows(data.training, config.train_length, count, seed, sampler_of(config))

    def measure(
        self,
        model: Any,
        config: StudyConfig,
        data: StudyData,
        lengths: Sequence[int],
        labels: dict[str, Any],
        on_progress: OnProgress,
    ) -> tuple[list[Row], pd.DataFrame]:
        losses = self.losses(model, config, data, lengths, on_progress) if lengths else []
        return [replace(each.row(**labels), metric=self.metric) for each in losses], documents_frame(losses, labels)

    def losses(
        self, model: Any, config: StudyConfig, data: StudyData, lengths: Sequence[int], on_progress: OnProgress
    ) -> list[DocumentLosses]:
        """Sums over each validation document, by length and method."""
        return losses_by_length(
            model,
            data.validation,
            lengths=lengths,
            methods=config.methods,
            stride=config.stride,
            span=config.test_lengths[-1],
            token_bytes=1,
            progress=on_progress,
        )


def documents_frame(losses: Sequence[DocumentLosses], labels: dict[str, Any]) -> pd.DataFrame:
    """Sums per document of each length and method, not of single positions."""
    columns = ("label", "seed", "method", "length", "document", "nats", "tokens", "bytes")
    parts = [
        (labels["label"], labels["seed"], each.method, each.window, document, each.nats[document], tokens, tokens)
        for each in losses
        if each.position_from is None
        for document, tokens in enumerate(each.tokens)
    ]
    return pd.DataFrame(parts, columns=columns)
