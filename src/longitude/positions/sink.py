"""A learned attention sink per head: the weights of the keys may sum to less than 1."""

from __future__ import annotations

import torch
from torch import nn

from longitude.positions.base import Columns, Encoding, SinkLogits, Term, register


@register("sink")
class LearnedSink(Encoding):
    """A learned sink per head: a logit s_h of a virtual key without value, so that the keys' weights sum to less than 1.

        out' = out sigmoid(lse - s_h),    lse' = log(e^lse + e^s_h)

    It does not encode positions: compose it, as in rope+sink. If lg.attention.merge_attention joins parts of the keys, use the
    sink in one part only.

    Args:
        num_heads: heads of queries.
        initial: initial s_h of all heads; gpt-oss draws it from a normal distribution around 0.

    Source:
        OpenAI 2025, gpt-oss, arXiv 2508.10925, https://arxiv.org/abs/2508.10925
    """

    source = "OpenAI 2025, https://arxiv.org/abs/2508.10925"
    learned = True
    score_tables = ("logits",)

    def __init__(self, num_heads: int, initial: float = 0.0):
        super().__init__()
        self.num_heads, self.initial = num_heads, initial
        self.logits = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.logits, self.initial)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return (SinkLogits(self.logits),)
