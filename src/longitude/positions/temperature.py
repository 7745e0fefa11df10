"""What changes the softmax: temperatures of queries, by the number of visible keys or the position, and sinks."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from longitude.errors import Positive, Rate, Within
from longitude.positions.base import Columns, Encoding, register
from longitude.positions.coordinates import floor_divide, wide
from longitude.positions.terms import SinkLogits, Temperature, Term


@register("ssmax")
class SSMax(Encoding):
    """SSMax, scalable softmax: q_i *= s_h ln n_i, n_i = the number of keys that the mask lets query i attend to.

    Softmax weights over n keys flatten as n grows; the factor undoes that, at a rate that each head learns. n_i counts the keys
    that windows, documents and padding leave visible, whatever their positions.

    Args:
        num_heads: heads of queries.
        initial: initial s of all heads. The default is 1 / mean(ln n) over n = 1 .. 1024, so the mean factor starts at 1 at
            this training length.

    Source:
        Nakanishi 2025, arXiv 2501.19399, https://arxiv.org/abs/2501.19399
    """

    source = "Nakanishi 2025, https://arxiv.org/abs/2501.19399"
    learned = True

    def __init__(self, num_heads: int, initial: Positive = 0.168):
        super().__init__()
        self.num_heads, self.initial = num_heads, initial
        self.rate = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.rate, self.initial)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(visible: Tensor) -> Tensor:
            return self.rate.to(wide(visible.device))[:, None] * visible.to(wide(visible.device)).log()

        return (Temperature(at, "visible", self),)


@register("log_n")
class LogN(Encoding):
    """Log-n scaling of queries: q_i *= ln n_i / ln N, n_i = the number of keys that query i may attend to. Nothing is learned.

    Args:
        trained_length: N, the number of keys for which the factor is 1; None: the factor is ln n_i, as published.

    Raises:
        ValueError: a trained_length below 2, by whose logarithm nothing can be divided.

    Source:
        Chiang and Cholak 2022, arXiv 2202.12172, https://arxiv.org/abs/2202.12172
    """

    source = "Chiang and Cholak 2022, https://arxiv.org/abs/2202.12172"
    shared = True

    def __init__(self, trained_length: Annotated[int, Within(2)] | None = None):
        super().__init__()
        self.trained_length = trained_length

    def terms(self, context: Columns) -> tuple[Term, ...]:
        unit = 1.0 if self.trained_length is None else math.log(self.trained_length)
        return (Temperature(lambda visible: visible.to(wide(visible.device)).log() / unit, "visible"),)


class _Stepped(Encoding):
    """1 + rate ln(1 + floor((i + first) / step)) at position i."""

    relative = False
    shared = True
    rate: float
    step: int
    first: int

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(positions: Tensor) -> Tensor:
            # positions + first would overflow at the largest integer.
            steps = floor_divide(positions, self.step) + floor_divide(positions % self.step + self.first, self.step)
            return 1 + self.rate * steps.to(wide(positions.device)).log1p()

        return (Temperature(at, "positions"),)


@register("llama4_temperature")
class Llama4Temperature(_Stepped):
    """Llama 4's temperature of queries: q_i *= 1 + attn_scale ln(1 + floor((i + 1) / floor_scale)), i the position.

    The model has it in its layers without rotation only. Options are named as in its config.

    Args:
        attn_scale: its rate.
        floor_scale: positions per step; the factor is 1 before the first step.

    Source:
        Meta AI 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence/; transformers' Llama4TextAttention, which counts
        the tokens in its cache where this follows positions.
    """

    source = "Meta AI 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence/"

    def __init__(self, attn_scale: Positive = 0.1, floor_scale: int = 8192):
        super().__init__()
        self.attn_scale, self.floor_scale = attn_scale, floor_scale
        self.rate, self.step, self.first = attn_scale, floor_scale, 1


@register("ministral3_temperature")
class Ministral3Temperature(_Stepped):
    """Ministral 3's temperature of queries: q_i *= 1 + beta ln(1 + floor(i / original_max_length)), i the position.

    Args:
        beta: its rate, llama_4_scaling_beta of the config; 0 in Devstral 2, where queries stay as they are.
        original_max_length: positions per step, original_max_position_embeddings of the config.

    Source:
        Mistral AI 2025, https://mistral.ai/news/mistral-3; transformers' Ministral3Attention.
    """

    source = "Mistral AI 2025, https://mistral.ai/news/mistral-3"

    def __init__(self, beta: Rate = 0.1, original_max_length: int = 16384):
        super().__init__()
        self.beta, self.original_max_length = beta, original_max_length
        self.rate, self.step, self.first = beta, original_max_length, 0


@register("log_affine")
class LogAffine(Encoding):
    """Mistral Large 4's temperature: q_i *= s_h ln(i + 1) + b_h, i the position, s and b learned by each head.

    s starts at 0 and b at 1, so that the factor starts at 1. Use it if each head should learn whether its attention sharpens
    with the position. SSMax has no b and counts visible keys.

    Args:
        num_heads: heads of queries.

    Source:
        Mistral AI 2026; transformers' MistralLarge4TextSoftmaxScaling,
        https://github.com/huggingface/transformers/tree/main/src/transformers/models/mistral_large4
    """

    source = (
        "Mistral AI 2026, https://github.com/huggingface/transformers/tree/main/src/transformers/models/mistral_large4"
    )
    learned = True
    relative = False

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.rate, self.offset = (nn.Parameter(torch.empty(num_heads)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.rate)
        nn.init.ones_(self.offset)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(positions: Tensor) -> Tensor:
            exact = wide(positions.device)
            rate, offset = (x.to(exact)[:, None] for x in (self.rate, self.offset))
            return rate * positions.to(exact).log1p() + offset

        return (Temperature(at, "positions", self),)


@register("beam_temperature")
class BeamTemperature(Encoding):
    """Beam's temperature, a power law: q_i *= (1 + (i + 1) / length)^exponent, i the position. Nothing is learned.

    The model has it in its layers without rotation only. Use it if queries should sharpen slowly with nothing learned.

    Args:
        length: positions after which the factor is 2^exponent.
        exponent: its power.

    Source:
        transformers' compute_attention_scaling of Beam,
        https://github.com/huggingface/transformers/tree/main/src/transformers/models/beam
    """

    source = "transformers 2026, https://github.com/huggingface/transformers/tree/main/src/transformers/models/beam"
    relative = False
    shared = True

    def __init__(self, length: int = 2048, exponent: Positive = 0.1):
        super().__init__()
        self.length, self.exponent = length, exponent

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(positions: Tensor) -> Tensor:
            return (1 + (positions.to(wide(positions.device)) + 1) / self.length) ** self.exponent

        return (Temperature(at, "positions"),)


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
