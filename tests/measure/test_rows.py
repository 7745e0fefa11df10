"""The table of measurements: columns, round trip, versions, and files that are whole or not there."""

import dataclasses
import math

import pandas as pd
import pytest

from longitude.measure import SCHEMA, Row, from_frame, read_rows, to_frame, write_rows
from longitude.measure.rows import ADDED

PUBLISHED = """schema task model encoding label seed train_length length position_from position_to metric method window
stride weighting bos truncation documents tokens count value low high dtype backend commit""".split()

ROWS = [
    Row(task="text", metric="bits_per_byte", method="sliding", length=512, window=512, stride=256, seed=0,
        documents=20, tokens=2**40, count=2**40, value=2.5, low=2.25, high=0.1 + 0.2, label="räpe"),
    Row(task="text", metric="perplexity"),
    Row(task="text", metric="bits_per_byte", method="per-position", position_from=0, position_to=1, value=3.0),
]  # fmt: skip


def test_columns_are_the_published_ones_in_order():
    assert list(to_frame(ROWS).columns) == list(to_frame([]).columns) == PUBLISHED
    assert [field.name for field in dataclasses.fields(Row)] == [*PUBLISHED, *ADDED]


def test_dtypes_do_not_depend_on_the_rows():
    full, empty, sparse = to_frame(ROWS), to_frame([]), to_frame(ROWS[1:2])
    assert full.dtypes.equals(empty.dtypes) and full.dtypes.equals(sparse.dtypes)
    assert {str(dtype) for dtype in full.dtypes} == {"Int64", "Float64", "string"}


@pytest.mark.parametrize("rows", [ROWS, ROWS[1:2], []])
def test_rows_survive_the_disk(tmp_path, rows):
    path = tmp_path / "results.parquet"
    write_rows(rows, path)
    assert from_frame(read_rows(path)) == rows
    pd.testing.assert_frame_equal(read_rows(path), to_frame(rows))
    write_rows(read_rows(path), path)  # the table itself can be written as well
    assert from_frame(read_rows(path)) == rows


def test_missing_is_missing_and_not_nan():
    frame = to_frame(ROWS)
    assert frame["value"].isna().tolist() == [False, True, False]
    assert frame["value"].array[1] is pd.NA
    assert from_frame(frame)[1].value is None
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="value must be a finite number or None"):
            Row(task="text", metric="perplexity", value=number)


def test_an_unknown_schema_is_refused(tmp_path):
    path = tmp_path / "results.parquet"
    write_rows(ROWS, path)
    frame = pd.read_parquet(path)
    frame["schema"] = SCHEMA + 1
    frame.to_parquet(path)
    with pytest.raises(ValueError, match=rf"results.parquet.*schema version {SCHEMA + 1}.*reads version {SCHEMA}"):
        read_rows(path)
    with pytest.raises(ValueError, match="schema version"):
        from_frame(to_frame([Row(schema=SCHEMA + 1, task="text", metric="perplexity")]))


def test_other_columns_are_refused(tmp_path):
    path = tmp_path / "results.parquet"
    to_frame(ROWS).drop(columns="stride").assign(extra=1).to_parquet(path)
    with pytest.raises(ValueError, match=r"missing: \['stride'\], unknown: \['extra'\]"):
        read_rows(path)
    with pytest.raises(ValueError, match="missing"):
        write_rows(to_frame(ROWS).drop(columns="stride"), path)
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(ValueError, match="schema"):
        read_rows(path)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no results"):
        read_rows(tmp_path / "results.parquet")
    path = tmp_path / "results.parquet"
    write_rows(ROWS, path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"results\.parquet is not a readable parquet table"):
        read_rows(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "results.parquet"
    write_rows(ROWS, path)

    def full_disk(self, file, **options):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_rows(ROWS[:1], path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.parquet"]
    assert from_frame(read_rows(path)) == ROWS
