"""Search of masks for spans: the intervals of queries and keys between which padding and documents allow attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.attention.masks import AllOf, AnyOf, Documents, Mask, Padding, Reach
from longitude.attention.patterns import Chunks


class Span(NamedTuple):
    """Queries q_from .. q_to-1 attend to keys k_from .. k_to-1 only; in order of the stream."""

    q_from: int
    q_to: int
    k_from: int
    k_to: int


def find_spans(
    masks: Sequence[Mask], batch: int, queries: range, keys: range, band: Reach
) -> list[tuple[list[int], list[Span]]] | str:
    """Sequences of the batch that share their spans, with these spans; or why there are none.

    masks: those that are more than a band; queries and keys: their orders in the stream; band: reach of the others.
    """
    stream = torch.arange(max(queries.stop, keys.stop))
    documents = [
        m.ids if isinstance(m, Documents) else m.ids(stream) for m in masks if isinstance(m, Documents | Chunks)
    ]
    valid = [m.valid for m in masks if isinstance(m, Padding)]
    if len(documents) + len(valid) < len(masks):
        return "the mask is more than causality, windows, chunks, padding and documents joined by &"
    alike = all(x.dim() == 1 or len(x) == 1 for x in (*documents, *valid))
    groups: dict[tuple[Span, ...], list[int]] = {}
    for b in range(1 if alike else batch):
        ids, real = ([x if x.dim() == 1 else x[b if len(x) > 1 else 0] for x in xs] for xs in (documents, valid))
        spans = _of_sequence(ids, real, queries, keys, band)
        if isinstance(spans, str):
            return spans
        groups.setdefault(spans, []).extend(range(batch) if alike else [b])
    return [(sequences, list(spans)) for spans, sequences in groups.items()]


def _of_sequence(
    documents: list[Tensor], valid: list[Tensor], queries: range, keys: range, band: Reach
) -> tuple[Span, ...] | str:
    """The spans of one sequence, ids and validity [stream]; or why there are none."""
    first, stop = keys.start, keys.stop
    if documents:  # queries need not be among the keys of a part
        first, stop = min(first, queries.start), max(stop, queries.stop)
    cuts = sorted({first, stop, *(cut for ids in documents for cut in _changes(ids) if first < cut < stop)})
    labels = list(zip(*(ids[cuts[:-1]].tolist() for ids in documents))) if documents else [()]
    if len(set(labels)) < len(labels):
        return "a document's tokens are not contiguous"
    runs = list(pairwise(cuts))
    if valid:
        visible = torch.stack([x[:stop].bool() for x in valid]).all(0)
        edges = sorted({*cuts, *(cut for cut in _changes(visible) if first < cut < stop)})
        runs = [run for run, real in zip(pairwise(edges), visible[edges[:-1]].tolist()) if real]
    among_keys = ((max(start, keys.start), min(end, keys.stop)) for start, end in runs)
    runs = [(start, end) for start, end in among_keys if start < end]
    parts, at = [], 0
    for start, end in pairwise(cuts):
        before = at
        while at < len(runs) and runs[at][0] < end:
            # Without documents every query of the stream attends to the one run of valid keys.
            parts.append(_trimmed(range(start, end) if documents else queries, *runs[at], queries, band))
            at += 1
        if at > before + 1:
            return "padding is in the middle of a sequence"
    return tuple(s for s in parts if s.q_from < s.q_to and s.k_from < s.k_to)


def _trimmed(document: range, k_from: int, k_to: int, queries: range, band: Reach) -> Span:
    """Cut a document's span: drop queries outside this call, and queries to which the band leaves none of these keys."""
    low, high = band
    q_from, q_to = max(document.start, queries.start), min(document.stop, queries.stop)
    if low is not None:
        q_from = max(q_from, k_from + low)
    if high is not None:
        q_to = min(q_to, k_to + high)
    return Span(q_from, q_to, k_from, k_to)


def _changes(x: Tensor) -> list[int]:
    return (torch.nonzero(x[1:] != x[:-1]).flatten() + 1).tolist()


def tensors_of(masks: Sequence[Mask]) -> Iterator[Tensor]:
    """All tensors of masks, and of those that they join."""
    for mask in masks:
        yield from tensors_of(mask.masks if isinstance(mask, AllOf | AnyOf) else ())
        yield from (x for x in vars(mask).values() if isinstance(x, Tensor))
