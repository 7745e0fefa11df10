"""Numbers and names in sentences, tables on the terminal, and what is imported to draw."""

import math

import pytest

from longitude.positions.base import ENCODINGS
from longitude.registry import options_of
from longitude.report import wording
from longitude.report.table import plain, show, table
from longitude.report.wording import NONE, NOT_FINITE, brief, fixed
from tests.support import printed


def test_a_picture_has_names_of_papers_with_options_where_names_are_alike_and_the_base_of_rope():
    labels = ["rope", "rope:base=500", "alibi", "rope+fox", "t5:max_distance=32", "a_plugin", "mrope:sections=4,2,2"]
    names = "RoPE (base=10000), RoPE (base=500), ALiBi, RoPE (base=10000) + FoX, T5 bias, a_plugin, M-RoPE"
    assert wording.papers(labels) == dict(zip(labels, names.split(", "), strict=True))
    assert options_of(ENCODINGS["rope"])["base"].default == wording.ROPE_BASE


def test_a_table_in_a_file_is_not_cut(capsys):
    made = table("encoding", "4096", title="values [in bits]", caption="note")
    made.add_row("rope" * 30, "2.60")
    show(made, "a [sentence] " * 20)
    title, head, row, caption, sentence = capsys.readouterr().out.splitlines()
    assert title.strip() == "values [in bits]" and head.split() == ["encoding", "4096"] and caption.strip() == "note"
    assert row.split() == ["rope" * 30, "2.60"] and row.endswith("2.60") and sentence == "a [sentence] " * 20


@pytest.mark.slow
def test_drawing_is_loaded_when_something_is_drawn():
    code = "import sys, longitude.cli, longitude.study.runner, longitude.report.wording\n"
    code += 'print({"altair", "vl_convert", "longitude.report.figure"} & set(sys.modules))'
    assert printed(code) == "set()"


@pytest.mark.parametrize("digits", [1, 6, 7, 40, 300])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_of_a_table_is_short_and_reads_back(digits, sign):
    """A diverged perplexity has a hundred digits: what is printed has ten at most, and is the number to its last digit."""
    value = sign * 1.25 * 10.0**digits
    for spec in (".2f", "+.2f", ".3f"):
        text = fixed(value, spec)
        assert len(text) <= 11 and math.isclose(float(text), value, rel_tol=0.05)
        assert text.startswith("+") == (spec[0] == "+" and value > 0)
    assert len(brief(value)) <= 11 and math.isclose(float(brief(value)), value, rel_tol=0.01)


def test_what_is_no_number_has_a_word():
    assert fixed(None, ".2f") == NOT_FINITE and brief(None) == NONE
    assert [brief(x) for x in (0.0, -0.0, 1024, 2**20, 0.25, 3.1e-5, math.inf)] == [
        "0", "0", "1024", "1048576", "0.25", "3.1e-05", "inf",
    ]  # fmt: skip


def test_columns_of_a_plain_table_line_up():
    lines = [*plain([["", "64", "128"], ["ntk_by_parts", "7%", "100%"]])]
    assert [line.index(cell) + len(cell) for line, cell in zip(lines, ("128", "100%"), strict=True)] == [22, 22]
    assert all(line == line.rstrip() for line in lines)
