"""LongPPL: the perplexity of tokens that need a long context, as another model finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longitude.checkpoints.load import Checkpoint
from longitude.measure.documents import Documents, tokens_of
from longitude.measure.windows import Progress, Reader, plan_windows, score

GAIN, LEAST = 2.0, -2.0
"""A key token gains more than GAIN nats by the whole context, and has a log-probability above LEAST with it."""
TASK = "longppl"


def key_tokens(
    model: Any, ids: Tensor, context: int, *, reader: Reader | None = None, progress: Progress | None = None
) -> np.ndarray:
    """Which tokens of a document need more than a short context.

        key_t:  ln p(t | all before) - ln p(t | short) > 2   and   ln p(t | all before) > -2

    The short context has `context` tokens, or up to a quarter more, since windows move by that quarter.

    Args:
        model: The evaluator, as for `losses_by_length`.
        ids: A document, [n] int64.
        context: Tokens of the short context, from 4.
        reader: As in `losses_by_length`.
        progress: As in `losses_by_length`.

    Returns:
        bool [n].

    Source:
        Fang et al. 2024, section 3, arXiv 2410.23771, https://arxiv.org/abs/2410.23771, and the authors' code
    """
    count, step = len(ids) - 1, max(1, context // 4)
    plans = plan_windows([count], count, count), plan_windows([count], context + step - 1, step)
    (whole,), (short,) = score(model, [ids], [count], plans, context + step, progress, reader)
    return np.concatenate([[False], (short - whole > GAIN) & (whole < -LEAST)])


def within(key: np.ndarray, sizes: Tensor) -> Tensor:
    """The tokens that lie within key text.

    Args:
        key: Whether each byte of the text belongs to a key token, bool [bytes].
        sizes: Bytes of a tokenizer's tokens of this text, [n].

    Returns:
        bool [n].
    """
    ends, missed = np.cumsum(sizes.numpy()), np.concatenate([[0], np.cumsum(~key)])
    return torch.from_numpy((sizes.numpy() > 0) & (missed[ends] == missed[ends - sizes.numpy()]))


KeyText = list[list[tuple[int, int]]]
"""For each document, the runs [from, to) of its text's bytes that belong to key tokens."""


def find_key_text(
    checkpoint: Checkpoint, reader: Reader, last: int | None, documents: Documents, context: int, progress: Progress
) -> KeyText:
    """Key text of each document by the evaluator, in its own tokens, of which it reads `last` at most."""
    found = []
    for i, text in enumerate(documents.text):
        ids, sizes = tokens_of(text.decode("utf-8"), checkpoint.tokenizer)
        if last is not None and len(ids) > last + 1:
            raise ValueError(f"a document has {len(ids)} tokens, and its table of positions ends at {last}")
        key = key_tokens(checkpoint.model, ids, context, reader=reader)
        runs = np.flatnonzero(np.diff(np.repeat(key, sizes.numpy()), prepend=False, append=False))
        found.append([(int(start), int(stop)) for start, stop in runs.reshape(-1, 2)])
        progress(i + 1, len(documents.text))
    return found


def selected(found: KeyText, documents: Documents) -> list[Tensor]:
    """For each document, which of its tokens lie within key text, bool [n]."""
    every = []
    for runs, text, sizes in zip(found, documents.text, documents.sizes, strict=True):
        key = np.zeros(len(text), dtype=bool)
        for start, stop in runs:
            key[start:stop] = True
        every.append(within(key, sizes))
    return every
