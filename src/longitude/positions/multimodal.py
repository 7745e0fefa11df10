"""Where the tokens of text, images and videos stand: three coordinates each, for multimodal rotation."""

from collections.abc import Sequence

import torch
from torch import Tensor


def multimodal_positions(segments: Sequence[int | tuple[int, int, int]], next_text: str = "max") -> Tensor:
    """Positions (time, height, width) of a stream of text, images and videos -> int64 [L, 3]  (Wang et al. 2024, Qwen2-VL).

    segments, in their order: n, a text of n tokens, or (frames, height, width), an image (frames = 1) or a video, counted in
    the tokens that the model sees (after its merging of patches), frame by frame and row by row. From a start s, text has
    s + i on all three coordinates; a grid has (s + frame, s + row, s + column).

    next_text: what follows a grid starts at "max", 1 + the largest coordinate so far, as published; or at "extent", s + the
    larger of height and width, which recent versions of transformers do: a long video then reaches beyond the text after it.

    Example: multimodal_positions([3, (1, 2, 2), 2]): text at 0, 1, 2, an image from 3, text at 5, 6.
    """
    if next_text not in ("max", "extent"):
        raise ValueError(f"multimodal_positions: expected next_text 'max' or 'extent', got {next_text!r}")
    if not isinstance(segments, Sequence) or isinstance(segments, str):
        raise ValueError(f"multimodal_positions: expected a list of texts, images and videos, got {segments!r}")
    start, found = 0, [torch.empty(0, 3, dtype=torch.int64)]
    for segment in segments:
        counts = tuple(segment) if isinstance(segment, Sequence) else (segment,)
        if len(counts) not in (1, 3) or any(type(n) is not int or n < 1 for n in counts):
            raise ValueError(
                "multimodal_positions: expected a number of text tokens or (frames, height, width), each an int of 1 or "
                f"more, got {segment!r}"
            )
        if len(counts) == 1:
            found.append(start + torch.arange(counts[0])[:, None].expand(-1, 3))
            start += counts[0]
        else:
            found.append(start + torch.cartesian_prod(*(torch.arange(n) for n in counts)))
            start += max(counts) if next_text == "max" else max(counts[1:])
    return torch.cat(found)
