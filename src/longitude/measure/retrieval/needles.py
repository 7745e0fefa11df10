"""Numbers hidden in text: the passkey of Mohtashami and Jaggi 2023, and needles in the style of RULER (Hsieh et al. 2024)."""

from collections.abc import Sequence
from random import Random

from longitude.measure.retrieval.haystack import FILLER, Haystack, word_list
from longitude.measure.retrieval.prompts import Question

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
ASK = "What is the pass key? The pass key is"

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
    depth = random.random() if depth is None else depth
    line = KEY.format(key=key)

    def text(size: int) -> str:
        before = int(depth * size)
        return "\n".join([TASK, _filler(before), line, _filler(size - before), ASK])

    return Question(text=text, ask=ASK, needles=(line,), answers=(key,), whole_answer=f" {key}")


def _filler(letters: int) -> str:
    """The filler again and again, cut after `letters` letters, as published."""
    return ((FILLER + " ") * (letters // len(FILLER) + 1))[:letters]


def in_filler(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """One number between `size` lines of filler."""
    [key], [value] = _keys(random, 1), _values(random, 1, haystack)
    depth = random.random() if depth is None else depth
    line = NEEDLE.format(key=key, value=value)
    opening, asking = ONE
    ask = asking.format(query=key)

    def text(size: int) -> str:
        lines = [FILLER] * size
        lines.insert(round(depth * size), line)
        return opening.format(context="\n".join(lines)) + ask

    return Question(text=text, ask=ask, needles=(line,), answers=(value,), whole_answer=f" {value}")


def single(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """One key, one number."""
    [key], [value] = _keys(random, 1), _values(random, 1, haystack)
    depth = random.random() if depth is None else depth
    return _hidden([(key, value)], [depth], [key], [value], haystack)


def multi_key(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """Four keys with a number each; one key is queried."""
    keys, values = _keys(random, 4), _values(random, 4, haystack)
    chosen = random.randrange(4)
    return _hidden(list(zip(keys, values)), _depths(random, 4), [keys[chosen]], [values[chosen]], haystack)


def multi_value(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """One key with four numbers, all of them queried."""
    [key], values = _keys(random, 1), _values(random, 4, haystack)
    return _hidden([(key, value) for value in values], _depths(random, 4), [key], values, haystack)


def multi_query(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """Four keys with a number each, all queried, in an order of their own."""
    keys, values = _keys(random, 4), _values(random, 4, haystack)
    pairs = list(zip(keys, values))
    queries = random.sample(pairs, 4)
    return _hidden(pairs, _depths(random, 4), [key for key, _ in queries], [value for _, value in queries], haystack)


def _hidden(
    pairs: Sequence[tuple[str, str]],
    depths: Sequence[float],
    queries: Sequence[str],
    answers: Sequence[str],
    haystack: Haystack,
) -> Question:
    """The question for the numbers of some keys, with a needle per (key, number) in `size` words of running text."""
    lines = tuple(NEEDLE.format(key=key, value=value) for key, value in pairs)
    opening, asking = ONE if len(answers) == 1 else MANY
    ask = asking.format(query=_listed(queries))

    def text(size: int) -> str:
        return opening.format(context=haystack.with_needles(size, lines, depths)) + ask

    return Question(text=text, ask=ask, needles=lines, answers=tuple(answers), whole_answer=f" {_listed(answers)}")


def _listed(items: Sequence[str]) -> str:
    """A | a, and b | a, b, and c: RULER's way."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


def _depths(random: Random, count: int) -> list[float]:
    return sorted(random.random() for _ in range(count))


def _keys(random: Random, count: int) -> list[str]:
    """Different keys of two words each."""
    words = random.sample(word_list(), 2 * count)
    return [f"{first}-{second}" for first, second in zip(words[::2], words[1::2])]


def _values(random: Random, count: int, haystack: Haystack) -> list[str]:
    """Different numbers of seven digits that do not stand in the haystack."""
    values: list[str] = []
    while len(values) < count:
        value = str(random.randint(10**6, 10**7 - 1))
        if value not in values and value not in haystack:
            values.append(value)
    return values
