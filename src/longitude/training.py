"""Which parameters have weight decay, and which learn faster: one rule for every training."""

from __future__ import annotations

from typing import Any

from torch import nn

from longitude.attention.mixer import Mixer
from longitude.errors import Positive, Rate, UsageError, check_declared
from longitude.positions.base import Encoding

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Modules with a matrix or convolution kernel as weight, also if it has a single input or output."""
SCORE_RATE = 10.0
"""Learning rate of tables of scores, as a multiple of that of other parameters.

Adam moves every number by about the learning rate in a step. A score moves by far more, because it is a sum of products over
head_dim, and the factors are sums over the width. A table entry moves only by the learning rate, and over a short training
ends within half a logit of its start. DECISIONS.md has the measurement.
"""
RULE = (
    "weight decay of matrices; none of vectors, norms, tables of encodings and rates of recurrences; tables of scores learn at "
    f"{SCORE_RATE:g} times the learning rate"
)
"""The rule of `parameter_groups` in a sentence, which a study records: it changes with the rule."""


def decayed_names(model: nn.Module) -> list[str]:
    """The names of the parameters that decay: matrices.

    A matrix is the weight of a Linear layer or a convolution, also with a single input or output, so that weight decay does not
    depend on sizes such as num_heads=1. Any other parameter with two or more dimensions larger than one is a matrix too; a
    scale [1, n] is a vector. The following do not decay: vectors and scalars, parameters of norms, tables that an Encoding
    has directly (its Linear layers decay), parameters that a Mixer names in `undecayed`, and parameters marked with
    `_no_weight_decay = True`, the mark of the published state space models. A parameter with several names appears by its
    first.
    """
    spared: set[int] = set()
    matrices: set[int] = set()
    for module in model.modules():
        if isinstance(module, MATRICES):
            matrices.add(id(module.weight))
        if isinstance(module, Mixer):
            spared |= {id(p) for name, p in module.named_parameters() if name in module.undecayed}
        if isinstance(module, (*NORMS, Encoding)):
            spared |= {id(p) for p in module.parameters(recurse=False)}
    return [
        name
        for name, p in model.named_parameters()
        if (id(p) in matrices or sum(size > 1 for size in p.shape) > 1)
        and id(p) not in spared
        and not getattr(p, "_no_weight_decay", False)
    ]


def score_table_names(model: nn.Module) -> list[str]:
    """The names of the parameters that encodings name in `score_tables`."""
    tables = {
        id(module.get_parameter(name))
        for module in model.modules()
        if isinstance(module, Encoding)
        for name in module.score_tables
        if getattr(module, name) is not None
    }
    return [name for name, p in model.named_parameters() if id(p) in tables]


def parameter_groups(model: nn.Module, weight_decay: float = 0.1, lr: float | None = None) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, such as torch.optim.AdamW(lg.parameter_groups(model, 0.1, lr=1e-3), lr=1e-3).

    The first group decays: matrices, except parameters of norms, tables of encodings and rates of recurrences. The second group
    is the rest. With lr, tables of scores (Encoding.score_tables, such as T5's and KERPLE's) are a third group. Its learning
    rate is 10 times as high, because Adam moves the entries of these tables only by the learning rate.

    Args:
        model: any module.
        weight_decay: weight decay of the first group, 0 or more.
        lr: the learning rate, above 0; a scheduler scales it in each group. None: groups have no "lr".

    Returns:
        [{"params": ..., "weight_decay": weight_decay}, {"params": ..., "weight_decay": 0.0}], and with lr each with "lr" and
        the third, if the model has such tables. Each parameter that requires a gradient is in one of them, once.

    Raises:
        ValueError: weight_decay is negative, no number or not finite; lr is not above 0, no number or not finite; model is no
            module or has nothing to train.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            "parameter_groups",
            "a torch.nn.Module",
            type(model).__name__,
            "pass the model itself, whose modules decide what decays",
        )
    rates = {"weight_decay": weight_decay, "lr": 1.0 if lr is None else lr}
    check_declared("parameter_groups", {"weight_decay": Rate, "lr": Positive}, rates)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("parameter_groups", "a model with parameters that require a gradient", "none")
    decayed, tables = set(decayed_names(model)), set(score_table_names(model)) if lr is not None else set()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": float(weight_decay)},
        {"params": [p for name, p in trained if name not in decayed | tables], "weight_decay": 0.0},
    ]
    if lr is not None:
        groups = [{**group, "lr": lr} for group in groups]
        if scores := [p for name, p in trained if name in tables]:
            groups.append({"params": scores, "weight_decay": 0.0, "lr": SCORE_RATE * lr})
    return groups
