"""Words to be counted, of RULER (Hsieh et al. 2024): common words of a numbered list, and frequent ones among made-up words."""

from collections.abc import Sequence
from random import Random
from string import ascii_lowercase

from scipy.special import zeta

from longitude.measure.retrieval.haystack import Haystack, word_list
from longitude.measure.retrieval.prompts import Question

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
"""Of a made-up word."""
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
    example, question = _shuffled(random), _shuffled(random)
    solved = (
        LISTED.format(context=_list(example, different, *repeats, order=random.random()))
        + ASK_COMMON
        + _numbered(example[:COMMON])
    )
    order = random.random()

    def text(size: int) -> str:
        return f"{solved}\n{LISTED.format(context=_list(question, size, often, seldom, order=order))}{ASK_COMMON}"

    answers = tuple(question[:COMMON])
    return Question(text=text, smallest=2 * COMMON, ask=ASK_COMMON, answers=answers, whole_answer=_numbered(answers))


def _shuffled(random: Random) -> list[str]:
    return random.sample(word_list(), len(word_list()))


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
    vocabulary = ["..."]
    while len(vocabulary) < max(5, (length - NEW) // SHARE):
        word = "".join(random.choices(ascii_lowercase, k=LETTERS))
        if word not in vocabulary:
            vocabulary.append(word)
    order = random.random()

    def text(size: int) -> str:
        counts = [int(size * rank**-ALPHA / zeta(ALPHA)) for rank in range(1, len(vocabulary) + 1)]
        coded = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        Random(order).shuffle(coded)
        return CODED.format(context=" ".join(coded)) + ASK_FREQUENT

    answers = tuple(vocabulary[1:4])
    return Question(text=text, smallest=CLEAR, ask=ASK_FREQUENT, answers=answers, whole_answer=f" {' '.join(answers)}")
