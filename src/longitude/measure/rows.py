"""One measurement, one row: the versioned table that every number of Longitude ends in."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import pandas as pd

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number with the protocol that made it. What is missing or does not apply is None, never NaN, 0 or -1.

    What was measured:
        schema: version of this table, `SCHEMA`.
        task: "text" for language modelling; otherwise the name of the task.
        model: name or path of the model; encoding: the registered name of its position encoding.
        label: what the reader calls this model (an encoding with its options).
        seed: the training seed. (Not the seed of the bootstrap, which is fixed by the measuring function.)
        train_length: tokens per training example.
    What was asked of it:
        length: the length the row is about, in tokens.
        position_from, position_to: the positions averaged over, first inclusive, last exclusive. Position t is the
            0-based index, inside the window, of the input token whose output predicts the next one. None: all.
    How:
        metric: "bits_per_byte" (nats / ln 2 / bytes) | "perplexity" (exp of nats / tokens) | a task's own.
        method: "non-overlapping" | "sliding" | "per-position" | a task's own.
        window: input tokens the model saw at once; stride: tokens the window moved by.
        weighting: what counts equally in the average; "token": every scored target counts once.
        bos: "none", or where a beginning-of-sequence token stood.
        truncation: what became of text that did not fill the windows.
    How much:
        documents: documents scored; tokens: target tokens scored.
        count: what the value is divided by: bytes for bits per byte, tokens for perplexity, trials for a task.
    The answer:
        value: the metric. None when it is not a finite number (a diverged model); `count` then says what was tried.
        low, high: 95 % interval over documents. None with fewer than two documents or no value.
    With what:
        dtype: of the model's weights; backend: attention implementation; commit: of the code that measured.
        train_positions: where positions of training examples came from, unless they were 0, 1, 2, ...: a sampler with its
            options, "randomized(max_length=4096)". Added later (`ADDED`).
        prefill: how a window was read, "one pass" or "pieces of 1024 with the cache", with the reason where it was not as
            asked. Added later.

    Raises ValueError for a float that is not finite.
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

    def __post_init__(self):
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"Row {name} must be a finite number or None, got {number}; pass None for missing")


def _dtype(annotation) -> str:
    kind = next(kind for kind in (int, float, str) if kind in (annotation, *get_args(annotation)))
    return {int: "Int64", float: "Float64", str: "string"}[kind]


# Column order is field order. The nullable dtypes keep integers integers, and a missing value apart from NaN.
COLUMNS = {field.name: _dtype(field.type) for field in fields(Row)}
ADDED = ("train_positions", "prefill")
"""Columns that came after the first release. They stand in a table only where a row says something in them: all other tables
are as they were, and any release reads them."""


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """The rows as a table with the columns of `Row` in order and nullable dtypes; an empty one for no rows."""
    rows = list(rows)
    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    columns = {name: said for name, said in columns.items() if name not in ADDED or any(x is not None for x in said)}
    return pd.DataFrame({name: pd.array(said, dtype=COLUMNS[name]) for name, said in columns.items()})


def from_frame(frame: pd.DataFrame) -> list[Row]:
    """The table as rows again; the inverse of `to_frame`. Raises ValueError as `check_frame` does."""
    frame = check_frame(frame)
    columns = [[None if value is pd.NA else value for value in frame[name].array.astype(object)] for name in frame]
    return [Row(**dict(zip(frame, values, strict=True))) for values in zip(*columns, strict=True)]


def check_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """The same table with the schema's dtypes; ValueError when it is not a table of schema version `SCHEMA`."""
    versions = set(frame["schema"]) if "schema" in frame else {None}
    if versions - {SCHEMA}:
        got = ", ".join(sorted(str(version) for version in versions))
        raise ValueError(
            f"results have schema version {got}, this longitude reads version {SCHEMA}; measure again, or read them "
            f"with the release of longitude that wrote them"
        )
    expected = [name for name in COLUMNS if name not in ADDED or name in frame]
    if list(frame.columns) != expected:
        missing = [name for name in expected if name not in frame]
        unknown = [name for name in frame if name not in COLUMNS]
        raise ValueError(
            f"results of schema version {SCHEMA} have the {len(expected)} columns of longitude.measure.Row in their "
            f"order; missing: {missing}, unknown: {unknown}; build the table with to_frame"
        )
    return frame.astype({name: COLUMNS[name] for name in expected})


def write_rows(rows: Iterable[Row] | pd.DataFrame, path: str | os.PathLike) -> None:
    """Write rows (or their table) as parquet: the file is whole or not there, whenever the process dies.

    The table is written beside `path`, flushed to disk, then renamed over it. Raises ValueError as `check_frame`.
    """
    frame = check_frame(rows) if isinstance(rows, pd.DataFrame) else to_frame(rows)
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            frame.to_parquet(file, index=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_rows(path: str | os.PathLike) -> pd.DataFrame:
    """Read the table that `write_rows` wrote (`from_frame` makes it rows).

    Raises FileNotFoundError; ValueError when the file is no parquet table or not of schema version `SCHEMA`.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no results at {path}")
    try:
        frame = pd.read_parquet(path, dtype_backend="numpy_nullable")
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet table of results ({error}); measure again") from error
    try:
        return check_frame(frame)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
