"""What a measurement refuses before it runs: documents, lengths, methods, strides, bins and labels."""

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

from torch import Tensor, int64

from longitude.errors import unknown
from longitude.measure.config import METHODS

LABELS = tuple("task model encoding label seed train_length train_positions bos backend commit prefill".split())
"""Columns of `Row` that a caller may fill."""


def check_documents(documents: Sequence[Tensor], span: int) -> None:
    if len(documents) == 0:
        raise ValueError("documents must hold at least one document, got none; pass a sequence of 1-D token tensors")
    for index, document in enumerate(documents):
        if not isinstance(document, Tensor) or document.ndim != 1 or document.dtype != int64:
            got = f"{document.dtype} {list(document.shape)}" if isinstance(document, Tensor) else type(document)
            raise ValueError(f"document {index} must be a 1-D int64 tensor of token ids, got {got}")
        if len(document) < span + 1:
            raise ValueError(
                f"document {index} has {len(document)} tokens, but the longest window needs {span + 1}: {span} and the "
                f"token after them; join short documents, leave this one out, or ask for shorter lengths"
            )


def check_labels(labels: dict[str, Any]) -> None:
    for name in labels:
        if name not in LABELS:
            raise unknown("label", name, LABELS, "The columns a caller fills are in longitude.measure.checks.LABELS.")


def positive(name: str, value: int) -> int:
    """The value; ValueError unless it is an integer from 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def checked_lengths(lengths: Sequence[int]) -> list[int]:
    lengths = [positive("each of lengths", length) for length in lengths]
    if not lengths:
        raise ValueError("lengths must name at least one length in tokens, got none")
    if any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(f"lengths must be strictly ascending, got {lengths}; sort them and drop repeats")
    return lengths


def checked_methods(methods: Sequence[str]) -> list[str]:
    if isinstance(methods, str) or not methods or len(set(methods)) < len(methods):
        raise ValueError(f"methods must be a sequence of different names, got {methods!r}; valid: {', '.join(METHODS)}")
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS, "They are explained in longitude.measure.text.")
    return list(methods)


def checked_stride(stride: int | None, window: int) -> int:
    if stride is None:
        return max(1, window // 2)
    if positive("stride", stride) > window:
        raise ValueError(
            f"stride must be 1 to the window, got stride {stride} for window {window}; text would be skipped"
        )
    return int(stride)


def checked_bins(bins: Sequence[int], longest: int) -> list[int]:
    edges = [int(edge) for edge in bins]
    if len(edges) < 2 or any(a >= b for a, b in pairwise(edges)) or edges[0] < 0 or edges[-1] > longest:
        raise ValueError(f"bins must be at least two strictly ascending edges within 0..{longest}, got {edges}")
    return edges
