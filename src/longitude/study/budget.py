"""What training costs: FLOPs for a token, and the steps of labels that are matched by compute.

FLOPs are those of matrix products: of every Linear layer, and what a mixer says of its own (`Mixer.products`): scores and
weighted values, or what is added to a matrix or diagonal state and read of it. Not counted are norms, gates, decays,
convolutions, biases, the scores of cross-attention, and the state of rwkv4, which is a vector; nor does it matter how a backend
computes it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from longitude.models.decoder import LongitudeModel
from longitude.study.config import StudyConfig
from longitude.study.data import StudyData
from longitude.study.tasks.base import task_of
from longitude.study.train import build_model

BACKWARD = 3
"""Work of a training token, in tokens of measuring."""
REFERENCE = "none"
"""The label whose steps are those of the study where labels are matched by compute: attention without an encoding."""


def on_meta(config: StudyConfig, label: str) -> Any:
    """The model of a label without its numbers."""
    with torch.device("meta"):
        return build_model(config, label, 0)


def flops_per_token(config: StudyConfig, label: str) -> float:
    """FLOPs of matrix products for a token that is read in training, forward and backward: three times the forward ones."""
    model, task = on_meta(config, label), task_of(config.task)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    length = task.positions(config.train_length)
    keys = length / 2 if task.stack == "decoder" else length  # of a query, on average
    stacks = [module for module in model.modules() if isinstance(module, LongitudeModel)]
    mixed = sum(mixer.products(keys) for stack in stacks for mixer in stack.mixers)
    return BACKWARD * 2 * (linear + mixed) / len(stacks)  # a token of an encoder-decoder is in one of its stacks


def tokens_read(config: StudyConfig, data: StudyData, steps: int) -> int:
    """Tokens that a model reads in its training."""
    examples = task_of(config.task).examples(replace(config, steps=steps), data, config.seeds[0])
    return examples.read(steps * config.batch_size)


def train_steps(config: StudyConfig) -> dict[str, int]:
    """Label -> steps that cost what those of the study cost the reference; none where labels are matched by steps."""
    if config.match == "steps":
        return {}
    budget = config.steps * flops_per_token(config, REFERENCE)
    return {label: max(1, round(budget / flops_per_token(config, label))) for label in config.encodings}
