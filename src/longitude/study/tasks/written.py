"""Tasks of whole answers for decoders: a word or a sum and, after a mark, its answer, all in one sequence.

The examples of `copy`, `reverse` and `sort` are those of the encoder-decoder's tasks. Sums are written in three ways: plain,
most significant digit first; reversed, least significant digit first, so that a carry depends on earlier digits; and with
hints, plain with a symbol before each digit that marks its place (Zhou et al. 2023, arXiv:2310.16028).

Source:
    Kazemnejad et al. 2023, arXiv:2305.19466, for the tasks in decoders.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from longitude.errors import UsageError
from longitude.study.tasks.base import register_task
from longitude.study.tasks.questions import NOT_ASKED, Questions, Sample


class Written(Questions):
    """A question, a mark, its answer and the end. A subclass draws question and answer, [examples, symbols] each."""

    whole, grows = True, True
    defaults = {
        **Questions.defaults,
        "train_length": 16,
        "test_lengths": (8, 16, 20, 24, 32, 64),
        "batch_size": 64,
        "steps": 2500,
        "learning_rates": (4e-3,),
    }

    @abstractmethod
    def pairs(self, random: np.random.Generator, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Questions and answers of one length; the last two symbols of the vocabulary are the mark and the end."""

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        question, answer = self.pairs(random, examples, length)
        mark, end = (np.full((examples, 1), symbol) for symbol in (self.symbols - 2, self.symbols - 1))
        tokens = np.concatenate([question, mark, answer], 1)
        labels = np.full_like(tokens, NOT_ASKED)
        labels[:, question.shape[1] :] = np.concatenate([answer, end], 1)
        distances = np.where(labels == NOT_ASKED, 0, self.distances(length, question.shape[1], tokens.shape[1]))
        return Sample(tokens, labels, distances)

    def distances(self, length: int, asked: int, read: int) -> np.ndarray:
        """Distances [read] from each token to the first symbol that its answer depends on; by default the first of all."""
        return np.arange(read)

    def positions(self, length: int) -> int:
        return self.sample(np.random.default_rng(0), 1, length).tokens.shape[1]

    def floor(self, length: int) -> float:
        return 0.0


class Letters(Written):
    """Tasks on a word of n letters."""

    symbols = 28

    def pairs(self, random: np.random.Generator, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        word = random.integers(0, 26, (examples, length))
        return word, self.answer(word)

    @abstractmethod
    def answer(self, word: np.ndarray) -> np.ndarray:
        """[examples, letters] -> the same shape."""


@register_task("copy-decoder")
class CopyDecoder(Letters):
    """A word of letters, written again."""

    ceiling = "rope"

    def answer(self, word: np.ndarray) -> np.ndarray:
        return word

    def distances(self, length: int, asked: int, read: int) -> np.ndarray:
        return np.full(read, asked)


@register_task("reverse-decoder")
class ReverseDecoder(Letters):
    """A word of letters, written from its end."""

    ceiling = "rope"

    def answer(self, word: np.ndarray) -> np.ndarray:
        return word[:, ::-1]

    def distances(self, length: int, asked: int, read: int) -> np.ndarray:
        return np.maximum(2 * (np.arange(read) - asked) + 1, 0)


@register_task("sort-decoder")
class SortDecoder(Letters):
    """The letters of a word in the order of the alphabet."""

    ceiling = "rope"

    def answer(self, word: np.ndarray) -> np.ndarray:
        return np.sort(word, axis=1)

    def floor(self, length: int) -> float:
        return 1.0  # counting letters, also those written, needs no positions


PLUS, HINTS = 10, 100
"""The symbol between two numbers; the number of hints."""


class Sum(Written):
    """Two numbers of n digits, each digit equally likely, and their sum of n + 1 digits.

    Attributes:
        least_first: Whether numbers are written least significant digit first.
        hints: Whether a symbol before each digit marks its place: consecutive symbols from a random one on.
    """

    unit = "digits"
    least_first: ClassVar[bool] = False
    hints: ClassVar[bool] = False
    symbols = 13
    defaults = {
        **Written.defaults,
        "train_length": 3,
        "test_lengths": (3, 4, 5, 6, 12),
        "hidden": 128,
        "batch_size": 128,
        "steps": 4000,
        "learning_rates": (2e-3,),
    }

    def places(self, length: int) -> int:
        return length + 3  # of the sum's digits, of + and =, and 0

    def pairs(self, random: np.random.Generator, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        if self.hints and length + 1 > HINTS:
            raise UsageError(f"a length of {self.name}", f"below its {HINTS} hints", length)
        numbers = random.integers(0, 10, (2, examples, length))  # the least digit first
        total, carry = np.zeros((examples, length + 1), dtype=np.int64), np.zeros(examples, dtype=np.int64)
        for place in range(length):
            carry, total[:, place] = np.divmod(numbers[0, :, place] + numbers[1, :, place] + carry, 10)
        total[:, length] = carry
        first = random.integers(0, HINTS - length, (examples, 1)) if self.hints else None

        def written(digits: np.ndarray) -> np.ndarray:
            if first is not None:
                hint = PLUS + 1 + first + np.arange(digits.shape[1])
                digits = np.stack([digits, hint], -1).reshape(examples, -1)
            return digits if self.least_first else digits[:, ::-1]

        plus = np.full((examples, 1), PLUS)
        return np.concatenate([written(numbers[0]), plus, written(numbers[1])], 1), written(total)


@register_task("addition")
class Addition(Sum):
    """The sum of two numbers, the greatest digit first."""

    ceiling = "rope"


@register_task("addition-reversed")
class AdditionReversed(Sum):
    """The sum of two numbers, the least digit first."""

    ceiling = "coupled:max_start=16"
    least_first = True
    digits = tuple(range(10))
    defaults = {
        **Written.defaults,
        "encodings": (*Written.defaults["encodings"], ceiling),
        "train_length": 5,
        "test_lengths": (5, 6, 8, 10, 15, 20),
        "batch_size": 128,
        "steps": 3000,
    }


@register_task("addition-hints")
class AdditionHints(Sum):
    """The sum of two numbers, the greatest digit first, a hint before each digit."""

    ceiling = "rope"
    hints, symbols = True, 13 + HINTS
