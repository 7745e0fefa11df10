"""Tasks of recall: write again what stood somewhere before.

Sources: associative recall of several queries, Arora et al. 2023, arXiv:2312.04927; induction heads and selective copying, Gu and
Dao 2023, arXiv:2312.00752; passkey, Mohtashami and Jaggi 2023, arXiv:2305.16300. The sizes of the defaults are ours: they train
in minutes on two cores.
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


@register_task("induction")
class Induction(Questions):
    """Random symbols, among them a special one somewhere; at the end the special one again: what followed it?"""

    ceiling = "rope"
    symbols = 16
    defaults = {**Questions.defaults, "test_lengths": (32, 64, 128, 256, 1024), "steps": 3000}

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        if length < 3:
            raise UsageError("a length of induction", "at least 3: the special symbol, another, and it again", length)
        tokens = random.integers(1, self.symbols, (examples, length))
        place, every = random.integers(0, length - 2, examples), np.arange(examples)
        tokens[every, place], tokens[:, -1] = 0, 0
        labels, distances = np.full_like(tokens, NOT_ASKED), np.zeros_like(tokens)
        labels[:, -1], distances[:, -1] = tokens[every, place + 1], length - 2 - place
        return Sample(tokens, labels, distances)

    def floor(self, length: int) -> float:
        return 1 / (self.symbols - 1)


class Copied(Questions):
    """Symbols to remember stand somewhere in noise; at the end each is asked for by the same mark, in their order.

    Attributes:
        remembered: Number of symbols to remember.
        together: Whether they are adjacent, after a mark, or each at a random place.
    """

    remembered: ClassVar[int]
    together: ClassVar[bool]
    whole = True
    symbols = 16

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        mark, noise = self.symbols - 1, self.symbols - 2
        least = 2 * self.remembered + self.together
        if length < least:
            raise UsageError(f"a length of {self.name}", f"at least {least}, for its {self.remembered} symbols", length)
        room = length - self.remembered
        rows, asked = np.arange(examples)[:, None], np.arange(room, length)
        data = random.integers(0, noise, (examples, self.remembered))
        tokens = np.full((examples, length), noise)
        tokens[:, room:] = mark
        if self.together:
            begin = random.integers(1, room - self.remembered + 1, (examples, 1))
            tokens[:, :room] = random.integers(0, noise, (examples, room))  # more of the same
            tokens[rows, begin - 1] = mark
            places = begin + np.arange(self.remembered)
        else:
            places = np.sort(distinct(random, examples, self.remembered, room), axis=1)
        tokens[rows, places] = data
        labels, distances = np.full_like(tokens, NOT_ASKED), np.zeros_like(tokens)
        labels[:, room:], distances[:, room:] = data, asked - places
        return Sample(tokens, labels, distances)

    def floor(self, length: int) -> float:
        return (1 / (self.symbols - 2)) ** self.remembered


@register_task("selective-copy")
class SelectiveCopy(Copied):
    """Sixteen symbols at random places among noise, then asked for in their order."""

    ceiling = "rope"
    remembered, together, symbols = 16, False, 16
    defaults = {**Questions.defaults, "steps": 3000}


@register_task("passkey")
class Passkey(Copied):
    """Five symbols after a mark, somewhere among others like them; at the end they are asked for."""

    ceiling = "rope"
    remembered, together, symbols = 5, True, 12
    defaults = {**Questions.defaults, "steps": 3000}


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
