"""Variable tracking of RULER (Hsieh et al. 2024): one chain of four assignments after the first, in repeated sentences."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from longitude.measure.retrieval.haystack import FILLER, Haystack
from longitude.measure.retrieval.prompts import Question

HOPS = 4
EXAMPLE_LINES = 5
"""Lines of filler in the solved example before the question."""
OPENING = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
ASK = (
    "Question: Find all variables that are assigned the value {value} in the text above."
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the value "
    "{value}, they are: "
)


def variables(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """All variables that hold a number: VAR A = number, VAR B = VAR A, ...; a solved example first, names of 3 letters."""
    example, chain = _chain(random, letters=3), _chain(random, letters=5)
    while example.value == chain.value:
        chain = _chain(random, letters=5)
    solved = example.text(EXAMPLE_LINES) + " ".join(example.names) + "\n\n\n\n"
    return Question(
        text=lambda size: solved + chain.text(size),
        smallest=1,
        ask=chain.ask,
        needles=tuple(chain.lines),
        answers=tuple(chain.names),
        whole_answer=" ".join(chain.names),
    )


@dataclass(frozen=True)
class Chain:
    """Assignments of one number along `names`, each after about the part depths[i] of the filler."""

    names: list[str]
    value: str
    depths: list[float]

    @property
    def lines(self) -> list[str]:
        """VAR A = number, then VAR B = VAR A, ..."""
        hops = [f"VAR {name} = VAR {before}" for before, name in pairwise(self.names)]
        return [f"VAR {self.names[0]} = {self.value}", *hops]

    @property
    def ask(self) -> str:
        return ASK.format(value=self.value, count=len(self.names))

    def text(self, size: int) -> str:
        """The question as published, down to its spaces: lines of filler with the assignments between them."""
        first, *hops = self.lines
        parts = [FILLER + "\n"] * size
        for i, line in enumerate([first, *(hop + " " for hop in hops)]):
            parts.insert(int(self.depths[i] * size) + i, line)
        return OPENING.format(context=" ".join(parts)) + self.ask


def _chain(random: Random, letters: int) -> Chain:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(random.choices(ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    return Chain(names, str(random.randint(10000, 99998)), sorted(random.random() for _ in range(HOPS + 1)))
