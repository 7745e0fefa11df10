"""Checks of a model's inputs: argument names, shapes of embeddings, croppable caches of assistants, places of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from longitude.errors import UsageError, unknown
from longitude.positions.composed import Composed
from longitude.positions.coordinates import canonical


def require_known(kwargs: dict[str, Any], forward: Callable[..., Any], *others: str) -> None:
    """ValueError for the first name in `kwargs` that is not in `others`; it suggests a name of these or of `forward`."""
    for name in kwargs:
        if name not in others:
            raise unknown("argument", name, {*signature(forward).parameters, *others}, "")


def require_embeds(name: str, given: Any, config: Any, table: nn.Embedding | None) -> None:
    """ValueError unless `given` is [B, L, config.hidden_size], of the dtype of the model's own embeddings, `table`.

    Under autocast, and if parameters are quantized, operations choose their dtypes, so any is accepted. table None: any dtype,
    because the dtype was compared before.
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
    """Raise ValueError for an assistant with a cache that cannot be cropped: transformers checks only the model itself."""
    if getattr(assistant, "_is_stateful", False):
        raise UsageError(
            "assistant_model",
            "a model whose cache can be cropped",
            f"{type(assistant).__name__}, which drops tokens or keeps a state",
            "use an assistant with attention and an encoding that carries no state",
        )


def ids_so_far(ids: Tensor, cache: Any, past: int) -> Tensor | None:
    """Ids of all tokens [B, past + L], cached ones first; None if the cache does not store them."""
    if not past:
        return ids
    before = None if cache is None else cache.layers[0].ids
    if before is None or before.shape[1] != past:
        return None
    if len(before) != len(ids):
        raise UsageError("input_ids", f"the {len(before)} rows of the cache", len(ids))
    return torch.cat([before, ids], 1)


def places_of(
    encoding: Composed,
    given: Tensor | None,
    ids: Tensor | None,
    streams: Tensor | None,
    batch: int,
    length: int,
    random_start: bool,
) -> tuple[Tensor | None, ...]:
    """Places of the last `length` tokens for each member that reads ids, else None: as passed, or computed from all ids."""
    if given is not None:
        if not encoding.reads_ids:
            raise ValueError("place_ids: no encoding of this model has places of its own; leave them out")
        canonical("place_ids", given, batch, length)
        return tuple(given if member.reads_ids else None for member in encoding)
    if ids is None:
        raise ValueError(
            "places are made of token ids: expected input_ids in this call and in all that filled its cache, and no memories; "
            "or place_ids"
        )
    every = encoding.places(ids, streams, random_start)
    return tuple(None if places is None else places[:, -length:] for places in every)


def layers_of(output_hidden_states: bool | int | Sequence[int], count: int) -> set[int]:
    """The requested indices of `count` hidden states; negative ones count from the end."""
    if isinstance(output_hidden_states, bool):
        return set(range(count)) if output_hidden_states else set()
    indices = [output_hidden_states] if isinstance(output_hidden_states, int) else list(output_hidden_states)
    for index in indices:
        if not -count <= index < count:
            raise UsageError("output_hidden_states", f"indices from {-count} to {count - 1}", index)
    return {index % count for index in indices}
