"""Numbers and tables as text."""

import math

import pytest

from longitude.report.table import plain
from longitude.report.wording import NONE, NOT_FINITE, brief, fixed


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
