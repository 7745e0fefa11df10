"""N-gram baselines: bits per token of n-gram tables counted on the tokens that a model was trained on."""

from collections.abc import Sequence

import numpy as np

from longitude.study.config import StudyConfig
from longitude.study.data import StudyData
from longitude.study.tasks.base import task_of
from longitude.study.tasks.text import Text

COUNTED = 2**27
"""Training tokens above which no n-grams are counted: sorting them would take minutes, and gigabytes."""


class NGrams:
    """Counts of contexts of 0 to order - 1 tokens, with Witten-Bell interpolation.

    p_k(w | h) = (count(h w) + kinds(h) p_(k-1)(w | h without its oldest token)) / (count(h) + kinds(h)), where kinds(h) is the
    number of different tokens seen after h and p_0 = 1 / vocabulary. It has no parameter to tune.

    Args:
        windows: Token sequences [n, length + 1]: each token except a window's first is counted with those before it there.
        order: Tokens of the longest counted sequence; 2: bigrams.
        vocabulary: Number of kinds of tokens; vocabulary^order must fit 63 bits.

    Raises:
        ValueError: For an order below 1, and for one too large for the vocabulary.

    Source:
        Witten and Bell 1991, https://doi.org/10.1109/18.87000; interpolated as in Chen and Goodman 1999,
        https://doi.org/10.1006/csla.1999.0128
    """

    def __init__(self, windows: np.ndarray, order: int, vocabulary: int):
        if order < 1 or vocabulary**order >= 2**63:
            raise ValueError(f"order: expected 1 or more with {vocabulary}^order below 2^63, got {order}")
        self.order, self.vocabulary = order, vocabulary
        self.counts = [np.unique(self.codes(windows, k), return_counts=True) for k in range(1, order + 1)]
        self.contexts = []
        for codes, counts in self.counts:
            contexts, first = np.unique(codes // vocabulary, return_index=True)
            self.contexts.append((contexts, np.add.reduceat(counts, first), np.diff([*first, len(codes)])))

    def codes(self, windows: np.ndarray, k: int) -> np.ndarray:
        """Each predicted token with the k - 1 before it in its window as one number [...]; those with fewer are left out."""
        columns = np.lib.stride_tricks.sliding_window_view(windows.astype(np.int64), k, axis=1)
        columns = columns[:, 1:] if k == 1 else columns  # a window's first token is not predicted
        return columns @ self.vocabulary ** np.arange(k - 1, -1, -1, dtype=np.int64)

    def nats(self, windows: np.ndarray) -> np.ndarray:
        """-ln p of each predicted token [n, length], from the longest context that its window has, at most order - 1."""
        n, length = windows.shape[0], windows.shape[1] - 1
        p = np.full((n, length), 1 / self.vocabulary)
        for k, (counted, contexts) in enumerate(zip(self.counts, self.contexts, strict=True), 1):
            if (skip := max(0, k - 2)) >= length:
                break
            codes = self.codes(windows, k)
            count = found(codes, counted[0], counted[1])
            total, kinds = (found(codes // self.vocabulary, contexts[0], each) for each in contexts[1:])
            known = total > 0
            mixed = (count + kinds * p[:, skip:]) / np.where(known, total + kinds, 1)
            p[:, skip:] = np.where(known, mixed, p[:, skip:])
        return -np.log(p)


def found(codes: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of each code; 0 for one that is not known (known ascends)."""
    at = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[at] == codes, values[at], 0)


def ngram_bits(
    training: np.ndarray, held_out: Sequence[np.ndarray], orders: Sequence[int], vocabulary: int
) -> dict[int, float]:
    """Order -> mean bits per token of held-out windows [n, length + 1] of each document, from the same tokens as a model.

    Args:
        training: Windows [n, length + 1] that the models are trained on.
        held_out: Windows of each held-out document.
        orders: Such as (2, 3).
        vocabulary: Number of kinds of tokens.
    """
    windows = np.concatenate(held_out)
    return {order: float(NGrams(training, order, vocabulary).nats(windows).mean() / np.log(2)) for order in orders}


def ngrams_of(config: StudyConfig, data: StudyData) -> dict[int, float]:
    """Order -> bits per byte of held-out windows of the training length; counted on the first seed's training windows."""
    task = task_of(config.task)
    if not (isinstance(task, Text) and task.ngrams) or config.training_tokens > COUNTED:
        return {}
    windows = task.windows(config, data, config.seeds[0])
    length, span = config.train_length, config.test_lengths[-1]
    items = (windows[i] for i in range(len(windows)))
    training = np.stack([np.append(item["input_ids"], item["shift_labels"][-1:]) for item in items])
    held_out, tokens, size = [], 0, 0
    for i, document in enumerate(data.validation):
        if n := (len(document) - 1) // span * span // length:
            every = np.lib.stride_tricks.sliding_window_view(document.numpy(), length + 1)
            held_out.append(every[: n * length : length])
            tokens += n * length
            size += int(data.token_bytes[i][1 : n * length + 1].sum()) if data.token_bytes else n * length
    if not held_out:
        return {}
    bits = ngram_bits(training, held_out, task.ngrams, task.vocabulary(config))
    return {order: each * tokens / size for order, each in bits.items()}
