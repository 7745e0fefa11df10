"""Signs of published pairs against rows made without training; and that the committed pairs can be judged."""

import csv

import pytest

import calibration
from calibration import AGREES, DISAGREES, SPLIT
from claims.base import list_claims
from longitude.runs.files import read_json
from longitude.statistics.estimates import UNCLEAR
from tests.study.conftest import write_answers, write_run

COLUMNS = ("claims", "relation", "against", "ours_a", "than_a", "ours_b", "than_b")
LOW, SAME, HIGH = ((level, level, level * 1.5) for level in (2.0, 2.01, 2.4))
"""Bits per byte at the training length, at twice and at four times."""


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    lengths = {"train_length": 256, "test_lengths": (256, 512, 1024)}
    labels = {"rope": LOW, "t5": SAME, "alibi": HIGH}
    write_run(folder / "text", labels, seeds=(0, 1, 2), steps=4, noise=0.001, **lengths)
    shares = {"rope": (1.0, 1.0, 0.1, 0.0), "t5": (1.0, 1.0, 0.95, 0.9)}
    write_answers(folder / "copy", shares, seeds=(0, 1, 2), steps=4)
    return folder


def judged(tmp_path, studies, *rows):
    """The pairs of rows of these columns; empty where a row ends."""
    path = tmp_path / f"{len([*tmp_path.iterdir()])}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([*row, *[""] * (len(COLUMNS) - len(row))] for row in rows)
    return path, calibration.pairs(path, studies)


@pytest.mark.parametrize(
    ("relation", "first", "second", "word"),
    [
        ("better", "text/rope/256", "text/alibi/256", AGREES), ("better", "text/alibi/256", "text/rope/256", DISAGREES),
        ("better", "copy/t5/20", "copy/rope/20", AGREES), ("better", "copy/rope/20", "copy/t5/20", DISAGREES),
        ("rises", "text/rope/1024", "text/rope/256", AGREES), ("rises", "text/rope/512", "text/rope/256", DISAGREES),
        ("not worse", "text/rope/512", "text/rope/256", AGREES),
        ("not worse", "text/rope/1024", "text/rope/256", DISAGREES),
        ("level", "text/t5/256", "text/rope/256", AGREES), ("level", "text/alibi/256", "text/rope/256", DISAGREES),
        ("level", "text/rope/256", "text/alibi/256", DISAGREES),
        ("solved", "copy/t5/8", "", AGREES), ("solved", "copy/rope/20", "", DISAGREES),
    ],
)  # fmt: skip
def test_a_pair_agrees_only_with_the_sign_of_the_rows(tmp_path, studies, relation, first, second, word):
    _, [pair] = judged(tmp_path, studies, ("", relation, "", first, second))
    assert (pair.a, pair.b) == (word, None) and pair.word == word


def test_missing_seeds_show_nothing(tmp_path):
    failed, shares = {("rope", 3): {"status": "failed"}}, {"rope": (1.0, 1.0, 0.1, 0.0), "t5": (1.0, 1.0, 0.95, 0.9)}
    for planned, word in ((4, UNCLEAR), (3, AGREES)):
        write_answers(tmp_path / f"{planned}" / "copy", shares, states=failed, seeds=tuple(range(planned)), steps=4)
        _, [pair] = judged(tmp_path, tmp_path / f"{planned}", ("", "better", "", "copy/t5/20", "copy/rope/20"))
        assert pair.a == word


def test_rungs_and_publications_that_contradict_each_other_are_split(tmp_path, studies):
    right, wrong = ("text/rope/256", "text/alibi/256"), ("text/alibi/256", "text/rope/256")
    path, pairs = judged(
        tmp_path, studies, ("one", "better", "", *right, *right), ("one two", "better", "", *right, *wrong),
        ("three", "better", "another paper", *right), ("four", "better", "", *right),
        ("four", "better", "", "text/rope/256", "text/rope/256"), ("five", "better", "", *wrong),
    )  # fmt: skip
    assert [pair.word for pair in pairs] == [AGREES, SPLIT, SPLIT, AGREES, UNCLEAR, DISAGREES]
    found = [calibration.published(claim, path, studies) for claim in "one two three four five six".split()]
    assert found == [SPLIT, SPLIT, SPLIT, AGREES, DISAGREES, None]
    assert calibration.rate(pair.a for pair in pairs) == "4 of 6 (67%), of 5 decided 80%"


def test_a_prediction_counts_only_where_a_table_has_a_sign():
    rows = {("lower", "lower"): AGREES, ("lower", "higher"): DISAGREES, ("cannot tell", "lower"): UNCLEAR}
    for predicted, sign in (rows := rows | dict.fromkeys((("lower", "split"), ("lower", ""), ("", "lower")))):
        assert calibration.outcome({"predicted_a": predicted, "sign": sign}, "a") == rows[predicted, sign]


def test_every_committed_pair_says_where_it_was_read_and_which_rows_are_ours():
    rows = calibration.rows_of(calibration.PUBLISHED)
    assert [int(row["pair"]) for row in rows] == [*range(1, len(rows) + 1)]
    names = {claim.name for claim in list_claims()}
    for row in rows:
        assert row["checked"] and row["published"] and row["relation"] in calibration.RELATIONS
        assert names.issuperset(row["claims"].split())
        for place in filter(None, (row[f"{side}_{rung}"] for side in ("ours", "than") for rung in calibration.RUNGS)):
            study, label, length, *_ = place.split("/")
            configuration = read_json(calibration.STUDIES / study / "study.json")["configuration"]
            assert label in configuration["encodings"] and int(length) in configuration["test_lengths"]


@pytest.mark.slow
def test_every_committed_pair_is_judged_and_most_agree():
    words = [pair.a for pair in calibration.pairs()]
    assert None not in words and words.count(AGREES) > 2 * words.count(DISAGREES)
