"""Summaries of rows of retrieval: the effective length."""

from collections.abc import Iterable
from math import isfinite
from statistics import fmean

import pandas as pd

from longitude.errors import UsageError
from longitude.measure.rows import Row

WEIGHTING = "trial"
"""Weighting of retrieval rows, which no other rows have."""
THRESHOLD = 0.856
"""RULER's threshold: the score of Llama2-7B at 4K, averaged over its 13 tasks (Hsieh et al. 2024, table of results)."""


DEFINITION = (
    "effective length: the longest measured length up to which the score, averaged over depths and then over the tasks with a "
    f"score, stays at or above {THRESHOLD:.1%} (what Llama2-7B reaches at 4K on RULER's 13 tasks)"
)
"""The meaning of `effective_length` at its usual threshold, for the reader."""


def effective_length(rows: Iterable[Row], threshold: float = THRESHOLD) -> int | None:
    """The longest length of one model's retrieval rows up to which the mean over tasks stays at or above the threshold.

    Within a task and length, depths count equally; within a length, tasks do. A length at which some of the tasks have no
    score (their prompts do not fit) is left out, since its mean would be about other tasks.

    Args:
        rows: Rows of one model; rows of other measurements are left out.
        threshold: A score from 0 to 1.

    Returns:
        The length in tokens; None if the score at the shortest one is below the threshold.

    Raises:
        ValueError: For rows of two models, or a threshold outside 0 to 1.

    Source:
        The threshold: Hsieh et al. 2024, RULER, arXiv 2404.06654, https://arxiv.org/abs/2404.06654.
    """
    if not 0 <= threshold <= 1:
        raise UsageError("the threshold of the effective length", "within 0 and 1", threshold, "85.6% is 0.856")
    rows = [row for row in rows if row.weighting == WEIGHTING]
    models = {(row.model, row.label, row.seed) for row in rows}
    if len(models) > 1:
        raise ValueError(f"an effective length is of one model, got rows of {len(models)}; take the rows of one")
    longest = None
    for length, score in scores_by_length(rows).items():
        if score < threshold:
            break
        longest = length
    return longest


def scores_by_length(rows: Iterable[Row]) -> dict[int, float]:
    """Scores of one model by length.

    Args:
        rows: Rows of one model; rows of other measurements are left out.

    Returns:
        Length -> mean over tasks, ascending, for lengths at which every task of the rows has all its scores.
    """
    values = [(row.length, row.task, row.value) for row in rows if row.weighting == WEIGHTING]
    scores = pd.DataFrame(values, columns=["length", "task", "score"]).astype({"score": float})
    by_task = scores.groupby(["length", "task"])["score"].agg(fmean).unstack()
    return {length: mean for length, row in by_task.iterrows() if isfinite(mean := fmean(row))}  # type: ignore[misc]
