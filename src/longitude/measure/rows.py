"""One measurement, one row: the versioned table that stores every number of Longitude."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from longitude.errors import UsageError, unknown
from longitude.runs.files import atomic, regular

SCHEMA = 2
"""Version of the table; reading a table of another version raises ValueError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A measured number with its protocol. Missing values, and those that do not apply, are None, never NaN, 0 or -1.

    Attributes:
        schema: Version of this table, `SCHEMA`.
        task: "text" for language modelling; otherwise the name of the task.
        model: Name or path of the model.
        encoding: The registered name of its position encoding.
        label: The reader's name of this model (an encoding with its options).
        seed: The training seed. (Not the seed of the bootstrap, which is fixed by the measuring function.)
        train_length: Tokens per training example.
        length: The length the row is about, in tokens.
        position_from: The first of the positions averaged over; None: all. Position t is the 0-based index, inside the
            window, of the input token whose output predicts the next one.
        position_to: One after the last of them.
        metric: "bits_per_byte" (nats / ln 2 / bytes), "perplexity" (exp of nats / tokens), "bits_per_byte_difference" (of the
            same targets with less context), or a task's own.
        method: "non-overlapping", "sliding", "per-position", "same-targets", or a task's own.
        window: Input tokens that the model attends over at once.
        stride: Tokens the window moved by.
        weighting: Items with equal weight in the average; "token": every scored target counts once.
        bos: "none", or the place of a beginning-of-sequence token; "by the server" if a server makes the tokens.
        truncation: Treatment of text that did not fill the windows.
        documents: Documents scored.
        tokens: Target tokens scored.
        count: Divisor of the value: bytes for bits per byte, tokens for perplexity, trials for a task.
        value: The metric. None when it is not a finite number (a diverged model); `count` then is what was tried.
        low: Lower end of the 95% interval over documents. None with fewer than two documents or no value.
        high: Its upper end.
        dtype: Data type of the model's weights.
        backend: Attention implementation.
        commit: Commit of the code that measured.
        train_positions: Sampler of the positions of training examples with its options, "randomized(max_length=4096)", unless
            they were 0, 1, 2, ...
        prefill: Passes over a window, "one pass" or "chunks of 1024 with the cache", with the reason if another way was
            requested.
        depth: Depth of the needle, 0 (first) to 1 (last); None if it was random or there is none.
        distance: Distance from the question back to what it asks for, in the units of `length`; the smallest, if several
            share a row. None: over all.
        reason: Why the model was not measured.
        learning_rate: Peak learning rate of its training.
        train_steps: Optimizer steps of its training.
        train_tokens: Tokens that it read in training.
        train_bytes: Bytes of these tokens; with a tokenizer, estimated by the mean bytes per token of the training text.
        train_seconds: Time of its training, which no other run repeats exactly; None if training was interrupted.
        parameters: Number of parameters of the model.
        flops_per_token: FLOPs of its training per token, forward and backward, as counted by longitude/runs/costs.py.

    Raises:
        ValueError: For a float that is not finite.
    """

    schema: int = SCHEMA
    task: str
    model: str | None = None
    encoding: str | None = None
    label: str | None = None
    seed: int | None = None
    train_length: int | None = None
    length: int | None = None
    position_from: int | None = None
    position_to: int | None = None
    metric: str
    method: str | None = None
    window: int | None = None
    stride: int | None = None
    weighting: str | None = None
    bos: str | None = None
    truncation: str | None = None
    documents: int | None = None
    tokens: int | None = None
    count: int | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    dtype: str | None = None
    backend: str | None = None
    commit: str | None = None
    train_positions: str | None = None
    prefill: str | None = None
    depth: float | None = None
    distance: int | None = None
    reason: str | None = None
    learning_rate: float | None = None
    train_steps: int | None = None
    train_tokens: int | None = None
    train_bytes: int | None = None
    train_seconds: float | None = None
    parameters: int | None = None
    flops_per_token: float | None = None

    def __post_init__(self):
        for name in ("value", "low", "high", "learning_rate", "train_seconds", "flops_per_token"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise UsageError(f"Row {name}", "a finite number or None", number, "pass None for missing")


TRAINING = tuple("learning_rate train_steps train_tokens train_bytes train_seconds parameters flops_per_token".split())
"""Columns about the training of the model: settings, amount and time."""
_LABELS = "task model encoding label seed train_length train_positions bos backend commit prefill"
LABELS = (*_LABELS.split(), *TRAINING)
"""Columns that a caller of a measurement may fill."""


def check_labels(labels: Iterable[str]) -> None:
    """ValueError for a label that is not among the columns that a caller may fill."""
    for name in labels:
        if name not in LABELS:
            raise unknown("label", name, LABELS, "They are columns of longitude.measure.Row.")


def _dtype(annotation) -> str:
    kind = next(kind for kind in (int, float, str) if kind in (annotation, *get_args(annotation)))
    return {int: "Int64", float: "Float64", str: "string"}[kind]


# Column order is field order. The nullable dtypes keep integers integers, and a missing value apart from NaN.
COLUMNS = {field.name: _dtype(field.type) for field in fields(Row)}
ADDED = ("train_positions", "prefill", "depth", "distance", "reason", *TRAINING)
"""Columns that a table has only if a row has a value in them, so that other tables are as before these were added."""


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a table.

    Args:
        rows: In the order of the table.

    Returns:
        The columns of `Row` in order, with nullable dtypes.
    """
    rows = list(rows)
    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    used = {name: values for name, values in columns.items() if name not in ADDED or any(x is not None for x in values)}
    return pd.DataFrame({name: pd.array(values, dtype=COLUMNS[name]) for name, values in used.items()})


