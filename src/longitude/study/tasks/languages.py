"""Tasks of formal languages: what a symbol means depends on where it stands among the others.

Sources: flip-flop, Liu et al. 2023, arXiv:2306.00946; parity, Delétang et al. 2022, arXiv:2207.02098, one of the word problems of
groups of Merrill, Petty and Sabharwal 2024, arXiv:2404.08819. The sizes of the defaults are ours: they train in minutes on two
cores.
"""

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


@register_task("parity")
class Parity(Questions):
    """Bits, and after each of them whether the ones up to it are odd in number."""

    ceiling = "path"
    symbols = 2
    defaults = {
        **Questions.defaults,
        "encodings": (*Questions.defaults["encodings"], "path"),
        "train_length": 40,
        "test_lengths": (40, 80, 160, 640),
        "steps": 1500,
    }

    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        tokens = random.integers(0, 2, (examples, length))
        distances = np.broadcast_to(np.arange(length), tokens.shape).copy()
        return Sample(tokens, tokens.cumsum(1) % 2, distances)

    def floor(self, length: int) -> float:
        return 1 / 2
