"""Bytes that a copy predicts: losses on them show whether a model copies at all, and whether it copies from far back.

A copy predicts a byte if the 8 bytes before it occur earlier in its document, and the byte after their last occurrence is the
same. The copy is near if that byte is within the training length, and far if it is beyond, but within the longest length.
Compare each kind with itself at another length: near copies are easier bytes than far ones, even without positions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

COPIES, NEAR, FAR = "copies", "near copy", "far copy"
"""The method of --methods, and the two kinds of bytes that it measures."""
CONTEXT = 8
"""Bytes that must repeat."""


def distances(ids: np.ndarray) -> np.ndarray:
    """Distance of each byte from the earlier byte that predicts it; 0 if there is none. Bytes [n] -> int64 [n]."""
    back = np.zeros(len(ids), np.int64)
    if len(ids) <= CONTEXT:
        return back
    before = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint8), CONTEXT)[:-1]
    codes = np.ascontiguousarray(before).view(np.uint64)[:, 0]
    order = np.argsort(codes, kind="stable")  # equal contexts side by side, in the order of the text
    same = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    here, last = order[same + 1] + CONTEXT, order[same] + CONTEXT
    right = ids[here] == ids[last]
    back[here[right]] = (here - last)[right]
    return back


def foretold(documents: Sequence[Tensor], trained: int, longest: int) -> dict[str, list[Tensor]]:
    """Bytes of documents that a near copy and a far copy predict, bool [n] each."""
    every = [torch.from_numpy(distances(document.numpy())) for document in documents]
    between = {NEAR: (0, trained), FAR: (trained, longest)}
    return {name: [(each > above) & (each <= last) for each in every] for name, (above, last) in between.items()}
