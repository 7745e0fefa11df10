"""Studies side by side, and tables as CSV and Markdown: what they hold, and what is refused with the name of what differs."""

import csv
import io
import re

import pytest

from longitude.cli import main
from longitude.study.compare import side_by_side
from tests.study.conftest import edit_question, summary, write_answers, write_run

BOTH = {"test_lengths": (256, 512), "seeds": (0, 1, 2), "noise": 0.002}
A, B = {"rope": (2.27, 4.39), "alibi": (2.48, 2.45)}, {"t5": (2.37, 4.02)}


@pytest.fixture
def runs(tmp_path):
    """Two studies of one text, which differ in one option."""
    return [
        write_run(tmp_path / "wide", A, hidden=128, **BOTH),
        write_run(tmp_path / "narrow", B, hidden=64, **BOTH),
    ]


def test_options_that_differ_values_and_the_best_stand_side_by_side(runs, capsys):
    found = side_by_side(runs)
    assert found.options == {"hidden": [(128,), (64,)]} and found.lengths == [256, 512]
    assert [line[:3] for line in found.lines] == [
        ["wide", "rope", "128"],
        ["wide", "alibi", "128"],
        ["narrow", "t5", "64"],
    ]
    assert {(each.better, each.worse) for each in found.comparisons} == {
        ("alibi of wide", "rope of wide"), ("alibi of wide", "t5 of narrow"), ("t5 of narrow", "rope of wide"),
    }  # fmt: skip
    assert all(each.seeds == 3 and each.decided for each in found.comparisons)
    assert main(["report", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    assert "alibi of wide: 1.5" in printed and "t5 of narrow" in printed and "--hidden" in printed
    assert re.search(r"alibi of wide +rope of wide +1\.9", printed)
    assert [line.split()[0] for line in printed.splitlines() if "±" in line][:3] == ["wide", "alibi", "narrow"]


def test_seeds_that_saw_other_data_are_not_paired(tmp_path):
    runs = [write_run(tmp_path / str(steps), A, steps=steps, **BOTH) for steps in (200, 400)]
    found = side_by_side(runs)
    assert found.comparisons == [] and "did not see the same data (--steps)" in found.sentence


@pytest.mark.slow
def test_one_text_by_two_names_is_the_same_data_and_one_name_of_two_texts_is_not(tmp_path):
    runs = [write_run(tmp_path / str(i), A, data=data, **BOTH) for i, data in enumerate((("a", "b"), ("folder",)))]
    found = side_by_side(runs)
    assert found.comparisons and found.unpaired == [] and found.options == {"data": [("a", "b"), ("folder",)]}
    other = write_run(tmp_path / "other", A, data=("folder",), **BOTH)
    edit_question(other, lambda asked: asked["data"].update(training_sha256="ef" * 32))
    assert "did not see the same data (--data)" in side_by_side([runs[1], other]).sentence


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("steps", "paired"), [({}, True), ({"rope": 150}, False)])
def test_labels_matched_by_compute_are_paired_with_others_only_where_their_steps_agree(steps, paired, tmp_path):
    """Plain attention has the same steps either way, so its seeds saw the same data."""
    own = {"compute": {(label, seed): {"step": n, "steps": n} for label, n in steps.items() for seed in range(9)}}
    runs = [write_run(tmp_path / match, A, own.get(match), match=match, **BOTH) for match in ("steps", "compute")]
    found = side_by_side(runs)
    assert found.options == {"match": ["steps", "compute"]} and bool(found.comparisons) == paired
    assert paired or "did not see the same data (--match)" in found.sentence


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"task": "masked", "methods": ("non-overlapping",)}, "--task is masked, not text"),
        ({"methods": ("sliding",)}, "--methods is sliding, not non-overlapping"),
        ({"methods": ("per-position",)}, "measured by position only"),
        ({"test_lengths": (300, 600)}, "no length in common: .*wide at 256 512; .*other at 300 600"),
        ({"sha256": "cd" * 32}, "on another text or other parts of it .*sha256 cdcdcdcdcdcd"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(other, message, runs, tmp_path):
    digest = other.pop("sha256", None)
    run = write_run(tmp_path / "other", {"rope": (2.27, 4.39)}, **BOTH | other)
    if digest:
        edit_question(run, lambda asked: asked["data"].update(sha256=digest))
    with pytest.raises(ValueError, match=message):
        side_by_side([runs[0], run])


def test_one_study_twice_is_no_comparison(runs, capsys):
    with pytest.raises(ValueError, match="two studies or more, each once"):
        side_by_side([runs[0], runs[0]])
    assert main(["report"]) == 2 and main(["report", str(runs[0]), "--csv", "--markdown"]) == 2
    assert "choose one" in capsys.readouterr().err


def test_a_table_as_csv_is_the_summary(runs, capsys):
    assert main(["report", str(runs[0]), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    expected = summary(runs[0])
    assert [(row["label"], int(row["length"])) for row in rows] == list(
        zip(expected["label"], expected["length"], strict=True)
    )
    assert [float(row["value"]) for row in rows] == list(expected["value"])
    assert len(rows[0]["values"].split()) == 3 and {row["failed"] for row in rows} == {"", "holding"}
    assert {row["label"]: row["effective_length"] for row in rows} == {"rope": "256", "alibi": "512"}


@pytest.mark.slow
def test_a_table_as_markdown(runs, capsys, tmp_path):
    run = write_run(tmp_path / "floor", A | {"nope": (3.1, 3.1)}, ngrams={"2": 3.49, "3": 2.67}, **BOTH)
    assert main(["report", str(run), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {(row["label"], row["loss"], row["context"]) for row in rows} == {
        ("rope", "enough", "enough"), ("alibi", "enough", "enough"), ("nope", "too little", "too little"),
    }  # fmt: skip
    assert main(["report", str(run), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "| unclear (learned too little) | ≥ 512 |" in text and "| rises |" in text
    assert "| < 0.001 | yes |" in text
    assert "| trigram counts | 2.670 |  |  |  |" in text and "| alibi | rope | 1.9" in text
    assert "3 seeds, 24 documents |" in text
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert main(["report", *map(str, runs), "--markdown"]) == 0
    assert "| wide | rope | 128 |" in capsys.readouterr().out


def test_answers_are_compared_too(tmp_path):
    runs = [write_answers(tmp_path / str(hidden), hidden=hidden) for hidden in (32, 64)]
    found = side_by_side(runs)
    assert found.lines[0][-1] == "16" and "points of a hundred" in found.sentence


@pytest.mark.slow
def test_comparisons_of_every_length_as_csv_and_tables_as_latex(tmp_path, capsys):
    run = str(write_run(tmp_path / "one", A | {"nope": (3.1, 3.1)}, **BOTH))
    assert main(["report", run, "--csv", "--comparisons"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 2 * 3 and {row["length"] for row in rows} == {"256", "512"}
    for row in rows:
        low, value, high = (float(row[name]) for name in ("low", "value", "high"))
        assert low <= float(row["seed_low"]) <= value <= float(row["seed_high"]) <= high and float(row["q"]) <= float(
            row["p"]
        )
    assert main(["report", run, "--latex"]) == 0
    text = capsys.readouterr().out
    assert text.count(r"\toprule") == text.count(r"\end{tabular}") >= 2
    for line in text.splitlines():
        if line.endswith(r"\\"):
            assert not re.search(r"(?<!\\)[%_#]|[−±]|(?<!\$)[<>]", line)
    for wrong in (["--comparisons"], ["--csv", "--latex"]):
        assert main(["report", run, *wrong]) == 2
