"""Scores of a generated answer, from 0 to 1, as published."""

import re
from collections.abc import Sequence


def first_number(output: str, answers: Sequence[str]) -> float:
    """1 if the first run of digits is the number queried, else 0 (Mohtashami and Jaggi 2023, llama/run_test.py)."""
    [answer] = answers
    number = re.search(r"\d+", output)
    return float(number is not None and int(number.group()) == int(answer))


def match_all(output: str, answers: Sequence[str]) -> float:
    """The part of the answers that occurs in the output, whatever the case (RULER's string_match_all)."""
    output = re.sub(r"[\x00-\x1f]", "\n", output).lower()
    return sum(answer.lower() in output for answer in answers) / len(answers)
