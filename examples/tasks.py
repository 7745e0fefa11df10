"""Tasks for `longitude study --plugin examples/tasks.py --task NAME`, and how to write one.

A task is a class with a name, under which `--task` finds it. The simplest is a subclass of `Questions` or `Written`:

* `Questions`: a decoder reads symbols, and answers some of them. Write `sample`, which draws examples of one length.
* `Written`: a decoder reads a question and a mark, and writes an answer. Write `pairs`, which draws questions and answers.

Each has `floor`, the share of right answers of the best rule that does not use the places of symbols, and `defaults` for the
options of `longitude study`. The docstring's first line describes an example in the report. `ceiling` names an encoding that
learns the task with these defaults. The tasks here are those of papers that compare encodings:

* Word problems of groups: Merrill, Petty and Sabharwal 2024, https://arxiv.org/abs/2404.08819.
* Sums modulo 5: Delétang et al. 2022, https://arxiv.org/abs/2207.02098.
* Brackets: Hewitt et al. 2020, https://arxiv.org/abs/2010.07515.
* Induction and selective copying: Gu and Dao 2023, https://arxiv.org/abs/2312.00752.
* Words and sums: Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466; hints: Zhou et al. 2023,
  https://arxiv.org/abs/2310.16028.
"""

from itertools import permutations
from typing import ClassVar

import numpy as np

from longitude.errors import UsageError
from longitude.study.tasks.base import register_task
from longitude.study.tasks.languages import Parity
from longitude.study.tasks.questions import NOT_ASKED, Questions, Sample
from longitude.study.tasks.recall import distinct
from longitude.study.tasks.written import PLUS, CopyDecoder, Written


# ---- groups: after each element the product of all up to it ----------------------------------------------------------
class WordProblem(Questions):
    """Elements of a group, and after each of them the product of all up to it.

    Attributes:
        table: [order, order], table[a, b] = a b.
    """

    table: ClassVar[np.ndarray]

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        tokens = random.integers(0, len(self.table), (examples, length))
        labels = tokens.copy()
        for t in range(1, length):
            labels[:, t] = self.table[labels[:, t - 1], tokens[:, t]]
        return Sample(tokens, labels, np.broadcast_to(np.arange(length), tokens.shape).copy())

    def floor(self, length: int) -> float:
        return 1 / len(self.table)


def cyclic(order: int) -> np.ndarray:
    """The table of addition modulo the order."""
    return np.add.outer(np.arange(order), np.arange(order)) % order


def symmetric(points: int, even: bool = False) -> np.ndarray:
    """The table of all permutations of some points, or the even ones: (a b)(x) = a(b(x)); element 0 changes nothing."""
    every = list(permutations(range(points)))
    if even:
        every = [p for p in every if sum(p[i] > p[j] for i in range(points) for j in range(i + 1, points)) % 2 == 0]
    number = {p: i for i, p in enumerate(every)}
    return np.array([[number[tuple(a[x] for x in b)] for b in every] for a in every])


@register_task("modular-sum")
class ModularSum(WordProblem):
    """Numbers from 0 to 4, and after each of them the sum of those up to it, modulo 5."""

    ceiling = "path"
    table, symbols = cyclic(5), 5
    defaults = {
        **Parity.defaults,
        "train_length": 20,
        "test_lengths": (20, 40, 80, 320),
        "learning_rates": (4e-3,),
    }


@register_task("z60")
class Z60(WordProblem):
    """The word problem of the cyclic group of 60 elements."""

    ceiling = "learned"
    table, symbols = cyclic(60), 60
    defaults = {
        **Questions.defaults,
        "encodings": ("nope", "sinusoidal", "learned", "rope", "alibi"),
        "train_length": 4,
        "test_lengths": (4, 5, 6, 8, 16),
        "hidden": 128,
        "batch_size": 256,
        "steps": 6000,
    }


@register_task("a5")
class A5(WordProblem):
    """The word problem of the even permutations of five points, which no fixed number of ordinary layers is thought to solve."""

    ceiling = "learned"
    table, symbols = symmetric(5, even=True), 60
    defaults = {**Z60.defaults, "steps": 10_000}


@register_task("s5")
class S5(WordProblem):
    """The word problem of all permutations of five points."""

    ceiling = "learned"
    table, symbols = symmetric(5), 120
    defaults = A5.defaults


