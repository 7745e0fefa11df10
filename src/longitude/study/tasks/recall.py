"""Tasks of recall: write again what stood somewhere before.

Sources: associative recall of several queries, Arora et al. 2023, arXiv:2312.04927; passkey, Mohtashami and Jaggi 2023,
arXiv:2305.16300. The sizes of the defaults are ours: they train in minutes on two cores.
"""

from typing import ClassVar

import numpy as np

from longitude.errors import UsageError
from longitude.study.tasks.base import register_task
from longitude.study.tasks.questions import NOT_ASKED, Questions, Sample


def distinct(random: np.random.Generator, examples: int, count: int, of: int) -> np.ndarray:
    """[examples, count] different numbers below `of`, in random order."""
    return random.random((examples, of)).argsort(1)[:, :count]


@register_task("recall")
class Recall(Questions):
    """Pairs of a key and a value, a sixteenth of the length of them; then every key again, among noise: what was its value?

    Where the keys stand again is drawn without repeats with the weights of a power law over the places, nearer ones likelier.
    """

    ceiling = "rope"
    symbols = 256
    power: ClassVar[float] = 0.01
    defaults = {**Questions.defaults, "steps": 3000}

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        pairs, half = length // 16, self.symbols // 2
        if length % 2 or not 1 <= pairs < half:
            expected = f"even, at least 16, and below {16 * half}, where its {half} keys end"
            raise UsageError("a length of recall", expected, length)
        keys = distinct(random, examples, pairs, half - 1) + 1
        values = distinct(random, examples, pairs, half) + half
        tokens = random.integers(1, self.symbols, (examples, length))
        tokens[:, : 2 * pairs] = np.stack([keys, values], -1).reshape(examples, -1)
        room = (length - 2 * pairs) // 2
        weights = self.power * np.arange(1, room + 1) ** (self.power - 1)
        # the largest of log weight + Gumbel noise are a draw without repeats
        noisy = np.log(weights) + random.gumbel(size=(examples, room))
        places = random.permuted(noisy.argsort(1)[:, -pairs:], axis=1)
        at, rows = 2 * pairs + 2 * places, np.arange(examples)[:, None]
        noise = tokens[:, 2 * pairs :]
        tokens[:, 2 * pairs :] = np.where(noise < half, 0, noise)  # no key by chance
        labels, distances = np.full_like(tokens, NOT_ASKED), np.zeros_like(tokens)
        tokens[rows, at], labels[rows, at] = keys, values
        distances[rows, at] = at - (2 * np.arange(pairs) + 1)
        return Sample(tokens, labels, distances)

    def floor(self, length: int) -> float:
        return 16 / length  # one of the values that stand in the text


@register_task("passkey")
class Passkey(Questions):
    """Five symbols after a mark, somewhere among others like them; at the end they are asked for, in their order."""

    ceiling = "rope"
    whole, symbols = True, 12
    remembered: ClassVar[int] = 5
    defaults = {**Questions.defaults, "steps": 3000}

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        mark, others, least = self.symbols - 1, self.symbols - 2, 2 * self.remembered + 1
        if length < least:
            raise UsageError("a length of passkey", f"at least {least}, for its {self.remembered} symbols", length)
        room = length - self.remembered
        rows, asked = np.arange(examples)[:, None], np.arange(room, length)
        data = random.integers(0, others, (examples, self.remembered))
        tokens = np.full((examples, length), mark)
        begin = random.integers(1, room - self.remembered + 1, (examples, 1))
        tokens[:, :room] = random.integers(0, others, (examples, room))
        tokens[rows, begin - 1] = mark
        places = begin + np.arange(self.remembered)
        tokens[rows, places] = data
        labels, distances = np.full_like(tokens, NOT_ASKED), np.zeros_like(tokens)
        labels[:, room:], distances[:, room:] = data, asked - places
        return Sample(tokens, labels, distances)

    def floor(self, length: int) -> float:
        return (1 / (self.symbols - 2)) ** self.remembered


@register_task("lookback")
class Lookback(Questions):
    """Random symbols, and after each of them the one `back` places before it: nothing but the distance tells which."""

    ceiling = "rope"
    symbols = 16
    back: ClassVar[int] = 8
    defaults = {**Questions.defaults, "steps": 1500}

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        if length <= self.back:
            raise UsageError("a length of lookback", f"above {self.back}, the places it looks back", length)
        tokens = random.integers(0, self.symbols, (examples, length))
        labels, distances = np.full_like(tokens, NOT_ASKED), np.zeros_like(tokens)
        labels[:, self.back :], distances[:, self.back :] = tokens[:, : -self.back], self.back
        return Sample(tokens, labels, distances)

    def floor(self, length: int) -> float:
        return 1 / self.symbols
