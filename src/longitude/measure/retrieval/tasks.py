"""The tasks by name. Prompts and parameters are the published ones; names are our own where texts or words are not theirs.

Passkey: Mohtashami and Jaggi 2023, "Landmark Attention", the authors' llama/run_test.py. The others: Hsieh et al. 2024,
"RULER", the authors' scripts/synthetic.yaml, scripts/data/synthetic/constants.py and one generator per task.
docs/retrieval.md lists where ours differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from longitude.measure.retrieval import needles, tracking, words
from longitude.measure.retrieval.haystack import Haystack
from longitude.measure.retrieval.prompts import Question
from longitude.measure.retrieval.scoring import first_number, match_all

Draw = Callable[[Random, int, float | None, Haystack], Question]
"""(random numbers, length in tokens, depth or None for a random one, running text) -> one trial."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of question.

    draw: makes one. score: (what was generated, answers) -> 0 to 1; metric: the name of its mean over trials.
    new_tokens: to generate, as published. depths: whether one needle is put at a depth that the caller may choose.
    text: whether it hides needles in running text, which the caller may give. source: where it is published.
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


_ALL = (
    Task(
        name="passkey",
        draw=needles.passkey,
        new_tokens=10,
        score=first_number,
        metric="accuracy",
        depths=True,
        source="Mohtashami and Jaggi 2023",
        summary="a five-digit number, given twice in one line of repeated sentences",
    ),
    Task(
        name="needle-filler",
        draw=needles.in_filler,
        new_tokens=128,
        depths=True,
        source="RULER niah_single_1",
        summary="one number in repeated sentences",
    ),
    Task(
        name="needle-single",
        draw=needles.single,
        new_tokens=128,
        depths=True,
        text=True,
        source="RULER niah_single_2",
        summary="one number in running text",
    ),
    Task(
        name="needle-multi-key",
        draw=needles.multi_key,
        new_tokens=128,
        text=True,
        source="RULER niah_multikey_1",
        summary="one of four numbers with four keys",
    ),
    Task(
        name="needle-multi-value",
        draw=needles.multi_value,
        new_tokens=128,
        text=True,
        source="RULER niah_multivalue",
        summary="all four numbers of one key",
    ),
    Task(
        name="needle-multi-query",
        draw=needles.multi_query,
        new_tokens=128,
        text=True,
        source="RULER niah_multiquery",
        summary="the numbers of four keys at once",
    ),
    Task(
        name="variable-tracking",
        draw=tracking.variables,
        new_tokens=30,
        source="RULER vt",
        summary="the five variables of one chain of assignments",
    ),
    Task(
        name="common-words",
        draw=words.common,
        new_tokens=120,
        source="RULER cwe",
        summary="the ten most common words of a list",
    ),
    Task(
        name="frequent-words",
        draw=words.frequent,
        new_tokens=50,
        source="RULER fwe",
        summary="the three most frequent words of a text of made-up words",
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
