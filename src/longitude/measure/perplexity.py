"""How a checkpoint reads long windows in bounded memory: in chunks with its cache, if that gives the same logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.checkpoints.declared import rope_types
from longitude.checkpoints.load import one_line_of
from longitude.measure.windows import Bounded, Reader, evaluating
from longitude.models.stock_caches import cache_name
from longitude.positions.base import Encoding
from longitude.positions.composed import compose

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference of logits between a full pass and chunks, relative to the largest logit; other dtypes: 5e-2.

Some models compute the softmax in float32 even for float64 (BLOOM).
"""
FOLLOWING = ("dynamic", "longrope")
"""Rotary types of transformers with frequencies that depend on the longest position of a call."""


@dataclass(frozen=True)
class Reading:
    """How a checkpoint reads windows: in chunks with its cache, or in one pass and why. finite: whether its logits are."""

    reader: Reader
    reason: str | None
    finite: bool

    def described(self, width: int) -> str:
        """For the column `prefill` of a row."""
        return f"one pass: {self.reason}" if self.reason is not None else described(self.reader.size, width)


def described(chunk: int | None, width: int) -> str:
    """How a window of `width` tokens is read."""
    return f"chunks of {chunk} with the cache" if chunk is not None and chunk < width else "one pass"


def follows_length(model: Any) -> str | None:
    """Why chunks of a text would have other positions than the whole text; None if they would not."""
    for module in model.modules():
        if isinstance(module, Encoding) and (at := compose(module).length_at)(0, 0) != at(0, 2**40):
            return "its positions follow the length of the whole sequence"
    following = [kind for kind in rope_types(model.config) if kind in FOLLOWING]
    return f"its rotary frequencies follow the length ({following[0]})" if following else None


def reading_of(model: Any, chunk: int, bos: int | None = None) -> Reading:
    """Chunks of `chunk` tokens, if the model's logits are the same in chunks as in one pass. ValueError: it is not causal.

    A few random tokens are read both ways. A model with other logits in chunks, or without a cache, reads windows in one pass.
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
    return Reading(Bounded(model, None if reason else chunk, restart=restart, bos=bos), reason, finite)


def _probe(model: Any) -> tuple[Tensor, int]:
    """Random tokens [1, 3 * size], and the size of a chunk: at least a sliding window, if that is short."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    size = max(8, window) if window <= 256 else 8
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.get_input_embeddings().weight.shape[0], (1, 3 * size), generator=generator)
    return ids.to(model.device), size


def _unlike(model: Any, ids: Tensor, size: int, whole: Tensor, scale: float) -> str | None:
    """Why ids cannot be read in chunks with the logits of one pass; None if they can."""
    cache, answers, name = None, [], cache_name(model) or "cache"
    for some in ids.split(size, dim=1):
        try:
            answer = model(input_ids=some, **{name: cache}, use_cache=True)
        except Exception as error:  # whatever a model raises that cannot continue
            return f"with its cache it stops ({one_line_of(error)})"
        cache = getattr(answer, name, None)
        if cache is None:
            return "it keeps no cache of keys and values"
        answers.append(answer.logits)
    near = _near(whole, torch.cat(answers, dim=1), scale)
    return None if near else "in chunks, with its cache, its logits differ from those of one pass"


def _near(a: Tensor, b: Tensor, scale: float) -> bool:
    difference = (a - b).abs()
    finite = bool(difference.isfinite().all())  # a diverged model is no error of the cache
    return not finite or float(difference.max()) <= scale
