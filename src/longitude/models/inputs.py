"""Checks of a model's inputs: known arguments, embeddings that fit, an assistant whose cache can be cropped."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from longitude.errors import unknown


def require_known(kwargs: dict[str, Any], forward: Callable[..., Any], *others: str) -> None:
    """ValueError for the first of a call's further arguments that is none of `others`: it is no argument of `forward`."""
    for name in kwargs:
        if name not in others:
            raise unknown("argument", name, {*signature(forward).parameters, *others}, "")


def require_embeds(name: str, given: Any, config: Any, table: nn.Embedding | None) -> None:
    """ValueError unless `given` is [B, L, config.hidden_size], of the dtype of the model's own embeddings, `table`.

    Under autocast, and where parameters are quantised, operations choose their dtypes themselves, so any will do; None as a
    table: compared already.
    """
    weight = None if table is None else table.weight
    dtype = "floats" if weight is None else str(weight.dtype)
    got = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    expected = f"{name}: expected {dtype} [batch, length, {config.hidden_size}], got {got}"
    if not isinstance(given, Tensor) or given.dim() != 3 or given.shape[-1] != config.hidden_size:
        raise ValueError(f"{expected}; give one vector per token, as get_input_embeddings() makes them of input_ids")
    if weight is None or given.dtype == weight.dtype or not weight.is_floating_point():
        return
    kind = given.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if not autocast and getattr(config, "quantization_config", None) is None:
        raise ValueError(f"{expected}; convert them with .to({weight.dtype}), or the model")


def require_assistant(assistant: Any) -> None:
    """ValueError for an assistant whose cache cannot be cropped: transformers checks only the model itself."""
    if getattr(assistant, "_is_stateful", False):
        raise ValueError(
            f"assistant_model: expected one whose cache can take tokens back, got a {type(assistant).__name__} with a state that "
            "runs along the tokens; use attention, and an encoding that carries none, in it"
        )
