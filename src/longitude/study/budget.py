"""What training costs: FLOPs for a token, and the steps of labels that are matched by compute.

FLOPs are those of matrix products: of every Linear layer, and of scores and weighted values where a mixer attends.
"""

from typing import Any

import torch
from torch import nn

from longitude.models.decoder import LongitudeModel
from longitude.study.config import StudyConfig
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
    """FLOPs of matrix products for a training token, forward and backward: three times those of the forward pass."""
    model = on_meta(config, label)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    length = task_of(config.task).positions(config.train_length)
    stacks = [module for module in model.modules() if isinstance(module, LongitudeModel)]
    attending = sum(mixer.growth != "O(1)" for stack in stacks for mixer in stack.mixers)
    seen = length / 2 if task_of(config.task).stack == "decoder" else length  # keys of a query, on average
    return BACKWARD * 2 * (linear + 2 * attending * seen * config.hidden)


def train_steps(config: StudyConfig) -> dict[str, int]:
    """Label -> steps that cost what those of the study cost the reference; none where labels are matched by steps."""
    if config.match == "steps":
        return {}
    budget = config.steps * flops_per_token(config, REFERENCE)
    return {label: max(1, round(budget / flops_per_token(config, label))) for label in config.encodings}