# ---- questions about symbols -----------------------------------------------------------------------------------------
@register_task("dyck")
class Dyck(Questions):
    """Brackets of 8 kinds, nested to depth 10 at most and all closed at the end; before each closing bracket, its kind.

    While both are possible, opening and closing are equally likely.
    """

    ceiling = "rope"
    kinds, depth = 8, 10
    symbols = 16

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        if length < 2 or length % 2:
            raise UsageError("a length of dyck", "even, so that every bracket is closed", length)
        tokens = random.integers(0, self.kinds, (examples, length))
        opens = random.random((examples, length)) < 0.5
        labels, distances = np.full_like(tokens, NOT_ASKED), np.zeros_like(tokens)
        depth, every = np.zeros(examples, dtype=np.int64), np.arange(examples)
        stack = np.zeros((examples, self.depth), dtype=np.int64)  # where the open brackets stand
        for t in range(length):
            opening = (depth == 0) | (opens[:, t] & (depth < self.depth) & (depth < length - t))
            closing, top = every[~opening], depth[~opening] - 1
            opened_at = stack[closing, top]
            tokens[closing, t] = tokens[closing, opened_at] + self.kinds
            labels[closing, t - 1] = tokens[closing, t]
            distances[closing, t - 1] = t - 1 - opened_at
            stack[every[opening], depth[opening]] = t
            depth += np.where(opening, 1, -1)
        return Sample(tokens, labels, distances)

    def floor(self, length: int) -> float:
        return 1 / self.kinds


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


@register_task("selective-copy")
class SelectiveCopy(Questions):
    """Sixteen symbols at random places among noise, then asked for in their order."""

    ceiling = "rope"
    whole, symbols = True, 16
    remembered = 16
    defaults = {**Questions.defaults, "steps": 3000}

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        if length < (least := 2 * self.remembered):
            raise UsageError("a length of selective-copy", f"at least {least}", length)
        mark, noise, room = self.symbols - 1, self.symbols - 2, length - self.remembered
        places = np.sort(distinct(random, examples, self.remembered, room), axis=1)
        data = random.integers(0, noise, (examples, self.remembered))
        tokens = np.full((examples, length), noise)
        tokens[:, room:], tokens[np.arange(examples)[:, None], places] = mark, data
        labels, distances = np.full_like(tokens, NOT_ASKED), np.zeros_like(tokens)
        labels[:, room:], distances[:, room:] = data, np.arange(room, length) - places
        return Sample(tokens, labels, distances)

    def floor(self, length: int) -> float:
        return (1 / (self.symbols - 2)) ** self.remembered


# ---- whole answers ---------------------------------------------------------------------------------------------------
@register_task("reverse-decoder")
class ReverseDecoder(CopyDecoder):
    """A word of letters, written from its end."""

    def pairs(self, random: np.random.Generator, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        word, _ = super().pairs(random, examples, length)
        return word, word[:, ::-1]

    def distances(self, length: int, asked: int, read: int) -> np.ndarray:
        return np.maximum(2 * (np.arange(read) - asked) + 1, 0)


@register_task("sort-decoder")
class SortDecoder(CopyDecoder):
    """The letters of a word in the order of the alphabet."""

    def pairs(self, random: np.random.Generator, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        word, _ = super().pairs(random, examples, length)
        return word, np.sort(word, axis=1)

    def distances(self, length: int, asked: int, read: int) -> np.ndarray:
        return np.arange(read)

    def floor(self, length: int) -> float:
        return 1.0  # counting letters, also those written, needs no positions


def sums(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Digits [examples, n] of two numbers, least significant first -> digits [examples, n + 1] of their sum."""
    digits, carry = [], np.zeros(len(one), dtype=np.int64)
    for place in range(one.shape[1]):
        carry, digit = np.divmod(one[:, place] + other[:, place] + carry, 10)
        digits.append(digit)
    return np.stack([*digits, carry], axis=1)


@register_task("addition")
class Addition(Written):
    """The sum of two numbers, the greatest digit first."""

    ceiling = "rope"
    unit = "digits"
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

    def pairs(self, random: np.random.Generator, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        one, other = random.integers(0, 10, (2, examples, length))
        total, plus = sums(one, other), np.full((examples, 1), PLUS)
        written = self.writer(random, examples, length)
        return np.concatenate([written(one), plus, written(other)], 1), written(total)

    def writer(self, random: np.random.Generator, examples: int, length: int):
        """The function that writes digits [examples, n], given with the least significant first."""
        return lambda digits: digits[:, ::-1]


@register_task("addition-hints")
class AdditionHints(Addition):
    """The sum of two numbers, the greatest digit first; before each digit a symbol for its place, from a random one on."""

    hints = 100
    symbols = 13 + hints

    def writer(self, random: np.random.Generator, examples: int, length: int):
        if length + 1 > self.hints:
            raise UsageError("a length of addition-hints", f"below its {self.hints} hints", length)
        first = random.integers(0, self.hints - length, (examples, 1))

        def written(digits: np.ndarray) -> np.ndarray:
            hint = PLUS + 1 + first + np.arange(digits.shape[1])
            return np.stack([digits, hint], -1).reshape(examples, -1)[:, ::-1]

        return written
