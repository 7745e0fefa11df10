"""Scores of a generated answer, from 0 to 1, as published; and the mean of many with its interval."""

import math
import re
from collections.abc import Sequence

CONFIDENCE = 1.959964
"""Standard normal quantile of a two-sided 95 % interval."""


def first_number(output: str, answers: Sequence[str]) -> float:
    """1 if the first run of digits is the number queried, else 0 (Mohtashami and Jaggi 2023, llama/run_test.py)."""
    [answer] = answers
    number = re.search(r"\d+", output)
    return float(number is not None and int(number.group()) == int(answer))


def match_all(output: str, answers: Sequence[str]) -> float:
    """The part of the answers that occurs in the output, whatever the case (RULER's string_match_all)."""
    output = re.sub(r"[\x00-\x1f]", "\n", output).lower()
    return sum(answer.lower() in output for answer in answers) / len(answers)


def mean(scores: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of scores from 0 to 1, one or more, with Wilson's 95 % interval (Wilson 1927).

    Wilson's interval is for right or wrong answers and has a width for ten of ten, too, where a bootstrap has none. Scores
    in between spread less than right-or-wrong ones of the same mean, so that for them it is on the wide side.
    """
    count, value = len(scores), math.fsum(scores) / len(scores)
    shrink = 1 + CONFIDENCE**2 / count
    middle = (value + CONFIDENCE**2 / (2 * count)) / shrink
    half = CONFIDENCE / shrink * math.sqrt(value * (1 - value) / count + (CONFIDENCE / (2 * count)) ** 2)
    return value, min(value, max(0.0, middle - half)), max(value, min(1.0, middle + half))
