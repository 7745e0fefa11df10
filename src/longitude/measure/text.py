"""Loss of a causal language model by length, by window and by position, from the same target tokens every time.

A document of n tokens gives N = floor((n - 1) / span) * span targets, tokens 1..N, where span is the longest length.
For every length and every method except the last, each of these N targets is scored exactly once, so that rows differ only in
the context of a target:

* non-overlapping, window W: inputs sW..sW+W-1 predict targets sW+1..sW+W. A target has from 1 to W tokens of context.
* sliding, window W and stride S: the window moves by S; the first scores all its targets, each later one the last S.
  A target past the first window has from W-S+1 to W tokens of context. S = W is non-overlapping.
* per-position: the non-overlapping losses of the longest length, averaged by position in the window.
* same-targets, K targets: a window of W inputs ends with the last K targets of every span and scores those alone. A target
  has from W-K+1 to W tokens of context. It scores K targets of every span, not all N.

If the windows do not fill N, the last one of a document begins where the next window would, and is shorter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor, int64, nn

from longitude.errors import UsageError, check_choice, check_sizes
from longitude.measure.config import (
    METHODS,
    SAME_TARGETS,
    TARGETS,
    Method,
    check_ascending,
    check_methods,
    checked_lengths,
)  # fmt: skip
from longitude.measure.rows import Row, check_labels
from longitude.measure.windows import Progress, Reader, plan_ends, plan_windows, score
from longitude.statistics.documents import interval

_PROTOCOL = ("metric", "method", "window", "stride", "position_from", "position_to", "truncation", "dtype")
"""Columns of `Row` that are attributes of `DocumentLosses`."""


@dataclass(frozen=True, kw_only=True)
class DocumentLosses:
    """Sums over the scored targets of each document, for a protocol; a `Row` before averaging.

    Attributes:
        nats: [documents] float64, sums of -ln p(target | context in its window); NaN or inf if the model returned such.
        tokens: [documents] int64, number of scored targets.
        bytes: [documents] int64, bytes of the scored targets; None if tokens have no length in bytes.
        method: As the column of `Row`, like the others below.
        window: Input tokens of a window.
        stride: Tokens the window moved by.
        position_from: First position averaged over.
        position_to: One after the last.
        truncation: Treatment of text that did not fill the windows.
        dtype: Data type of the model's weights.
        selected: Name of the only targets that were counted; None for all targets.
    """

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray | None = None
    method: str
    window: int
    stride: int
    position_from: int | None = None
    position_to: int | None = None
    truncation: str
    dtype: str
    selected: str | None = None

    @property
    def metric(self) -> str:
        """Its name: "bits_per_byte" if bytes are known, else "perplexity"."""
        return "perplexity" if self.bytes is None else "bits_per_byte"

    @property
    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """(nats, weights) of the metric, as `interval` and `paired_difference` accept them."""
        return self.nats, self.tokens if self.bytes is None else self.bytes

    def row(self, *, bootstrap_seed: int = 0, **labels: Any) -> Row:
        """The metric over all documents with its 95% bootstrap interval.

        Args:
            bootstrap_seed: Random seed of the bootstrap.
            labels: Other columns of `Row`: `LABELS`.

        Returns:
            One row.

        Raises:
            ValueError: For an unknown label.
        """
        check_labels(labels)
        value, low, high = interval(*self.sums, metric=self.metric, seed=bootstrap_seed)
        columns: dict[str, Any] = {"task": "text", "bos": "none"} | labels
        return Row(
            **columns,
            **{name: getattr(self, name) for name in _PROTOCOL},
            length=self.window,
            weighting="token",
            documents=len(self.nats),
            tokens=int(self.tokens.sum()),
            count=int(self.sums[1].sum()),
            value=value,
            low=low,
            high=high,
        )


def losses_by_length(
    model: nn.Module,
    documents: Sequence[Tensor],
    *,
    lengths: Sequence[int],
    methods: Sequence[str] = METHODS,
    stride: int | None = None,
    targets: int | None = None,
    span: int | None = None,
    token_bytes: Sequence[Tensor] | int | None = None,
    bins: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
    batch_tokens: int = 16384,
    progress: Progress | None = None,
    reader: Reader | None = None,
    selected: Mapping[str, Sequence[Tensor]] | None = None,
) -> list[DocumentLosses]:
    """The loss of any causal Hugging Face model by length, as sums over each document; `row()` of each averages them.

    The sums serve paired comparisons, too. The metric of a row is "bits_per_byte" with `token_bytes`, "perplexity" without.

    Args:
        model: Anything that answers model(input_ids=[B, T] int64, use_cache=False) with causal .logits [B, T, vocab]. Run
            without gradients and in eval mode; the training mode of every submodule is restored.
        documents: 1-D int64 tensors, each of at least span + 1 tokens.
        lengths: Windows in tokens, strictly ascending.
        methods: Any of "non-overlapping", "sliding", "per-position", "same-targets".
        stride: Step of the sliding windows, 1 to the shortest length; None for half of each window.
        targets: Tokens of each span that "same-targets" scores, 1 to the shortest length; None: `targets_of`.
        span: Targets per document are a multiple of it; at least the longest length, which is the default. Pass the same
            span for models measured at different lengths to compare them on the same targets.
        token_bytes: For each document, the bytes of its tokens, int64; or one number for all, 1 for models of bytes.
        bins: Ascending edges of the per-position averages, within 0..longest length; None: `default_bins`. For other
            windows than the longest: {window: edges}.
        batch_tokens: Input tokens per forward pass; the logits of a pass, batch_tokens * vocab numbers, are its memory.
        progress: Called as progress(done, total), in input tokens, after every forward pass.
        reader: How the model reads a window; one pass by default, `Bounded` of longitude.measure.windows for long ones.
        selected: Name -> for each document, which tokens count in an additional entry per length, bool [tokens].

    Returns:
        The sums, one entry per method and length, then one per bin of positions, then those of selected tokens, one per
        length of windows that do not overlap.

    Raises:
        ValueError: For arguments that are not as described.
    """
    lengths = checked_lengths(lengths)
    span = lengths[-1] if span is None else span
    edges = _edges(bins, lengths)
    check_choice("measure", Method, **{f"methods[{i}]": method for i, method in enumerate(methods)})
    check_methods("", lengths, methods, stride, targets)
    ending = targets_of(lengths) if targets is None else targets
    sizes = {"span": span, "batch_tokens": batch_tokens, "targets": ending}
    check_sizes("measure", **sizes, stride=lengths[0] if stride is None else stride)
    if span < lengths[-1]:
        raise UsageError("span", f"at least the longest length {lengths[-1]}", span, "leave it out or raise it")
    _check_documents(documents, span)
    counts = [(len(document) - 1) // span * span for document in documents]
    weights = {"tokens": [np.ones(count, dtype=np.int64) for count in counts]}
    if token_bytes is not None:
        weights["bytes"] = _bytes(documents, counts, token_bytes)

    flat = lengths if "non-overlapping" in methods else sorted(edges) if "per-position" in methods else []
    passes = [("non-overlapping", length, length) for length in flat]
    passes += [("sliding", length, stride or max(1, length // 2)) for length in lengths if "sliding" in methods]
    passes += [(SAME_TARGETS, length, span) for length in lengths if SAME_TARGETS in methods]
    plans = [
        plan_ends(counts, window, ending, span) if method == SAME_TARGETS else plan_windows(counts, window, step)
        for method, window, step in passes
    ]
    scores = score(model, documents, counts, plans, batch_tokens, progress, reader)
    dtype = str(next((weight.dtype for weight in model.parameters()), "unknown")).removeprefix("torch.")
    results, positions, chosen = [], [], []
    for (method, window, step), nats in zip(passes, scores, strict=True):
        along = {"nats": nats} | weights
        protocol: dict[str, Any] = {"window": window, "stride": step, "dtype": dtype}
        protocol["truncation"] = f"tail dropped to a multiple of {span} targets"
        if method == SAME_TARGETS:
            scored = [np.arange(count) % span >= span - ending for count in counts]
            along = {name: _of_each(values, scored) for name, values in along.items()}
            protocol |= {"position_from": window - ending, "position_to": window}
            protocol["truncation"] = f"the last {ending} targets of every {span}"
        if method in methods:
            sums = {name: np.array([values.sum() for values in columns]) for name, columns in along.items()}
            results.append(DocumentLosses(**sums, method=method, **protocol))
        if method != "non-overlapping":
            continue
        for name, masks in (selected or {}).items():
            masks = [mask[1 : count + 1].numpy() for mask, count in zip(masks, counts, strict=True)]
            sums = {"nats": np.array([values.sum() for values in _of_each(nats, masks)])}
            sums["tokens"] = np.array([mask.sum() for mask in masks], dtype=np.int64)
            chosen.append(DocumentLosses(**sums, method=method, selected=name, **protocol))
        if "per-position" in methods and window in edges:
            profiles = {name: np.stack([_profile(values, window) for values in along[name]]) for name in along}
            for start, stop in pairwise(edges[window]):
                sums = {name: profile[:, start:stop].sum(1) for name, profile in profiles.items()}
                bounds = {"position_from": start, "position_to": stop}
                positions.append(DocumentLosses(**sums, method="per-position", **bounds, **protocol))
    return results + positions + chosen


def _edges(bins: Sequence[int] | Mapping[int, Sequence[int]] | None, lengths: list[int]) -> dict[int, list[int]]:
    """Window -> ascending edges of the averages by position in it. UsageError for edges outside of it."""
    if not isinstance(bins, Mapping):
        bins = {lengths[-1]: default_bins(lengths[-1]) if bins is None else bins}
    edges = {window: [int(edge) for edge in bounds] for window, bounds in bins.items()}
    for window, bounds in edges.items():
        if window not in lengths:
            raise UsageError("bins", f"windows among the lengths {lengths}", window)
        check_ascending("bins", bounds, 0, window)
        if len(bounds) < 2:
            raise UsageError("bins", "at least two edges", bounds)
    return edges


def _of_each(documents: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values [n] of each document where its mask [n] is true."""
    return [values[mask] for values, mask in zip(documents, masks, strict=True)]


