"""Tasks of whole answers for decoders: a word or a sum and, after a mark, its answer, all in one sequence.

Sums are written least significant digit first, so that a carry depends on earlier digits (Zhou et al. 2023, arXiv:2310.16028).

Source:
    Kazemnejad et al. 2023, arXiv:2305.19466, for the tasks in decoders.
"""

from abc import abstractmethod

import numpy as np

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


@register_task("copy-decoder")
class CopyDecoder(Written):
    """A word of letters, written again."""

    ceiling = "rope"
    symbols = 28

    def pairs(self, random: np.random.Generator, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        word = random.integers(0, 26, (examples, length))
        return word, word

    def distances(self, length: int, asked: int, read: int) -> np.ndarray:
        return np.full(read, asked)


PLUS = 10
"""The symbol between two numbers."""


@register_task("addition-reversed")
class AdditionReversed(Written):
    """The sum of two numbers, the least digit first; each digit is equally likely."""

    unit = "digits"
    ceiling = "coupled:max_start=16"
    symbols, digits = 13, tuple(range(10))
    defaults = {
        **Written.defaults,
        "encodings": (*Written.defaults["encodings"], ceiling),
        "train_length": 5,
        "test_lengths": (5, 6, 8, 10, 15, 20),
        "batch_size": 128,
        "steps": 3000,
    }

    def places(self, length: int) -> int:
        return length + 3  # of the sum's digits, of + and =, and 0

    def pairs(self, random: np.random.Generator, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = random.integers(0, 10, (2, examples, length))  # the least digit first
        total, carry = np.zeros((examples, length + 1), dtype=np.int64), np.zeros(examples, dtype=np.int64)
        for place in range(length):
            carry, total[:, place] = np.divmod(numbers[0, :, place] + numbers[1, :, place] + carry, 10)
        total[:, length] = carry
        plus = np.full((examples, 1), PLUS)
        return np.concatenate([numbers[0], plus, numbers[1]], 1), total
