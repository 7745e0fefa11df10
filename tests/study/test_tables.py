"""Tables of a study as CSV."""

import csv
import io

import pytest

from longitude.cli import main
from longitude.study.criterion import GAINS, RISES
from tests.study.conftest import CONTROL, summary, write_run

BOTH = {"test_lengths": (256, 512), "seeds": (0, 1, 2), "noise": 0.002}
A = {"rope": (2.27, 4.39), "alibi": (2.48, 2.45)}


def test_a_table_as_csv_is_the_summary(tmp_path, capsys):
    run = write_run(tmp_path, A | {CONTROL: (2.6, 2.6)}, documents=8, **BOTH)
    assert main(["report", str(run), "--csv"]) == 0
    short = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [*short[0]] == ["encoding", "length", "bits_per_byte", "low", "high", "change", "verdict"]
    assert main(["report", str(run), "--csv", "--all"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    expected = summary(run)
    assert [(row["label"], int(row["length"])) for row in rows] == list(
        zip(expected["label"], expected["length"], strict=True)
    )
    assert [float(row["value"]) for row in rows] == list(expected["value"])
    assert [float(row["bits_per_byte"]) for row in short] == [float(row["value"]) for row in rows]
    assert {row["encoding"]: row["verdict"] for row in short} == {
        "rope": RISES,
        "alibi": GAINS,
        CONTROL: short[-1]["verdict"],
    }
    assert len(rows[0]["values"].split()) == 3 and {row["verdict"] for row in rows} == {"", GAINS, RISES}
    assert {row["label"]: row["effective_length"] for row in rows} == {"rope": "256", "alibi": "512", CONTROL: "512"}


@pytest.mark.slow
def test_comparisons_of_every_length_as_csv(tmp_path, capsys):
    run = str(write_run(tmp_path / "one", A | {"nope": (3.1, 3.1)}, **BOTH))
    assert main(["report", run, "--csv", "--comparisons"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 2 * 3 and {row["length"] for row in rows} == {"256", "512"}
    for row in rows:
        low, value, high = (float(row[name]) for name in ("low", "value", "high"))
        assert low <= float(row["seed_low"]) <= value <= float(row["seed_high"]) <= high and float(row["q"]) <= float(
            row["p"]
        )
    for wrong in (["--comparisons"], ["--csv", "--json"]):
        assert main(["report", run, *wrong]) == 2