def targets_of(lengths: Sequence[int]) -> int:
    """Default number of targets per span for same-targets, for windows of these lengths, ascending."""
    return min(TARGETS, max(1, lengths[0] // 2))


def default_bins(length: int) -> list[int]:
    """Edges of position bins: 0, 1, 2, 4, 8, then two per octave (16, 24, 32, 48, ...).

    Args:
        length: The last edge.

    Returns:
        Ascending edges.
    """
    edges = [0, 1, 2, 4, 8]
    while edges[-1] < length:
        octave = 2 ** (edges[-1].bit_length())
        edges += [octave, octave * 3 // 2]
    return [edge for edge in edges if edge < length] + [length]


def _check_documents(documents: Sequence[Tensor], span: int) -> None:
    if len(documents) == 0:
        raise UsageError("documents", "at least one document", "none", "pass a sequence of 1-D token tensors")
    for index, document in enumerate(documents):
        if not isinstance(document, Tensor) or document.ndim != 1 or document.dtype != int64:
            got = f"{document.dtype} {list(document.shape)}" if isinstance(document, Tensor) else type(document)
            raise UsageError(f"document {index}", "a 1-D int64 tensor of token ids", got)
        if len(document) < span + 1:
            raise ValueError(
                f"document {index} has {len(document)} tokens, but the longest window needs {span + 1}: {span} and the "
                f"token after them; join short documents, leave this one out, or ask for shorter lengths"
            )


def _profile(values: np.ndarray, window: int) -> np.ndarray:
    """Values [N] along a document -> sums [window] by position in the window (the last window may be shorter)."""
    return np.pad(values, (0, -len(values) % window)).reshape(-1, window).sum(0)


def _bytes(documents: Sequence[Tensor], counts: list[int], token_bytes: Sequence[Tensor] | int) -> list[np.ndarray]:
    """Bytes of every scored target, one int64 array per document."""
    if isinstance(token_bytes, int):
        check_sizes("measure", token_bytes=token_bytes)
        return [np.full(count, token_bytes, dtype=np.int64) for count in counts]
    shapes, expected = ([list(tensor.shape) for tensor in tensors] for tensors in (token_bytes, documents))
    if shapes != expected:
        raise UsageError("token_bytes of each document", f"its shape, {expected[:3]} ...", f"{shapes[:3]} ...")
    return [sizes[1 : count + 1].cpu().numpy() for sizes, count in zip(token_bytes, counts, strict=True)]
