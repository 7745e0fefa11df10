"""The table of measurements: columns, round trip, versions, and files that are whole or not there."""

import dataclasses
import math

import pandas as pd
import pytest

from longitude.measure import Row, read_rows, to_frame, write_rows
from longitude.measure.rows import ADDED, SCHEMA, from_frame
from tests.support import refused

PUBLISHED = """schema task model encoding label seed train_length length position_from position_to metric method window
stride weighting bos truncation documents tokens count value low high dtype backend commit""".split()

ROWS = [
    Row(task="text", metric="bits_per_byte", method="sliding", length=512, window=512, stride=256, seed=0,
        documents=20, tokens=2**40, count=2**40, value=2.5, low=2.25, high=0.1 + 0.2, label="räpe"),
    Row(task="text", metric="perplexity"),
    Row(task="text", metric="bits_per_byte", method="per-position", position_from=0, position_to=1, value=3.0),
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.parquet"


def test_columns_are_the_published_ones_whatever_the_rows():
    full, empty, sparse = to_frame(ROWS), to_frame([]), to_frame(ROWS[1:2])
    assert list(full.columns) == PUBLISHED and [field.name for field in dataclasses.fields(Row)] == [*PUBLISHED, *ADDED]
    assert full.dtypes.equals(empty.dtypes) and full.dtypes.equals(sparse.dtypes)
    assert {str(dtype) for dtype in full.dtypes} == {"Int64", "Float64", "string"}


@pytest.mark.parametrize("rows", [ROWS, ROWS[1:2], []])
def test_rows_survive_the_disk(path, rows):
    write_rows(rows, path)
    pd.testing.assert_frame_equal(read_rows(path), to_frame(rows))
    assert from_frame(read_rows(path)) == rows


def test_missing_is_missing_and_not_nan():
    frame = to_frame(ROWS)
    assert frame["value"].isna().tolist() == [False, True, False]
    assert frame["value"].array[1] is pd.NA and from_frame(frame)[1].value is None
    for number in (math.nan, math.inf):
        with refused("value", got=str(number)):
            Row(task="text", metric="perplexity", value=number)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.assign(schema=SCHEMA + 1), [str(SCHEMA + 1), str(SCHEMA)]),
        (lambda table: table.assign(schema=SCHEMA - 1), [str(SCHEMA - 1), str(SCHEMA)]),
        (lambda table: table.drop(columns="stride").assign(extra=1), ["['stride']", "['extra']"]),
        (lambda table: pd.DataFrame({"a": [1]}), ["schema"]),
    ],
)
def test_other_tables_are_refused(path, change, words):
    table = change(to_frame(ROWS))
    table.to_parquet(path)
    for call in (lambda: read_rows(path), lambda: from_frame(table)):
        with refused(*words):
            call()


def test_columns_of_training_are_there_where_a_row_has_them():
    trained = dataclasses.replace(ROWS[0], learning_rate=0.004, train_steps=20, parameters=10**6, train_bytes=2**40)
    pd.testing.assert_frame_equal(to_frame([*ROWS, trained])[PUBLISHED].iloc[:3], to_frame(ROWS))
    assert from_frame(to_frame([*ROWS, trained])) == [*ROWS, trained]


def test_a_file_that_is_no_table_is_refused(path):
    with pytest.raises(FileNotFoundError, match="no results"):
        read_rows(path)
    write_rows(ROWS, path)
    path.write_bytes(path.read_bytes()[:-40])
    with refused("results.parquet"):
        read_rows(path)
