"""Haystacks for retrieval: the passkey's filler, or prose that comes with Python; and a list of words."""

import platform
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Mohtashami and Jaggi 2023, and the repeated noise of RULER (Hsieh et al. 2024)."""
NEAR = 20
"""Words within which a needle moves to the end of a sentence."""


@dataclass(frozen=True)
class Haystack:
    """Running text as words, white space collapsed; it repeats if more of it is needed.

    words: never empty. source: its name in the rows. space: separator of words.
    """

    words: tuple[str, ...]
    source: str
    space: str = " "

    def with_needles(self, size: int, needles: Sequence[str], depths: Sequence[float]) -> str:
        """The first `size` words, with needle i after about the part depths[i] (0 to 1, ascending) of them.

        A needle is put between two sentences where one ends within `NEAR` words, otherwise between two words.
        """
        words = [self.words[i % len(self.words)] for i in range(size)]
        for depth, needle in reversed(list(zip(depths, needles, strict=True))):
            words.insert(self._between(round(depth * size), size), needle)
        return self.space.join(words)

    def _between(self, place: int, size: int) -> int:
        """Words before the needle: the nearest to `place` of the text's beginnings, ends, and ends of sentences."""
        lap, rest = divmod(place, len(self.words))
        i = bisect_left(self._ends, rest)
        ends = [lap * len(self.words) + end for end in self._ends[max(0, i - 1) : i + 1]]
        near = [end for end in (lap * len(self.words), *ends, size) if end <= size and abs(end - place) <= NEAR]
        return min(near, key=lambda end: abs(end - place), default=place)

    def __contains__(self, text: str) -> bool:
        return text in self._joined

    @cached_property
    def _joined(self) -> str:
        return " ".join(self.words)

    @cached_property
    def _ends(self) -> list[int]:
        """Numbers of words after which a sentence ends, ascending."""
        return [i + 1 for i, word in enumerate(self.words) if word.rstrip("\"')").endswith((".", "!", "?"))]


def depths_of(random: Random, count: int, depth: float | None = None) -> list[float]:
    """The depth that was asked for, or `count` random ones, ascending."""
    return sorted(random.random() for _ in range(count)) if depth is None else [depth]


LINES = Haystack((FILLER,), "repeated sentences", "\n")
"""Lines of filler: a "word" is one."""


@cache
def of_python() -> Haystack:
    """Paragraphs of the Python language reference as `help()` shows it: prose that every Python has, 200 kB of it.

    Only whole sentences, each paragraph once: no grammar, no examples. ValueError if the reference was removed.
    """
    paragraphs = [paragraph.strip() for paragraph in _reference().split("\n\n")]
    prose = [text for text in paragraphs if text[:1].isupper() and text.endswith(".") and "::=" not in text]
    words = tuple(" ".join(dict.fromkeys(prose)).split())
    return Haystack(words, f"Python {platform.python_version()} language reference")


@cache
def word_list() -> tuple[str, ...]:
    """All lower-case words of 4 to 10 letters of that reference, in alphabetical order: some two thousand."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,10}\b", _reference()))))


def _reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python comes without the texts of help() (module pydoc_data), which the needles' text and words are "
            "taken from; install the whole of Python's standard library"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))
