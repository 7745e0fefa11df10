"""Numbers and names in sentences, tables on the terminal, and what is imported to draw."""

import pytest

from longitude.positions.base import ENCODINGS
from longitude.registry import options_of
from longitude.report import wording
from longitude.report.table import show, table
from tests.support import printed


def test_a_picture_has_names_of_papers_with_options_where_names_are_alike_and_the_base_of_rope():
    labels = ["rope", "rope:base=500", "alibi", "rope+fox", "t5:max_distance=32", "a_plugin", "mrope:sections=4,2,2"]
    names = [
        "RoPE (base=10000)",
        "RoPE (base=500)",
        "ALiBi",
        "RoPE (base=10000) + FoX",
        "T5 bias",
        "a_plugin",
        "M-RoPE",
    ]
    assert wording.papers(labels) == dict(zip(labels, names, strict=True))
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
