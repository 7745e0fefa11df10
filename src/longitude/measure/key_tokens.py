"""LongPPL: the perplexity of tokens that need a long context, as another model finds them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longitude.checkpoints.load import Checkpoint
from longitude.measure.documents import Documents, tokens_of
from longitude.measure.windows import Progress, Reader, plan_windows, score
from longitude.runs.files import FRESH, read_json, write_json

GAIN, LEAST = 2.0, -2.0
"""A key token gains more than GAIN nats by the whole context, and has a log-probability above LEAST with it."""
TASK = "longppl"


def key_tokens(
    model: Any, ids: Tensor, context: int, *, reader: Reader | None = None, progress: Progress | None = None
) -> np.ndarray:
    """Which tokens of a document need more than a short context.

        key_t:  ln p(t | all before) - ln p(t | short) > 2   and   ln p(t | all before) > -2

    The short context is of `context` tokens, and of less than a quarter more: windows move by that quarter.

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
        key: Of each byte of the text, whether it is of a key token, bool [bytes].
        sizes: Bytes of a tokenizer's tokens of this text, [n].

    Returns:
        bool [n].
    """
    ends, missed = np.cumsum(sizes.numpy()), np.concatenate([[0], np.cumsum(~key)])
    return torch.from_numpy((sizes.numpy() > 0) & (missed[ends] == missed[ends - sizes.numpy()]))


class KeyText:
    """Key tokens of each document of a run, kept in a file as they are found."""

    def __init__(self, path: Path, content: str, context: int):
        about, saved = {"evaluator": content, "context": context, "found": {}}, read_json(path, FRESH)
        same = isinstance(saved, dict) and {**saved, "found": {}} == about
        self.path, self.context, self.kept = path, context, saved if same else about

    def lacks(self, documents: Documents) -> bool:
        return any(_name(text) not in self.kept["found"] for text in documents.text)

    def find(
        self, checkpoint: Checkpoint, reader: Reader, last: int | None, documents: Documents, progress: Progress
    ) -> None:
        """By the evaluator, in its own tokens, of which it reads `last` at most."""
        for i, text in enumerate(documents.text):
            if _name(text) not in self.kept["found"]:
                ids, sizes = tokens_of(text.decode("utf-8"), checkpoint.tokenizer)
                if last is not None and len(ids) > last + 1:
                    raise ValueError(f"a document has {len(ids)} tokens, and its table of positions ends at {last}")
                key = key_tokens(checkpoint.model, ids, self.context, reader=reader)
                runs = np.flatnonzero(np.diff(np.repeat(key, sizes.numpy()), prepend=False, append=False))
                self.kept["found"][_name(text)] = runs.reshape(-1, 2).tolist()  # [from, to), in bytes
                write_json(self.path, self.kept)
            progress(i + 1, len(documents.text))

    def of(self, documents: Documents) -> list[Tensor]:
        """Of each document, which of its tokens lie within key text."""
        selected = []
        for text, sizes in zip(documents.text, documents.sizes, strict=True):
            key = np.zeros(len(text), dtype=bool)
            for start, stop in self.kept["found"][_name(text)]:
                key[start:stop] = True
            selected.append(within(key, sizes))
        return selected


def _name(text: bytes) -> str:
    return sha256(text).hexdigest()[:16]
