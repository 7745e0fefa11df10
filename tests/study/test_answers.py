"""Floor and ceiling of a task beside what its labels reach."""

import numpy as np

from longitude.study.analysis import analyse
from longitude.study.answers import share
from longitude.study.pictures import figures
from longitude.study.report import table
from tests.study.conftest import SHARES, edit_question, write_answers


def test_what_a_rule_without_positions_reaches_stands_beside_the_labels(tmp_path):
    run = write_answers(tmp_path, {name: SHARES[name] for name in ("rope", "t5")})
    edit_question(run, lambda asked: asked["data"].update(floor={"8": 0.5, "16": 0.25}))
    found = analyse(run)
    last = [str(list(column.cells)[-1]) for column in table(found).columns]
    assert last[:5] == ["rule without positions", "50%", "25%", "", ""]
    figure = figures(found)[0]
    dotted = [layer for layer in figure.chart.to_dict()["layer"] if layer["mark"].get("strokeDash") == [1, 3]]
    assert [each["value"] for each in dotted[0]["data"]["values"]] == [0.5, 0.25] and "dotted" in figure.caption


def test_a_share_and_its_ends_are_from_0_to_1():
    """Of two seeds that nearly always are right, or never, also where errors of seeds and of examples are added."""
    right = np.ones((2, 40))
    right[1, :6] = 0
    for found in (share(right), share(1 - right)):
        assert found.over == "seeds and documents" and 0 <= found.low < found.value < found.high <= 1
    assert share(right).high == 1 and share(1 - right).low == 0