def from_frame(frame: pd.DataFrame) -> list[Row]:
    """A table as rows again; the inverse of `to_frame`.

    Args:
        frame: As `to_frame` makes it.

    Returns:
        The rows in its order.

    Raises:
        ValueError: When it is not a table of schema version `SCHEMA`.
    """
    frame = check_frame(frame)
    columns = [[None if value is pd.NA else value for value in frame[name].array.astype(object)] for name in frame]
    return [Row(**dict(zip(frame, values, strict=True))) for values in zip(*columns, strict=True)]


def check_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """The same table with the dtypes of `Row`; ValueError unless it has the columns of schema version `SCHEMA`."""
    columns = [name for name in COLUMNS if name not in ADDED or name in frame]
    versions = {*frame["schema"]} if "schema" in frame else {None}
    if versions - {SCHEMA} or list(frame) != columns:
        missing = [name for name in columns if name not in frame]
        unknown = [name for name in frame if name not in columns]
        raise UsageError(
            "results",
            f"schema version {SCHEMA}, with the columns of longitude.measure.Row in their order",
            f"version {', '.join(sorted(map(str, versions)))}, missing: {missing}, unknown: {unknown}",
            "measure again, or read them with the release of longitude that wrote them",
        )
    return frame.astype({name: COLUMNS[name] for name in columns})


def write_rows(rows: Iterable[Row], path: str | os.PathLike) -> None:
    """Write rows as parquet: the file is whole or not there, whenever the process is killed.

    Args:
        rows: In the order of the table.
        path: The file, which is replaced.
    """
    with atomic(Path(path)) as unfinished:
        to_frame(rows).to_parquet(unfinished, index=False, write_page_checksum=True)


def read_rows(path: str | os.PathLike) -> pd.DataFrame:
    """Read the table that `write_rows` wrote.

    Args:
        path: The file.

    Returns:
        The table; `from_frame` makes rows of it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: When it is not a parquet table, or not of schema version `SCHEMA`.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no results at {path}")
    options: Any = {"dtype_backend": "numpy_nullable", "page_checksum_verification": True}
    try:
        with regular(Path(path), links=True):  # a pipe would be waited for
            return check_frame(pd.read_parquet(path, **options))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} has no rows that can be read ({error}); measure again") from error
