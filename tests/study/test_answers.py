"""Answers: more is better, from the table of examples to the sentence and the page; nothing of losses leaks in."""

import re
from pathlib import Path

import numpy as np
import pytest

from longitude.measure.retrieval import scoring
from longitude.study.analysis import analyse
from longitude.study.answers import longest_solved, share
from longitude.study.criterion import HOLDS, LOST, UNCLEAR
from longitude.study.pictures import figures
from longitude.study.report import table, write_report
from tests.study.conftest import conclusion, is_one_sentence, line, printed, summary, write_run

LENGTHS = (8, 16, 20, 32)
SHARES = {  # of exact answers; None: not measured at that length
    "rope": (1.0, 0.99, 0.02, 0.0),
    "alibi:future=one-sided": (1.0, 1.0, 0.98, 0.97),
    "t5": (1.0, 0.96, 0.9, 0.4),
    "learned": (1.0, 1.0, None, None),
}


def write(path: Path, shares=SHARES, **options) -> Path:
    """A run of --task reverse as a study leaves it; a share may be one for each seed."""
    return write_run(path, shares, **{"task": "reverse", "documents": 200, "test_lengths": LENGTHS, **options})


def test_values_are_shares_with_wilsons_interval(tmp_path):
    frame = summary(write(tmp_path))
    found = line(frame, "rope", 16)
    assert (found["value"], found["low"], found["high"]) == scoring.mean([1.0] * 198 + [0.0] * 2)
    assert (found["seeds"], found["documents"], found["change"]) == (1, 200, None)
    assert line(frame, "alibi:future=one-sided", 16)["low"] < 1  # 200 of 200 do not mean certainty
    assert line(frame, "learned", 32)["value"] is None


def test_verdicts(tmp_path):
    frame = summary(write(tmp_path))
    verdicts = {label: [line(frame, label, length)["verdict"] for length in LENGTHS] for label in SHARES}
    assert verdicts == {
        "rope": [HOLDS, HOLDS, LOST, LOST],
        "alibi:future=one-sided": [HOLDS] * 4,
        "t5": [HOLDS, HOLDS, UNCLEAR, LOST],
        "learned": [HOLDS, HOLDS, None, None],
    }


def test_reach_ends_at_the_first_length_that_is_not_solved(tmp_path):
    gap = {"rope": (1.0, 0.5, 1.0, 1.0), "t5": (0.1, 1.0, 1.0, 1.0)}
    found = analyse(write(tmp_path, gap)).main
    assert [longest_solved([each for each in found if each.label == label]) for label in gap] == [8, None]


def test_several_seeds_widen_the_interval():
    random = np.random.default_rng(0)
    alike = (random.random((3, 200)) < 0.5).astype(float)
    apart = np.stack([np.ones(200), np.zeros(200), random.random(200) < 0.5]).astype(float)
    one, other = share(alike), share(apart)
    assert one[2] - one[1] < 0.2 and other[2] - other[1] > 0.6
    value, low, high = share(np.ones((3, 200)))
    assert value == high == 1 and 0.99 < low < 1


def test_the_whole_sentence(tmp_path):
    run = write(tmp_path, states={("t5", 0): {"status": "failed", "step": 0}})
    assert conclusion(run) == (
        "At 32 symbols, 2 times the training length, alibi:future=one-sided (97%, 95% interval 94 to 99%) solves reverse (at "
        "least 90% of the answers exact); rope (0%, 0 to 2%) does not; rope and learned solve up to 16; learned was not "
        "measured at that length; t5 failed; intervals are over 200 examples with one seed, so they do not cover training "
        "again."
    )


CASES = {
    "all solve": ({"rope": (1.0,) * 4}, {}, ["rope (100%, 95% interval 98 to 100%) solves reverse"]),
    "none does": (
        {"rope": (1.0, 1.0, 0.2, 0.0), "t5": (0.3, 0.0, 0.0, 0.0)}, {},
        ["do not solve", "rope solves up to 16 and t5 no length"],
    ),
    "unclear": ({"rope": (1.0, 1.0, 1.0, 0.9)}, {}, ["the data cannot tell whether it solves", "rope solves up to 20"]),
    "within training": ({"rope": (1.0, 0.5)}, {"test_lengths": (8, 16)}, ["at 16 symbols, after training on 16"]),
    "seeds": ({"rope": (1.0, 1.0, 1.0, (1.0, 0.0))}, {"seeds": (0, 1)}, ["50%", "200 examples and 2 seeds"]),
    "many": ({f"rope:base={i}": (1.0, 1.0, 0.5, i / 100) for i in range(1, 9)}, {}, ["(1% to 8%)"]),
    "nothing": ({"rope": (1.0,) * 4}, {"states": {("rope", 0): {"status": "diverged", "step": 3}}}, ["no encoding was measured"]),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_one_sentence_whatever_was_measured(case, tmp_path):
    shares, options, expected = CASES[case]
    run = write(tmp_path, shares, **options)
    text = conclusion(run)
    assert is_one_sentence(text)
    for words in expected:
        assert words.lower() in text.lower()
    assert max(map(len, printed(run).splitlines())) <= 80
    assert not re.search(r"bits per|holds?\b|lower", text + printed(run))


def test_the_table(tmp_path):
    shown = printed(write(tmp_path), 100)
    rows = {words[0]: words[1:] for words in map(str.split, shown.splitlines()) if words and words[0] in SHARES}
    assert rows["rope"] == ["100", "±1", "99", "±2", "2", "±2", "0", "±1", "16"]
    assert rows["alibi:future=one-sided"][-1] == "32" and rows["learned"][-3:] == ["-", "-", "16"]
    assert "reverse: % of answers exact by length in symbols, trained on 1 to 16" in " ".join(shown.split())
    narrow = printed(tmp_path)
    assert max(map(len, narrow.splitlines())) <= 80 and "solved to" in narrow
    styles = [str(getattr(cell, "style", "")) for cell in table(analyse(tmp_path)).columns[-1].cells]
    assert styles == ["red", "green", "red", ""]


@pytest.mark.slow
def test_the_page_speaks_of_answers_alone(tmp_path):
    html = write_report(analyse(write(tmp_path))).read_text(encoding="utf-8")
    text = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    assert conclusion(tmp_path) in re.sub(r"\s+", " ", text)
    assert "Reverse: trained up to 16 symbols, asked up to 32" in text and "Exact answers by length" in text
    assert "99.0%" in text and text.count('class="verdict lost">not solved') == 2
    assert not re.search(
        r"bits per byte|does not hold|validation documents|non-overlapping windows", text, re.IGNORECASE
    )
    assert "longitude study --task reverse --encodings rope alibi:future=one-sided t5 learned --test-lengths" in text
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {"by-length.svg", "by-length.png", "training.svg", "training.png"}
    chart = figures(analyse(tmp_path))[0].chart.to_dict()
    points = next(layer["data"]["values"] for layer in chart["layer"] if layer["mark"]["type"] == "line")
    assert [point["value"] for point in points if point["label"] == "t5"] == [1.0, 0.96, 0.9, 0.4]
    axis = next(layer["encoding"]["y"] for layer in chart["layer"] if layer["mark"]["type"] == "line")
    assert "higher is better" in axis["title"] and axis["scale"]["domain"] == [-0.03, 1.03]
