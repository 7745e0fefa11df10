"""The tasks by name. Prompts and parameters are the published ones; names are our own where texts or words are not theirs.

Passkey: Mohtashami and Jaggi 2023, "Landmark Attention", the authors' llama/run_test.py. Needles without shared words: Modarressi
et al. 2025, "NoLiMa". The others: Hsieh et al. 2024, "RULER", the authors' scripts/synthetic.yaml,
scripts/data/synthetic/constants.py and one generator per task. docs/measuring.md lists where
ours differ.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from scipy.special import zeta

from longitude.measure.retrieval.haystack import FILLER, Haystack, depths_of, word_list
from longitude.measure.retrieval.prompts import Question


def first_number(output: str, answers: Sequence[str]) -> float:
    """1 if the first run of digits is the number queried, else 0 (Mohtashami and Jaggi 2023, llama/run_test.py)."""
    [answer] = answers
    number = re.search(r"\d+", output)
    return float(number is not None and int(number.group()) == int(answer))


def match_all(output: str, answers: Sequence[str]) -> float:
    """The part of the answers that occurs in the output, whatever the case (RULER's string_match_all)."""
    output = re.sub(r"[\x00-\x1f]", "\n", output).lower()
    return sum(answer.lower() in output for answer in answers) / len(answers)


Draw = Callable[[Random, int, float | None, Haystack], Question]
"""(random numbers, length in tokens, depth or None for a random one, running text) -> one trial."""

Pairs = Sequence[tuple[str, str]]
"""(key, number)."""


@dataclass(frozen=True)
class Task:
    """A kind of question.

    draw: makes a question. new_tokens: tokens to generate, as published. source: its publication.
    score: (what was generated, answers) -> 0 to 1; metric: the name of its mean over trials.
    depths: whether one needle is put at a depth that the caller may choose.
    text: whether it hides needles in running text.
    """

    name: str
    draw: Draw
    new_tokens: int
    source: str
    summary: str
    score: Callable[[str, Sequence[str]], float] = match_all
    metric: str = "recall"
    depths: bool = False
    text: bool = False


# ---- numbers hidden in text ------------------------------------------------------------------------------------------
PASSKEY_OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."
PASSKEY_ASK, PASSKEY_BEGIN = "What is the pass key? The pass key is", "The pass key is"

NEEDLE = "One of the special magic numbers for {key} is: {value}."
ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n{context}\n",
    "What is the special magic number for {query} mentioned in the provided text?"
    " The special magic number for {query} mentioned in the provided text is",
)
MANY = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n{context}\n",
    "What are all the special magic numbers for {query} mentioned in the provided text?"
    " The special magic numbers for {query} mentioned in the provided text are",
)


