"""Positions of text, images and videos: three coordinates each, for multimodal rotation."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from longitude.errors import UsageError, check_choice

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
            raise UsageError(
                "multimodal_positions",
                "a number of text tokens or (frames, height, width), each an int of 1 or more",
                repr(segment),
            )
        if len(counts) == 1:
            positions.append(start + torch.arange(counts[0])[:, None].expand(-1, 3))
        else:
            positions.append(start + torch.cartesian_prod(*(torch.arange(n) for n in counts)))
        start += max(counts[1:] if len(counts) == 3 and next_text == "extent" else counts)
    return torch.cat(positions)
