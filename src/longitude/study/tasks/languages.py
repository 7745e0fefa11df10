"""Tasks of formal languages: what a symbol means depends on where it stands among the others.

Sources: flip-flop, Liu et al. 2023, arXiv:2306.00946; word problems of groups, Merrill, Petty and Sabharwal 2024,
arXiv:2404.08819; parity and sums, Delétang et al. 2022, arXiv:2207.02098; bounded brackets, Hewitt et al. 2020,
arXiv:2010.07515. The sizes of the defaults are ours: they train in minutes on two cores.
"""

from functools import cache
from itertools import permutations
from typing import ClassVar

import numpy as np

from longitude.errors import UsageError
from longitude.study.tasks.base import register_task
from longitude.study.tasks.questions import NOT_ASKED, Questions, Sample

WRITE, READ, IGNORE = 2, 3, 4
"""Instructions of flip-flop; 0 and 1 are its bits."""


@register_task("flip-flop")
class FlipFlop(Questions):
    """Pairs of an instruction (write, read, ignore) and a bit; after read stands the bit of the last write.

    Bits after write and ignore are random, the first instruction writes, the last reads. An instruction between them ignores with
    probability 0.8, and reads or writes with half of the rest each; `sparse` ignores with 0.98, `dense` with 0.1.
    """

    ceiling = "rope"
    symbols = 5
    methods = ("forward", "sparse", "dense")
    defaults = {**Questions.defaults, "methods": ("forward", "sparse", "dense")}
    ignored: ClassVar[dict[str, float]] = {"forward": 0.8, "sparse": 0.98, "dense": 0.1}

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        if length < 4 or length % 2:
            raise UsageError("a length of flip-flop", "even and at least 4, two pairs of symbols", length)
        pairs, ignored = length // 2, self.ignored[method]
        draw = random.random((examples, pairs))
        instructions = np.where(draw < ignored, IGNORE, np.where(draw < (1 + ignored) / 2, WRITE, READ))
        instructions[:, 0], instructions[:, -1] = WRITE, READ
        last = np.maximum.accumulate(np.where(instructions == WRITE, np.arange(pairs), -1), axis=1)
        bits = random.integers(0, 2, (examples, pairs))
        reads = instructions == READ
        bits = np.where(reads, np.take_along_axis(bits, last, 1), bits)
        tokens = np.stack([instructions, bits], -1).reshape(examples, length)
        labels, distances = np.full_like(tokens, NOT_ASKED), np.zeros_like(tokens)
        labels[:, ::2] = np.where(reads, bits, NOT_ASKED)
        distances[:, ::2] = np.where(reads, 2 * (np.arange(pairs) - last) - 1, 0)
        return Sample(tokens, labels, distances)

    def floor(self, length: int) -> float:
        return 1 / 2


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


@cache
def symmetric(points: int, even: bool = False) -> np.ndarray:
    """The table of all permutations of some points, or the even ones: (a b)(x) = a(b(x)); element 0 changes nothing."""
    every = list(permutations(range(points)))
    if even:
        every = [p for p in every if sum(p[i] > p[j] for i in range(points) for j in range(i + 1, points)) % 2 == 0]
    number = {p: i for i, p in enumerate(every)}
    return np.array([[number[tuple(a[x] for x in b)] for b in every] for a in every])


@register_task("parity")
class Parity(WordProblem):
    """Bits, and after each of them whether the ones up to it are odd in number."""

    ceiling = "path"
    table, symbols = cyclic(2), 2
    defaults = {
        **Questions.defaults,
        "encodings": (*Questions.defaults["encodings"], "path"),
        "train_length": 40,
        "test_lengths": (40, 80, 160, 640),
        "steps": 1500,
    }


@register_task("modular-sum")
class ModularSum(WordProblem):
    """Numbers from 0 to 4, and after each of them the sum of those up to it, modulo 5."""

    ceiling = "path"
    table, symbols = cyclic(5), 5
    defaults = {
        **Parity.defaults,
        "train_length": 20,
        "test_lengths": (20, 40, 80, 320),
        "steps": 1500,
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


@register_task("dyck")
class Dyck(Questions):
    """Brackets of 8 kinds, nested to depth 10 at most and all closed at the end; before each closing bracket, its kind.

    While both are possible, opening and closing are equally likely.
    """

    ceiling = "rope"
    kinds: ClassVar[int] = 8
    depth: ClassVar[int] = 10
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
