"""The task of text: a decoder predicts the next byte, or token."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from longitude.extend.search import windows_of
from longitude.measure import DocumentLosses, Row, losses_by_length
from longitude.measure.config import listed
from longitude.measure.documents import typical
from longitude.measure.text import default_bins
from longitude.measure.windows import nats_of
from longitude.report.wording import and_
from longitude.study.config import BYTE, RANGED, StudyConfig
from longitude.study.data import WINDOWS, Examples, StudyData, Windows
from longitude.study.results import BY_POSITION, COPIES, FAR, FIRST, LAST, NEAR
from longitude.study.schemes import (
    CANDIDATES,
    METHODS,
    PLAIN,
    TOKENS,
    extended_by,
    extended_on,
    extends,
    list_schemes,
    method_of,
    reader_of,
)
from longitude.study.tasks.base import Measuring, OnProgress, Task, register_task, sampler_of
from longitude.study.tokens import reader
from longitude.study.train import model_config

FEW = 64
"""Windows of the selection text on which the only learning rate of a study is tried."""
CONTEXT = 8
"""Bytes that must repeat for a copy to predict the next one."""


@register_task("text")
class Text(Task):
    """The next byte or token of a text, from those before it: bits per byte of held-out text."""

    metric, words, loss_unit = "bits_per_byte", "bits per byte", "byte"
    methods = (*PLAIN, COPIES)
    tokenized = True
    ngrams = (2, 3)

    def valid_methods(self) -> tuple[str, ...]:
        return (*self.methods, *list_schemes(), *METHODS)

    def prepare(self, config: StudyConfig) -> StudyData:
        schemes = schemes_of(config)
        if COPIES in config.methods and (config.tokenizer != BYTE or "non-overlapping" not in config.methods):
            selects = "--methods copies selects bytes of non-overlapping windows"
            raise ValueError(f"{selects}; add non-overlapping to --methods, and leave --tokenizer out")
        if schemes and config.positions in RANGED:
            trained = "models that were trained at contiguous positions"
            positions = f"--positions is {config.positions}; leave one of them out"
            raise ValueError(f"--methods {schemes[0]} extends {trained}, and {positions}")
        for scheme in schemes:
            if not any(extends(model_config(config, label), scheme, config.train_length) for label in config.encodings):
                extends_those = f"--methods {scheme} extends {extended_by(scheme)}"
                none = f"none of --encodings is such, got {listed(config.encodings)}"
                raise ValueError(f"{extends_those}, and {none}; add rope, or leave the method out")
        data = super().prepare(config)
        if any(method_of(scheme).searched for scheme in schemes):
            for length in beyond(config):
                windows_of(data.apart, length, TOKENS)  # raises ValueError for a short selection text
        return data

    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        return self.windows(config, data, seed)

    def windows(self, config: StudyConfig, data: StudyData, seed: int) -> Windows:
        """The windows of text that a seed is trained on, for this task and its subclasses."""
        examples = config.steps * config.batch_size
        documents = data.trainable(config.train_length)
        return Windows(documents, config.train_length, examples, seed, sampler_of(config))

    def selection(self, config: StudyConfig, data: StudyData) -> Examples:
        windows = data.selection(config.train_length)
        if len(config.learning_rates) == 1:
            windows = windows[:FEW]  # nothing is chosen by them: they show whether the last weights are finite
        return Windows(windows, config.train_length, len(windows), 0)

    def measure(self, of: Measuring) -> tuple[list[Row], list[pd.DataFrame]]:
        losses = self.losses(of)
        asked = [sums for sums in losses if sums.position_from is None or BY_POSITION in of.config.methods]
        rows = [sums.row(**of.labels) for sums in asked]
        tables = [
            of.per_document(sums.method, sums.window, nats=sums.nats, tokens=sums.tokens, bytes=sums.bytes)
            for sums in losses
            if sums.position_from is None
        ]
        return rows, [*tables, *self.quarters(of, losses)]

    def window(self, of: Measuring) -> pd.DataFrame | None:
        if not of.lengths:
            return None
        documents = of.data.validation
        ids = documents[typical(documents, of.config.longest)][: of.lengths[-1] + 1]
        text = reader(of.config.tokenizer).pieces(ids[1:].tolist())
        return pd.DataFrame({"text": text, "nats": nats_of(of.model, ids)})

    def quarters(self, of: Measuring, losses: list[DocumentLosses]) -> Iterator[pd.DataFrame]:
        """The losses at the first and the last quarter of the positions, at the training length."""
        length = of.config.train_length
        quarter = max(1, length // 4)
        bins = {(part.position_from, part.position_to): part for part in losses if part.window == length}
        for name, start, stop in ((FIRST, 0, quarter), (LAST, length - quarter, length)):
            inside = [part for (low, high), part in bins.items() if high and start <= (low or 0) and high <= stop]
            if inside:
                sums = {key: sum(getattr(part, key) for part in inside) for key in ("nats", "tokens", "bytes")}
                yield of.per_document(name, length, **sums)

    def losses(self, of: Measuring) -> list[DocumentLosses]:
        """Sums over each validation document, by length and method, and by position of the windows of every length."""
        config, trained = of.config, of.config.train_length
        plain = [method for method in config.methods if method in PLAIN]
        copies = foretold(of.data.validation, trained, config.longest) if COPIES in config.methods else None
        schemes = [scheme for scheme in schemes_of(config) if extends(of.model.config, scheme, trained)]
        searching = [scheme for scheme in schemes if method_of(scheme).searched]
        parts = 1 + len(schemes) * len(config.test_lengths) + len(searching) * len(beyond(config))
        part = count()

        def progress() -> OnProgress:
            i = next(part)
            return lambda done, total: of.on_progress(i * total + done, parts * total)

        losses = []
        if plain and of.lengths:
            every = losses_by_length(
                of.model,
                methods=[*dict.fromkeys((*plain, BY_POSITION))],
                selected=copies,
                lengths=of.lengths,
                stride=config.stride,
                bins=bins_of(of),
                progress=progress(),
                **same(of),
            )
            losses += [sums for sums in every if not sums.selected]
            losses += copied([sums for sums in every if sums.selected])
        for scheme, length in product(schemes, config.test_lengths):
            on_progress = progress() if scheme in searching and length > trained else of.on_progress
            model = extended_on(of.model, scheme, of.data.apart, trained, length, on_progress)
            [windows] = losses_by_length(
                model,
                methods=["non-overlapping"],
                lengths=[length],
                progress=progress(),
                reader=reader_of(model, scheme, trained, length),
                **same(of),
            )
            losses.append(replace(windows, method=scheme))
        return losses

    def left_out(self, of: Measuring) -> str | None:
        trained = of.config.train_length
        not_by = [scheme for scheme in schemes_of(of.config) if not extends(of.model.config, scheme, trained)]
        return f"is not extended by {and_(not_by)}" if not_by else None

    def measured_tokens(self, config: StudyConfig) -> int:
        schemes = len(schemes_of(config)) * config.documents * config.longest * len(config.test_lengths)
        searches = len(beyond(config)) * sum(method_of(scheme).searched for scheme in schemes_of(config))
        return WINDOWS * (super().measured_tokens(config) + schemes) + searches * CANDIDATES * TOKENS


def copied(losses: list[DocumentLosses]) -> list[DocumentLosses]:
    """Losses on copied bytes, for the documents that have near and far ones: the same for every label and length."""
    have = np.all([copies.tokens > 0 for copies in losses], axis=0)
    if not losses or not have.any():
        return []
    sums = [(copies, copies.nats[have], copies.tokens[have]) for copies in losses]
    return [
        replace(copies, method=copies.selected, selected=None, nats=nats, tokens=tokens, bytes=tokens)
        for copies, nats, tokens in sums
    ]


def schemes_of(config: StudyConfig) -> list[str]:
    """The methods that extend a model."""
    return [method for method in config.methods if method not in (*PLAIN, COPIES)]


def beyond(config: StudyConfig) -> list[int]:
    """The tested lengths that a model has to be extended for."""
    return [length for length in config.test_lengths if length > config.train_length]


def same(of: Measuring) -> dict[str, Any]:
    """Arguments of `losses_by_length` that make every length and method score the same tokens."""
    span, token_bytes = of.config.test_lengths[-1], of.data.token_bytes or 1
    return {"documents": of.data.validation, "span": span, "token_bytes": token_bytes}


def bins_of(of: Measuring) -> dict[int, list[int]]:
    """Edges of positions in windows of each length; at the training length with the quarters."""
    bins = {length: default_bins(length) for length in of.lengths}
    if (trained := of.config.train_length) in bins:
        quarter = max(1, trained // 4)
        bins[trained] = sorted({*bins[trained], quarter, trained - quarter})
    return bins


# ---- copies ----------------------------------------------------------------------------------------------------------
def distances(ids: np.ndarray) -> np.ndarray:
    """Distance of each byte from the earlier byte that predicts it; 0 if there is none. Bytes [n] -> int64 [n]."""
    back = np.zeros(len(ids), np.int64)
    if len(ids) <= CONTEXT:
        return back
    before = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint8), CONTEXT)[:-1]
    codes = np.ascontiguousarray(before).view(np.uint64)[:, 0]
    order = np.argsort(codes, kind="stable")  # equal contexts side by side, in the order of the text
    repeats = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    here, last = order[repeats + 1] + CONTEXT, order[repeats] + CONTEXT
    right = ids[here] == ids[last]
    back[here[right]] = (here - last)[right]
    return back


def foretold(documents: Sequence[Tensor], trained: int, longest: int) -> dict[str, list[Tensor]]:
    """Bytes of documents that a near copy and a far copy predict, bool [n] each.

    A copy predicts a byte if the 8 bytes before it occur earlier in its document, and the byte after their last occurrence is
    the same. The copy is near if that byte is within the training length, and far if it is beyond, but within the longest
    length. Losses on them show whether a model copies at all, and whether from far back. Compare each kind with itself at
    another length: near copies are easier bytes than far ones, even without positions.
    """
    every = [torch.from_numpy(distances(document.numpy())) for document in documents]
    between = {NEAR: (0, trained), FAR: (trained, longest)}
    return {name: [(back > above) & (back <= last) for back in every] for name, (above, last) in between.items()}
