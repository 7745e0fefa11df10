"""Positions: integer coordinates of tokens, as users pass them and as encodings and attention use them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from longitude.errors import UsageError, check_choice
from longitude.native.derivatives import assert_later, numbers_of, readable, tracing
from longitude.native.tensors import needs_operator

Positions = int | Int[Tensor, " L"] | Int[Tensor, "B L"] | Int[Tensor, "B L axes"]
"""Integer coordinates; an int p means p, p+1, ... With several axes, [L] and [B, L] mean the same number on every axis."""
Some = TypeVar("Some", bound=Positions)


def constants(numbers: Sequence[float], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """A tensor of numbers; on a GPU copied once for all calls, because a copy waits and no CUDA graph can capture it."""
    if device is None or device.type == "cpu" or needs_operator():
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _copied(tuple(numbers), dtype, device)


@cache  # never evicted, because a CUDA graph may read it
@torch.inference_mode(False)
def _copied(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def explicit(positions: Positions, length: int, device: torch.device | None = None) -> Tensor:
    """Positions as a tensor: an int p becomes p, p+1, ... [length]; a tensor is returned as it is."""
    if isinstance(positions, int):
        return torch.arange(positions, positions + length, device=device)
    return positions


def canonical(name: str, positions: Positions, batch: int, length: int, axes: int = 1) -> Positions:
    """Positions in one form: an int, [L], [B, L]; or with several axes [B | 1, L, axes | 1].

    So no dimension is mistaken for another. ValueError for any other shape, for other numbers than integers, and for negative
    ones.
    """
    if isinstance(positions, bool) or not isinstance(positions, int | Tensor):
        raise UsageError(name, "integers of 0 or more, a tensor or an int to count from", repr(positions))
    if isinstance(positions, int):
        if positions < 0:
            raise UsageError(name, "integers of 0 or more", positions)
        return positions
    shape, lines = tuple(positions.shape), ((batch, length), (1, length))
    grids = [(*line, n) for line in lines for n in (1, axes)] if axes > 1 else []
    if axes > 1 and shape == (length, axes) == (batch, length):
        raise ValueError(
            f"{name}: {list(shape)} may mean [B, L] or [L, axes]; pass [{batch}, {length}, 1] or [1, {length}, {axes}]"
        )
    if axes > 1 and shape == (length, axes):
        positions = positions[None]
    elif axes > 1 and shape in lines:
        positions = positions[..., None]
    # Only tuples of one length: comparing others reads their first numbers, which is a guard on L in an exported graph.
    elif shape not in [allowed for allowed in ((length,), *lines, *grids) if len(allowed) == len(shape)]:
        with_axes = f", or with axes [{length}, {axes}] or [{batch}, {length}, {axes}]" if axes > 1 else ""
        raise UsageError(name, f"[{length}] or [{batch}, {length}]{with_axes}", list(shape))
    require_positions(positions, who=name)
    positions = positions.long()  # a length is the largest position + 1, which may overflow int32
    return positions[0] if positions.dim() == 2 and positions.shape[0] == 1 else positions


def require_positions(
    positions: Tensor, max_length: int | None = None, who: str = "positions", what: str = "positions", remedy: str = ""
) -> None:
    """ValueError unless positions are integers, none negative, none beyond max_length. what: the name of these numbers.

    Under torch.compile and on accelerators, where reading values would stop the device, values are checked by an
    asynchronous assertion.
    """
    if positions.dtype not in (torch.int64, torch.int32):
        raise UsageError(who, "integer positions", positions.dtype, "scale angles, not positions")
    positions = numbers_of(positions)
    valid = positions >= 0 if max_length is None else (positions >= 0) & (positions < max_length)
    bound = f"{what} 0 .. {max_length - 1}" if max_length else "positions of 0 or more"
    if torch.compiler.is_compiling() or positions.device.type != "cpu":
        assert_later(valid.all(), f"{who}: expected {bound}")
    elif not tracing() and not bool(valid.all()):
        raise UsageError(who, bound, f"{int(positions.min())} .. {int(positions.max())}", remedy)


def floor_divide(x: Tensor, by: int) -> Tensor:
    """Divide integers or floats and round down: x // by.

    A plain division gives wrong numbers in graphs of inductor for CPUs with a free length: it cuts the loop over x into blocks
    of `by` and computes whole blocks only (torch 2.11 to 2.15).
    """
    return (x - x.remainder(by)).div(by, rounding_mode="trunc")


def by_axis(positions: Tensor, axes: int, who: str) -> Tensor:
    """[L] or [B, L] -> [..., 1], the same number on every axis; [L, axes], [B, L, axes] and [B, L, 1] as they are."""
    if positions.dim() == 1 or positions.dim() == 2 and (axes == 1 or positions.shape[1] != axes):
        return positions[..., None]
    if positions.dim() == 2 or positions.dim() == 3 and positions.shape[2] in (1, axes):
        return positions
    raise UsageError(who, f"positions [L], [B, L] or [B, L, {axes}]", list(positions.shape))


def single_axis(who: str, positions: Some) -> Some:
    """Positions without a dimension for axes; ValueError if each token has several numbers."""
    if isinstance(positions, int) or positions.dim() < 3:
        return positions
    if positions.shape[-1] > 1:
        raise UsageError(f"positions: {who}", "[L] or [B, L], of one axis", list(positions.shape))
    return positions[..., 0]  # type: ignore[return-value]


def wide(device: torch.device) -> torch.dtype:
    """float64 if the device has it, else float32: the dtype of angles, slopes and fixed biases."""
    return torch.float32 if device.type == "mps" else torch.float64


# ---- parts of a stream ------------------------------------------------------------------------------------------------
def part_of(positions: Positions, batch: slice | list[int], part: slice) -> Positions:
    """Positions of some rows of the batch and some tokens."""
    if isinstance(positions, int):
        return positions + part.start
    if positions.dim() == 1:
        return positions[part]
    return (positions if positions.shape[0] == 1 else positions[batch])[:, part]


def following(first: Tensor, length: int) -> Tensor:
    """Positions of `length` tokens from `first` on: [1] -> [L], [B, 1] -> [B, L], [B, 1, 1] -> [B, L, 1]."""
    step = torch.arange(length, device=first.device)
    return first + (step[:, None] if first.dim() == 3 else step)


def as_int(positions: Positions) -> Positions:
    """The int from which positions [L] or [B, L] count up in every row, if reading them is free; else the positions."""
    if isinstance(positions, int) or positions.dim() > 2 or not positions.is_cpu or not readable(positions):
        return positions
    first = int(positions.flatten()[0])
    counted = positions == torch.arange(first, first + positions.shape[-1])
    return first if bool(counted.all()) else positions


def require_width(who: str, x: Tensor, dim: int) -> None:
    """UsageError unless x is [B, L, dim], the tokens that an encoding reads."""
    if x.dim() != 3 or x.shape[-1] != dim:
        raise UsageError(who, f"tokens x [B, L, {dim}]", list(x.shape))


def within(numbers: Tensor, first: int | None, last: int | None) -> Tensor:
    """Which numbers [...] are first .. last; None: unbounded."""
    inside = torch.ones_like(numbers, dtype=torch.bool) if first is None else numbers >= first
    return inside if last is None else inside & (numbers <= last)


# ---- text, images and videos -------------------------------------------------------------------------------------------
NextText = Literal["max", "extent"]


def multimodal_positions(segments: Sequence[int | tuple[int, int, int]], next_text: NextText = "max") -> Tensor:
    """Positions (time, height, width) of a sequence of text, images and videos.

    From a start s, text has s + i on all three coordinates; a grid has (s + frame, s + row, s + column).

    Example: multimodal_positions([3, (1, 2, 2), 2]): text at 0, 1, 2, an image from 3, text at 5, 6.

    Args:
        segments: segments in order: n for a text of n tokens, or (frames, height, width) for an image (frames = 1) or a video,
            in the model's tokens (after its merging of patches), frame by frame and row by row.
        next_text: start of the segment after a grid: "max", 1 + the largest coordinate so far, as published; or "extent", s +
            the larger of height and width, as in recent versions of transformers: a long video then overlaps the text after it.

    Returns:
        int64 [L, 3].

    Raises:
        ValueError: a segment that is neither, or counts below 1.

    Source:
        Wang et al. 2024 (Qwen2-VL), arXiv 2409.12191, https://arxiv.org/abs/2409.12191
    """
    check_choice("multimodal_positions", NextText, next_text=next_text)
    if not isinstance(segments, Sequence) or isinstance(segments, str):
        raise UsageError("multimodal_positions", "a list of texts, images and videos", repr(segments))
    start, positions = 0, [torch.empty(0, 3, dtype=torch.int64)]
    for segment in segments:
        counts = tuple(segment) if isinstance(segment, Sequence) else (segment,)
        if len(counts) not in (1, 3) or any(type(n) is not int or n < 1 for n in counts):
            expected = "a number of text tokens or (frames, height, width), each an int of 1 or more"
            raise UsageError("multimodal_positions", expected, repr(segment))
        if len(counts) == 1:
            positions.append(start + torch.arange(counts[0])[:, None].expand(-1, 3))
        else:
            positions.append(start + torch.cartesian_prod(*(torch.arange(n) for n in counts)))
        start += max(counts[1:] if len(counts) == 3 and next_text == "extent" else counts)
    return torch.cat(positions)
