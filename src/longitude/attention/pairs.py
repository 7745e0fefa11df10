"""Pairs of queries and keys that a mask allows, as backends read them: a band, spans of documents, numbers of visible keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from longitude.attention.masks import Ago, AllOf, AnyOf, Band, Causal, Chunks, Documents, Mask, Padding, Reach, Window
from longitude.native.derivatives import readable, tracing

Result = TypeVar("Result")


def is_band(mask: Mask) -> bool:
    """Whether a mask is fully described by its reach (a band of offsets in default order)."""
    return isinstance(mask, Causal | Window | Band | Ago)


def band_of(mask: Mask) -> AllOf:
    """Band parts of a mask, joined."""
    return AllOf(tuple(m for m in mask.parts() if is_band(m)))


class AllowedPairs:
    """Pairs of queries and keys that a mask allows, in the form that backends read.

    Layers of a forward share it, so that spans are computed once.
    band: reach of the mask's band parts, which are causality and windows in default order. beyond_band: the other parts: spans
    (documents, padding) and arbitrary predicates. q_order, k_order: order of the first query and key.
    """

    def __init__(self, mask: Mask, batch: int, rows: int, keys: int, q_order: int, k_order: int = 0):
        self.mask, self.batch, self.rows, self.keys = mask, batch, rows, keys
        self.q_order, self.k_order = q_order, k_order
        parts = mask.parts()
        self.beyond_band = tuple([m for m in parts if not is_band(m)])
        self.band = parts[0].reach if len(parts) == 1 and not self.beyond_band else band_of(mask).reach
        self.results: dict[Any, Any] = {}

    def fit(self, mask: Mask, batch: int, rows: int, keys: int, q_order: int, k_order: int) -> bool:
        """Whether they are the pairs of this mask, batch, and lengths and orders."""
        same = self.batch == batch and self.rows == rows and self.keys == keys
        return same and self.mask is mask and self.q_order == q_order and self.k_order == k_order

    def once(self, make: Callable[..., Result], *reads: Any) -> Result:
        """Return make(self, *reads), computed once for equal `reads`."""
        if torch.compiler.is_compiling():
            return make(self, *reads)
        if (make, reads) not in self.results:
            self.results[make, reads] = make(self, *reads)
        return self.results[make, reads]

    @property
    def spans(self) -> list[tuple[list[int], list[Span]]] | str:
        """Sequences of the batch that share their spans, with these spans; or why there are none."""
        if torch.compiler.is_compiling():
            return "where padding and documents begin is not known while compiling"
        if not readable(*tensors_of(self.beyond_band)):
            return "where padding and documents begin is not known under torch.func.vmap"
        return self.once(find_spans)


# ---- spans: intervals of queries and keys between which padding and documents allow attention -------------------------------
class Span(NamedTuple):
    """Queries q_from .. q_to-1 attend to keys k_from .. k_to-1 only; in order of the stream."""

    q_from: int
    q_to: int
    k_from: int
    k_to: int


def find_spans(pairs: AllowedPairs) -> list[tuple[list[int], list[Span]]] | str:
    """Sequences of the batch that share their spans, with these spans; or why there are none."""
    masks, batch, band = pairs.beyond_band, pairs.batch, pairs.band
    queries, keys = (range(first, first + n) for first, n in ((pairs.q_order, pairs.rows), (pairs.k_order, pairs.keys)))
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


# ---- numbers of visible keys -----------------------------------------------------------------------------------------------
BLOCK = 2**24
"""Pairs of a dense mask that are counted at once."""


def visible_keys(pairs: AllowedPairs, device: torch.device) -> Tensor:
    """Number of visible keys of each query, int64 [1 or B, Lq]; pairs: those of a whole call, with key orders from 0 on.

    O(L) for causality and windows. Any other mask is summed in blocks of queries.
    """
    queries = torch.arange(pairs.q_order, pairs.q_order + pairs.rows, device=device)
    if pairs.beyond_band:
        keys = torch.arange(pairs.keys, device=device)
        # The number of blocks would be a guard on the length in a graph.
        blocks = [queries] if tracing() else queries.split(max(1, BLOCK // (pairs.batch * pairs.keys)))
        counts = torch.cat([pairs.mask.allowed(block, keys).sum(-1) for block in blocks], -1)  # [Lq] or [B, 1, Lq]
    else:
        low, high = pairs.band
        first = 0 if high is None else (queries - high).clamp(0, pairs.keys)
        stop = torch.full_like(queries, pairs.keys) if low is None else (queries - low + 1).clamp(0, pairs.keys)
        counts = (stop - first).clamp(min=0)
    return counts.view(-1, pairs.rows)