def passkey(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """A five-digit number after the part `depth` of `size` letters of filler. The published code draws 1 to 50000."""
    key = str(random.randint(10000, 50000))
    [depth], line = depths_of(random, 1, depth), PASSKEY.format(key=key)

    def text(size: int) -> str:
        before = int(depth * size)
        return "\n".join([PASSKEY_OPENING, _filler(before), line, _filler(size - before), PASSKEY_ASK])

    return Question(text=text, ask=PASSKEY_ASK, begin=PASSKEY_BEGIN, needles=(line,), answers=(key,))


def _filler(letters: int) -> str:
    """The filler again and again, cut after `letters` letters, as published."""
    return ((FILLER + " ") * (letters // len(FILLER) + 1))[:letters]


def needles(keys: int, numbers: int, queried: int = 0) -> Draw:
    """Task of `keys` keys with `numbers` numbers in running text; `queried` of the pairs are asked in random order; 0: all."""

    def draw(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
        pairs = _pairs(random, keys, numbers, haystack)
        asked = random.sample(pairs, queried) if queried else pairs
        return _hidden(pairs, asked, depths_of(random, numbers, depth), haystack)

    return draw


def _pairs(random: Random, keys: int, numbers: int, haystack: Haystack) -> Pairs:
    """Different keys of two words each, with different numbers of seven digits that do not stand in the haystack."""
    words = random.sample(word_list(), 2 * keys)
    names = [f"{first}-{second}" for first, second in zip(words[::2], words[1::2])]
    values = _different(numbers, lambda: str(random.randint(10**6, 10**7 - 1)), haystack)
    return list(zip(names * (numbers // keys), values, strict=True))


def _hidden(pairs: Pairs, asked: Pairs, depths: Sequence[float], haystack: Haystack) -> Question:
    """The question for some of the pairs, with a needle per (key, number) in `size` words of running text."""
    lines = tuple(NEEDLE.format(key=key, value=value) for key, value in pairs)
    answers = tuple(value for _, value in asked)
    opening, asking = ONE if len(answers) == 1 else MANY
    ask = asking.format(query=_listed([*dict(asked)]))

    def text(size: int) -> str:
        return opening.format(context=haystack.with_needles(size, lines, depths)) + ask

    begin, whole = ask[ask.index("? ") + 2 :], f" {_listed(answers)}"
    return Question(text=text, ask=ask, begin=begin, needles=lines, answers=answers, whole_answer=whole)


def _listed(items: Sequence[str]) -> str:
    """A | a, and b | a, b, and c: RULER's way."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


def _different(count: int, draw: Callable[[], str], avoid: Haystack | tuple[str, ...] = ()) -> list[str]:
    """`count` different values that `draw` makes, none of them in `avoid`."""
    values: list[str] = []
    while len(values) < count:
        value = draw()
        if value not in values and value not in avoid:
            values.append(value)
    return values


# ---- a needle that shares no word with its question: who knows the world knows the answer --------------------------------
LANDMARKS = {
    "the Eiffel Tower": ("Paris", "France"), "the Colosseum": ("Rome", "Italy"), "the Brandenburg Gate": ("Berlin", "Germany"),
    "the Sagrada Familia": ("Barcelona", "Spain"), "Big Ben": ("London", "England"), "the Acropolis": ("Athens", "Greece"),
    "the Kremlin": ("Moscow", "Russia"), "the Hagia Sophia": ("Istanbul", "Turkey"), "the Opera House": ("Sydney", "Australia"),
    "the Christ the Redeemer statue": ("Rio de Janeiro", "Brazil"), "the Charles Bridge": ("Prague", "Czechia"),
    "the Little Mermaid statue": ("Copenhagen", "Denmark"), "the Forbidden City": ("Beijing", "China"),
}  # fmt: skip
"""Well-known places, with their city and country."""
NAMES = "Amira Bruno Clara Dmitri Elena Farid Greta Hiro Ines Jonas Katya Luca Mara Nadia Oskar Petra Rosa Tilda Yuki".split()
LIVES = "Actually, {name} lives next to {place}."
WHO = (
    "You will answer a question based on the following text. Memorize who is where.\n{context}\n",
    "Which character has been to {place}? Only answer with the name of the character. The character is",
)


def inferred(step: int) -> Draw:
    """A character beside a landmark, asked for by the landmark's city (step 0) or country (1): no word of one is in the other."""

    def draw(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
        name, landmark = random.choice([name for name in NAMES if name not in haystack]), random.choice([*LANDMARKS])
        opening, asking = WHO
        line, ask = LIVES.format(name=name, place=landmark), asking.format(place=LANDMARKS[landmark][step])
        depths = depths_of(random, 1, depth)

        def text(size: int) -> str:
            return opening.format(context=haystack.with_needles(size, (line,), depths)) + ask

        return Question(text=text, ask=ask, begin=ask[ask.index("The character") :], needles=(line,), answers=(name,))

    return draw


# ---- variable tracking: one chain of four assignments after the first, in repeated sentences -------------------------
HOPS = 4
EXAMPLE_LINES = 5
"""Lines of filler in the solved example before the question."""
TRACKING = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
ASK_VALUE = (
    "Question: Find all variables that are assigned the value {value} in the text above."
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the value "
    "{value}, they are: "
)


def variables(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """All variables that have a number: VAR A = number, VAR B = VAR A, ...; a solved example first, names of 3 letters."""
    example, chain = _chain(random, letters=3), _chain(random, letters=5)
    while example.ask == chain.ask:  # the same number
        chain = _chain(random, letters=5)
    solved = example.text(EXAMPLE_LINES) + example.whole_answer + "\n\n\n\n"
    return replace(chain, text=lambda size: solved + chain.text(size))


def _chain(random: Random, letters: int) -> Question:
    """As published, down to its spaces: assignments of one number along names, between `size` lines of filler."""
    names = _different(HOPS + 1, lambda: "".join(random.choices(ascii_uppercase, k=letters)))
    value, depths = str(random.randint(10000, 99998)), depths_of(random, HOPS + 1)
    first = f"VAR {names[0]} = {value}"
    hops = [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
    ask = ASK_VALUE.format(value=value, count=len(names))

    def text(size: int) -> str:
        parts = [FILLER + "\n"] * size
        for i, line in enumerate([first, *(hop + " " for hop in hops)]):
            parts.insert(int(depths[i] * size) + i, line)
        return TRACKING.format(context=" ".join(parts)) + ask

    of: dict[str, Any] = {"ask": ask, "begin": _answer_of(ask), "whole_answer": " ".join(names)}
    return Question(text=text, smallest=1, needles=(first, *hops), answers=tuple(names), **of)


def _answer_of(ask: str) -> str:
    return ask[ask.index("Answer: ") :]


# ---- words to be counted: common ones of a numbered list, frequent ones among made-up words --------------------------
COMMON = 10
"""Words to be found in a list."""
LONG = 4096
"""Tokens from which a list has the longer repetitions."""
LISTED = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
)
ASK_COMMON = (
    "Question: What are the 10 most common words in the above list?"
    " Answer: The top 10 words that appear most often in the list are:"
)

ALPHA = 2.0
LETTERS = 6
"""Letters of a made-up word."""
NEW = 50
"""Tokens kept for the answer, as published."""
SHARE = 50
"""Tokens of the prompt per made-up word of the vocabulary."""
CLEAR = 74
"""Words from which rank 4 always occurs more often than rank 5."""
CODED = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
)
ASK_FREQUENT = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)


def common(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """Ten words 30 times each, all others 3 times; below `LONG` tokens 6 times and once. A solved example first.

    Units of filler: different words in the list.
    """
    often, seldom = (30, 3) if length >= LONG else (6, 1)
    different, *repeats = (40, 10, 3) if length >= LONG else (20, 3, 1)
    example, question = (random.sample(word_list(), len(word_list())) for _ in range(2))
    solved = LISTED.format(context=_list(example, different, *repeats, order=random.random()))
    order = random.random()

    def text(size: int) -> str:
        listed = LISTED.format(context=_list(question, size, often, seldom, order=order))
        return f"{solved}{ASK_COMMON}{_numbered(example[:COMMON])}\n{listed}{ASK_COMMON}"

    answers = tuple(question[:COMMON])
    of: dict[str, Any] = {"ask": ASK_COMMON, "begin": _answer_of(ASK_COMMON), "whole_answer": _numbered(answers)}
    return Question(text=text, smallest=2 * COMMON, answers=answers, **of)


def _list(words: Sequence[str], size: int, often: int, seldom: int, *, order: float) -> str:
    """`size` different words, the first ten `often` times, shuffled by `order` and numbered from 1."""
    listed = list(words[:COMMON]) * often + [_word(words, i) for i in range(COMMON, size)] * seldom
    Random(order).shuffle(listed)
    return _numbered(listed).strip()


def _word(words: Sequence[str], i: int) -> str:
    """Word i; past the end two joined by a hyphen, each pair once."""
    lap, place = divmod(i, len(words))
    return words[place] if lap == 0 else f"{words[place]}-{words[(place + lap) % len(words)]}"


def _numbered(words: Sequence[str]) -> str:
    return "".join(f" {i}. {word}" for i, word in enumerate(words, start=1))


def frequent(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """Made-up words, rank k of them size k^-2 / zeta(2) times, rounded down; rank 1 is "..." and not queried."""
    made_up = max(5, (length - NEW) // SHARE) - 1
    vocabulary = ["...", *_different(made_up, lambda: "".join(random.choices(ascii_lowercase, k=LETTERS)))]
    order = random.random()

    def text(size: int) -> str:
        counts = [int(size * rank**-ALPHA / zeta(ALPHA)) for rank in range(1, len(vocabulary) + 1)]
        coded = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        Random(order).shuffle(coded)
        return CODED.format(context=" ".join(coded)) + ASK_FREQUENT

    begin, answers = _answer_of(ASK_FREQUENT), tuple(vocabulary[1:4])
    return Question(text=text, smallest=CLEAR, ask=ASK_FREQUENT, begin=begin, answers=answers)


# ---- by name ---------------------------------------------------------------------------------------------------------
TASKS: dict[str, Task] = {task.name: task for task in (
    Task(
        "passkey", passkey, 10, "Mohtashami and Jaggi 2023",
        "a five-digit number, given twice in one line of repeated sentences",
        score=first_number, metric="accuracy", depths=True,
    ),
    Task("needle-filler", needles(1, 1), 128, "RULER niah_single_1", "one number in repeated sentences", depths=True),
    Task("needle-single", needles(1, 1), 128, "RULER niah_single_2", "one number in running text", depths=True, text=True),
    Task("needle-multi-key", needles(4, 4, 1), 128, "RULER niah_multikey_1", "one of four numbers with four keys", text=True),
    Task("needle-multi-value", needles(1, 4), 128, "RULER niah_multivalue", "all four numbers of one key", text=True),
    Task("needle-multi-query", needles(4, 4, 4), 128, "RULER niah_multiquery", "the numbers of four keys at once", text=True),
    Task(
        "needle-city", inferred(0), 32, "after NoLiMa", "who lives beside a landmark, asked for by its city",
        metric="accuracy", depths=True, text=True,
    ),
    Task(
        "needle-country", inferred(1), 32, "after NoLiMa", "who lives beside a landmark, asked for by its country",
        metric="accuracy", depths=True, text=True,
    ),
    Task("variable-tracking", variables, 30, "RULER vt", "the five variables of one chain of assignments"),
    Task("common-words", common, 120, "RULER cwe", "the ten most common words of a list"),
    Task("frequent-words", frequent, 50, "RULER fwe", "the three most frequent words of a text of made-up words"),
)}  # fmt: skip
