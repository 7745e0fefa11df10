"""Bits per byte of a checkpoint at one length, with bounded memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.checkpoints.config import rope_types
from longitude.checkpoints.load import Checkpoint, one_line_of
from longitude.measure.documents import Documents
from longitude.measure.text import DocumentLosses, losses_by_length
from longitude.measure.windows import Bounded, Progress, evaluating
from longitude.positions.base import Encoding

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""How far logits of the same tokens may be apart when they are read in pieces, in the largest logit; else 5e-2."""
FOLLOWING = ("dynamic", "longrope")
"""Rotary types of transformers whose frequencies depend on the longest position of a call."""


@dataclass(frozen=True)
class Reading:
    """How a checkpoint reads windows: in pieces with its cache, or in one pass and why. finite: whether it answers at all."""

    reader: Bounded
    reason: str | None
    finite: bool = True

    def words(self, width: int) -> str:
        size = self.reader.size
        if self.reason is not None:
            return f"one pass: {self.reason}"
        return f"pieces of {size} with the cache" if size is not None and size < width else "one pass"


def follows_length(model: Any) -> str | None:
    """Why pieces of a text would be read with other positions than the whole; None where they would not."""
    for module in model.modules():
        if isinstance(module, Encoding) and module.length_at(0, 0) != module.length_at(0, 2**40):
            return "its positions follow the length of the whole sequence"
    for kind in rope_types(model.config):
        if kind in FOLLOWING:
            return f"its rotary frequencies follow the length ({kind})"
    return None


def reading_of(model: Any, piece: int) -> Reading:
    """Pieces of `piece` tokens, where the model reads a text in pieces as it reads it whole. ValueError: it is not causal.

    A few random tokens are read both ways. A model that reads them otherwise in pieces, or keeps no cache, reads windows in
    one pass.
    """
    reason = follows_length(model)
    restart = "dynamic" in rope_types(model.config)
    ids, size = _probe(model)
    with evaluating(model):
        whole, first = (model(input_ids=some, use_cache=False).logits for some in (ids, ids[:, :size]))
        scale = TOLERANCE.get(model.dtype, 5e-2) * float(whole.abs().max())
        if not _near(whole[:, :size], first, scale):
            raise ValueError(
                f"{type(model).__name__} is not causal: its answer for a token depends on later ones, so that its perplexity "
                f"has no meaning; take a model that predicts the next token"
            )
        reason = reason or _unlike(model, ids, size, whole, scale)
    finite = bool(whole.isfinite().all())
    return Reading(Bounded(model, None if reason else piece, restart=restart), reason, finite)


def _probe(model: Any) -> tuple[Tensor, int]:
    """Random tokens [1, 3 * size], and the size of a piece: past a sliding window, where that is cheap."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    size = max(8, window) if window <= 256 else 8
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.get_input_embeddings().weight.shape[0], (1, 3 * size), generator=generator)
    return ids.to(model.device), size


def _unlike(model: Any, ids: Tensor, size: int, whole: Tensor, scale: float) -> str | None:
    """Why ids in pieces are not read as the whole; None where they are."""
    cache, answers = None, []
    for some in ids.split(size, dim=1):
        try:
            answer = model(input_ids=some, past_key_values=cache, use_cache=True)
        except Exception as error:  # whatever a model raises that does not know how to go on
            return f"with its cache it stops ({one_line_of(error)})"
        cache = getattr(answer, "past_key_values", None)
        if cache is None:
            return "it keeps no cache of keys and values"
        answers.append(answer.logits)
    near = _near(whole, torch.cat(answers, dim=1), scale)
    return None if near else "in pieces, with its cache, it answers otherwise than in one pass"


def _near(a: Tensor, b: Tensor, scale: float) -> bool:
    difference = (a - b).abs()
    return (
        not bool(difference.isfinite().all()) or float(difference.max()) <= scale
    )  # a diverged model is no cache's fault


def measure(
    checkpoint: Checkpoint,
    documents: Documents,
    reading: Reading,
    *,
    length: int,
    methods: tuple[str, ...],
    stride: int | None,
    batch: int,
    progress: Progress | None = None,
) -> list[DocumentLosses]:
    """The sums per document at one length; all lengths of a measurement score the same targets of every document."""
    return losses_by_length(
        checkpoint.model,
        documents.ids,
        lengths=[length],
        methods=methods,
        stride=stride,
        span=len(documents.ids[0]) - 1,
        token_bytes=documents.bytes,
        batch_tokens=batch,
        progress=progress,
        reader=reading.reader,
    )
