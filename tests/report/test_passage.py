"""A text colored by a number: every letter is drawn once, in the color of its piece, on the right side of the line."""

import itertools

import numpy as np
import pytest

from longitude.report import passage
from longitude.report.passage import SMOOTH, Panel, Passage


def made(pieces, values, mark=999_999, panels=3, unit="token"):
    panel = Panel(pieces, np.asarray(values, float), mark, "rope")
    names = [f"model {i}" for i in range(panels)]
    return Passage(caption="C.", unit=unit, panels=dict.fromkeys(names, panel))


def test_rows_hold_the_whole_text_and_a_color_is_the_mean_around_its_piece():
    random = np.random.default_rng(0)
    pieces = ["abc", " ", "", "de\n", "f"] * 40
    drawn = made(pieces, random.random(len(pieces)))
    panel = drawn.panels["model 0"]
    rows = [*drawn.rows(panel)]
    assert "".join(row.text for row in rows) == "".join(pieces)
    assert {len(row.text) for row in rows[:-1]} == {drawn.columns}
    half = SMOOTH["token"] // 2
    for row in rows:
        for piece, value in zip(row.pieces, row.values, strict=True):
            near = panel.values[max(0, piece - half) : piece + half + 1]
            assert value == pytest.approx(near.mean())


@pytest.mark.parametrize(("count", "panels"), [(900, 3), (2000, 3), (5000, 3), (2000, 30)])
def test_cells_cover_each_row_and_a_long_text_shares_them(count, panels):
    drawn = made(["ab"] * count, np.arange(count), mark=512, panels=panels)
    panel = drawn.panels["model 0"]
    rows = [*drawn.rows(panel)]
    lettered = 2 * count <= drawn.columns * passage.ROWS and 2 * count * panels <= passage.MOST
    assert drawn.lettered == lettered and len(rows) <= passage.ROWS
    assert panels * sum(len(row.pieces) for row in rows) <= passage.MOST
    for place, row in enumerate(rows):
        ends = [(cell["x"], cell["to"]) for cell in passage._cells(row, place)]
        assert ends[0][0] == 0 and ends[-1][1] == len(row.pieces)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))
    row, column = passage.place_of(drawn, panel)
    assert rows[row].pieces[column] >= 512 > (rows[row].pieces[column - 1] if column else rows[row - 1].pieces[-1])


def test_numbers_that_are_not_finite_leave_a_scale():
    values = np.array([np.nan, np.inf, 3.0, 4.0] * 8)
    low, high = made(["a"] * 32, values, 16).ends
    assert np.isfinite([low, high]).all() and low < high
    assert np.isfinite(made(["a"] * 32, values * np.nan).ends).all()


def test_means_before_and_after_the_line():
    panel = Panel(["a"] * 4, np.array([1.0, 3.0, 5.0, 9.0]), 2, "rope")
    assert panel.means == (2.0, 7.0)
    assert panel._replace(mark=4).means == panel._replace(mark=5).means == (4.5, None)
    low, high = made(["a"] * 4, panel.values, 2).ends
    assert low <= 2 < high


def test_the_numbers_are_there_for_those_who_do_not_see_it():
    drawn = made(["a"] * 100, np.arange(100), mark=50)
    assert "24.50 bits before, 74.50 after" in passage.alternative(drawn)


def test_a_title_has_the_lowest_and_the_highest_mean_behind_the_line_of_what_is_finite():
    values = {"low": [1.0] * 4 + [2.0] * 4, "high": [1.0] * 4 + [5.0] * 4, "broken": [1.0] * 4 + [np.nan] * 4}
    panels = {name: Panel(["a"] * 8, np.asarray(each), 4, name) for name, each in values.items()}
    title = Passage(caption="C.", unit="byte", panels=panels).title
    assert "2.00 bits for low" in title and "5.00 for high" in title and "broken" not in title
    assert "1.00" not in made(["a"] * 8, [1.0] * 8).title  # no line
