"""The task of text: a decoder predicts the next byte."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch

from longitude.measure import DocumentLosses, Row, losses_by_length
from longitude.models import LongitudeForCausalLM
from longitude.study.config import StudyConfig
from longitude.study.data import Windows, prepare
from longitude.study.work import BYTES, Examples, StudyData, TaskRunner, sampler_of


class Text(TaskRunner):
    """Bits per byte of held-out text."""

    model = LongitudeForCausalLM

    def prepare(self, config: StudyConfig) -> StudyData:
        return prepare(config)

    def shape(self, config: StudyConfig) -> dict[str, Any]:
        return {"vocab_size": BYTES}

    def try_out(self, model: Any, config: StudyConfig) -> None:
        model(torch.zeros(1, 2, dtype=torch.long))
        if config.position_range is not None:  # the range of positions, too
            ends = torch.tensor([[0, config.position_range - 1]])
            model(torch.zeros(1, 2, dtype=torch.long), position_ids=ends)

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
        heard: Callable[[int, int], None],
    ) -> tuple[list[Row], pd.DataFrame]:
        losses = []
        if lengths:
            losses = losses_by_length(
                model,
                data.validation,
                lengths=lengths,
                methods=config.methods,
                stride=config.stride,
                span=config.test_lengths[-1],
                token_bytes=1,
                progress=heard,
            )
        return [each.row(**labels) for each in losses], documents_frame(losses, labels)


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
