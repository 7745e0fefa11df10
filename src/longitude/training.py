"""Which parameters have weight decay: one rule for every training."""

from __future__ import annotations

from typing import Any

from torch import nn

from longitude.attention.mixer import Mixer
from longitude.positions.base import Encoding

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Modules whose weight is a matrix or a kernel, however few its inputs and outputs."""


def decayed_names(model: nn.Module) -> list[str]:
    """The names of the parameters that decay: matrices.

    A matrix is the weight of a Linear layer or a convolution, of one input or output, too, so that what decays does not depend
    on sizes such as num_heads=1; and any other parameter with two or more dimensions larger than one: a scale [1, n] is a
    vector. Not so: vectors and single numbers, parameters of norms, tables that an Encoding holds itself (its Linear layers
    are matrices as elsewhere), what a Mixer names in `undecayed`, and parameters marked with `_no_weight_decay = True`, the
    mark of the published state space models. A parameter with several names has its first one here.
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


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer, such as torch.optim.AdamW(lg.parameter_groups(model, 0.1), lr=...).

    The first holds what decays: matrices, but no parameters of norms, tables of encodings or rates of recurrences.

    Args:
        model: any module.
        weight_decay: of the first group, 0 or more.

    Returns:
        [{"params": ..., "weight_decay": weight_decay}, {"params": ..., "weight_decay": 0.0}]. Each parameter that requires a
        gradient is in one of them, once.

    Raises:
        ValueError: weight_decay is negative, no number or not finite; model is no module or has nothing to train.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"parameter_groups: expected a torch.nn.Module, got {type(model).__name__}; pass the model itself, whose modules "
            "decide what decays"
        )
    if (
        isinstance(weight_decay, bool)
        or not isinstance(weight_decay, int | float)
        or not 0 <= weight_decay < float("inf")
    ):
        raise ValueError(f"weight_decay: expected a number from 0 on, got {weight_decay!r}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("parameter_groups: expected a model with parameters that require a gradient, got none")
    decayed = set(decayed_names(model))
    trained = [(name in decayed, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for yes, p in trained if yes], "weight_decay": float(weight_decay)},
        {"params": [p for yes, p in trained if not yes], "weight_decay": 0.0},
    ]
