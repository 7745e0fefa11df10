"""Criteria of a search: windows of tokens on which candidates are scored, and the tokens that count."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longitude.extend.units import digest_of_tokens
from longitude.measure.retrieval.haystack import of_text
from longitude.measure.retrieval.prompts import DoesNotFit, Question, fit
from longitude.measure.retrieval.tasks import TASKS
from longitude.measure.windows import Bounded, Resumable, Windows, score

TOKENS, FEWEST_WINDOWS, FEWEST_NEEDLES = 16_384, 4, 10
"""Approximate number of tokens in all, and minimum numbers of windows of text and of windows with a needle."""
BATCH = 8192
"""Tokens read at once, or one window if that is longer."""
NEEDLE = "needle-single"
"""The question of LongRoPE2's windows: a task of `longitude measure`."""


@dataclass(frozen=True)
class Criterion:
    """The mean loss of the tokens that count.

    windows: int64 [n + 1] each, n tokens and the one after them; skipped: how many of the first targets do not count.
    """

    windows: list[Tensor]
    skipped: list[int]

    def loss(self, model: nn.Module, passes: Path | None = None) -> float:
        """Nats per token that counts; inf if that is not finite. passes: a journal with the losses of earlier passes."""
        counts = [len(window) - 1 for window in self.windows]
        plan: Windows = defaultdict(list)
        for i, shape in enumerate(zip(counts, self.skipped, strict=True)):
            plan[shape].append((i, 0))
        plain = Bounded(model, None)
        reader = plain if passes is None else Resumable(plain, passes)
        [nats] = score(model, self.windows, counts, [plan], max(*counts, BATCH), None, reader)
        counted = [each[skip:] for each, skip in zip(nats, self.skipped, strict=True)]
        loss = float(np.array([each.sum() for each in counted]).sum() / sum(map(len, counted)))
        return loss if math.isfinite(loss) else math.inf

    def digest(self) -> str:
        """Digest of the tokens, and of the tokens that count."""
        return digest_of_tokens(*self.windows, torch.tensor(self.skipped))


def running_text(documents: Sequence[Tensor], length: int) -> Criterion:
    """Every token of windows of `length` tokens, spread evenly over the documents: the criterion of LongRoPE.

    documents: int64 [n] each, of length + 1 tokens or more, ValueError if one is shorter.
    """
    if (shortest := min(map(len, documents), default=0)) <= length:
        raise ValueError(f"longrope: expected documents of {length + 1} tokens or more, got one of {shortest}")
    each = [(document, i) for document in documents for i in range((len(document) - 1) // length)]
    count = min(len(each), max(FEWEST_WINDOWS, TOKENS // length))
    places = [each[i * len(each) // count] for i in range(count)]
    return Criterion([document[i * length : (i + 1) * length + 1] for document, i in places], [0] * count)


def needles(texts: Sequence[str], tokenizer: Any, length: int) -> Criterion:
    """Needle perplexity, the criterion of LongRoPE2: the loss on the digits of a number hidden earlier in the text.

    It has ten windows, or more to reach 16384 tokens. Each window has `length` tokens, answer included, and one needle; depths
    are evenly spaced from the first word of the text to the last. The right answer follows the question (teacher forcing), and
    only the tokens of its digits count. No chat template is used.

    Args:
        texts: Texts in which needles are hidden, in turn; a text that is shorter than a window repeats.
        tokenizer: The model's tokenizer.
        length: Tokens of a window.

    Raises:
        ValueError: Without a tokenizer or a text, for a length that fits no question, and a tokenizer that cannot write one.
    """
    if tokenizer is None:
        raise ValueError(
            "longrope2 hides needles in text and asks for them, which needs the model's tokenizer; load it with tokenizer=True, "
            "or search with --method longrope"
        )
    if not texts:
        raise ValueError("longrope2: expected text to hide needles in, got none")
    count = max(FEWEST_NEEDLES, TOKENS // length)
    windows, skipped = [], []
    for i in range(count):
        drawn = TASKS[NEEDLE].draw(Random(f"longrope2/{i}"), length, i / (count - 1), of_text(texts[i % len(texts)]))
        question = _with_answer(drawn)
        try:
            ids = fit(question, tokenizer, length, 0).ids
        except DoesNotFit as error:
            shorter = "give a longer --to, or search with --method longrope"
            raise ValueError(
                f"longrope2: {length} tokens fit no question about a needle ({error}); {shorter}"
            ) from error
        windows.append(torch.tensor(ids))
        skipped.append(len(ids) - 1 - _tokens_at_the_end(ids, question.answers[0], tokenizer))
    return Criterion(windows, skipped)


def _with_answer(question: Question) -> Question:
    """Append the right answer to a question."""
    answer = question.whole_answer
    return replace(question, text=lambda size: question.text(size) + answer, ask=question.ask + answer, whole_answer="")


def _tokens_at_the_end(ids: Sequence[int], answer: str, tokenizer: Any) -> int:
    """Number of the last tokens that belong to the answer."""
    read = ("".join(tokenizer.decode(ids[-count:]).split()) for count in range(1, len(ids) + 1))
    return next(count for count, text in enumerate(read, 1) if answer in text)
