"""Argument checks of recurrences, and the dtype of their states."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from longitude.attention.masks import kind_of
from longitude.errors import UsageError, unknown


class Form(TypedDict, total=False):
    """How a recurrence is computed.

    mode: "parallel", "chunked" or "recurrent", with equal results; see `retention`. chunk_size: tokens of a chunk.
    """

    mode: str
    chunk_size: int


class Running(Form, total=False):
    """The same, and the tokens [B, L] of a call that begin a document (reset: True) or are padding (valid: False).

    The state before a document counts as zero. Padding leaves the state unchanged.
    """

    reset: Tensor | None
    valid: Tensor | None


MODES = ("parallel", "chunked", "recurrent")
"""Modes with equal results: all pairs or a convolution at once, chunks with a state between them, token after token."""


def require_mode(who: str, mode: str, chunk_size: int) -> None:
    """ValueError for an unknown mode, or a chunk without tokens."""
    if mode not in MODES:
        raise unknown("mode", mode, MODES, f"{who} gives equal results in all of them.")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise UsageError(who, "chunk_size of 1 or more tokens", repr(chunk_size))


def require_tokens(who: str, **named: tuple[Tensor | None, str]) -> None:
    """ValueError unless each is None or a tensor of floats with the named dimensions: none empty, equal names equal sizes."""
    tensors = {name: (x, dims.split()) for name, (x, dims) in named.items() if x is not None}
    sizes: dict[str, int] = {}
    fine = True
    for x, dims in tensors.values():
        fine = fine and isinstance(x, Tensor) and x.is_floating_point() and x.dim() == len(dims) and x.numel() > 0
        fine = fine and all(sizes.setdefault(dim, size) == size for dim, size in zip(dims, x.shape, strict=True))
    if not fine:
        wanted = ", ".join(f"{name} [{', '.join(dims)}]" for name, (_, dims) in tensors.items())
        got = ", ".join(f"{name} {kind_of(x)}" for name, (x, _) in tensors.items())
        raise UsageError(who, f"floats {wanted}, none empty", got)


def require_running(
    who: str,
    batch: int,
    length: int,
    mode: str = "chunked",
    chunk_size: int = 32,
    reset: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[str, int, Tensor | None, Tensor | None]:
    """Mode, chunk_size, reset and valid of a call, with their defaults; ValueError for invalid ones."""
    require_mode(who, mode, chunk_size)
    for name, flag in (("reset", reset), ("valid", valid)):
        if flag is not None and (flag.dtype != torch.bool or flag.shape != (batch, length)):
            raise UsageError(f"{name}: {who}", f"bool [{batch}, {length}]", f"{flag.dtype} {list(flag.shape)}")
    return mode, chunk_size, reset, valid


def require_state(who: str, state: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """ValueError unless it is None, or a tensor, or a tuple of tensors, of these shapes, by name."""
    if state is None:
        return
    parts = (state,) if isinstance(state, Tensor) else state
    fits = isinstance(parts, tuple) and [getattr(x, "shape", None) for x in parts] == list(shapes.values())
    if not fits:
        wanted = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        got = ", ".join(map(kind_of, parts)) if isinstance(parts, tuple) else repr(parts)
        raise UsageError(f"state: {who}", wanted, got, "pass what an earlier call of it returned, or None")


def state_dtype(x: Tensor) -> torch.dtype:
    """The dtype of states: float32, or float64 if the tokens are float64."""
    return torch.promote_types(x.dtype, torch.float32)
