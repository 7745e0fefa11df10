"""The figures of a study hold its numbers: bands of seeds, where an encoding breaks, losses of one text."""

from dataclasses import replace

import pytest

from longitude.study.analysis import analyse
from longitude.study.pictures import PICTURES, by_position
from longitude.study.results import read_run
from longitude.study.tasks.base import TASKS, Measuring
from longitude.study.train import build_model
from tests.study.conftest import TINY, values, write_run


def test_losses_of_one_seed_have_no_band(tmp_path):
    run = write_run(tmp_path, {"rope": (2.6, 2.9)}, test_lengths=(256, 512))
    [figure] = PICTURES["by-length"](analyse(run))
    assert all(point["from"] is None for point in values(figure.spec(), "line"))
    assert figure.spec()["description"] == figure.alt  # what a screen reader is given


def test_an_encoding_breaks_where_its_loss_rises_for_good(tmp_path):
    """Not at a peak after which it falls again, nor against the first positions, where every loss is high."""
    labels = {"rope": (2.0, 2.0), "alibi": (2.0, 2.0)}
    found = read_run(write_run(tmp_path, labels, test_lengths=(256, 1024)))
    places = {(16, 64): (3.0, 3.0), (64, 256): (2.0, 2.0), (256, 512): (2.5, 2.0), (512, 600): (2.0, 2.5),
              (600, 800): (2.5, 2.1), (800, 1024): (2.5, 2.1)}  # fmt: skip
    points = [
        {"label": label, "position": (start * stop) ** 0.5, "from": f"{start} to {stop - 1}", "value": value}
        for (start, stop), of_labels in places.items()
        for label, value in zip(labels, of_labels, strict=True)
    ]
    assert by_position._finding(found, points) == "Breaks within the window: RoPE (base=10000) from position 600"
    assert "No encoding breaks" in by_position._finding(found, [p for p in points if p["label"] == "alibi"])


def test_the_losses_of_one_text_add_up_to_the_loss_that_the_study_has_of_it(data):
    window = next(document[: TINY.longest + 1] for document in data.validation)
    model = build_model(TINY, "rope", 0)
    labels = {"label": "rope", "seed": 0}
    of = Measuring(model, TINY, replace(data, validation=[window]), TINY.test_lengths, labels, lambda *_: None)
    tables = {(each["method"][0], each["length"][0]): each for each in TASKS["text"]().measure(of)[1]}
    each, whole = TASKS["text"]().window(of), tables["non-overlapping", TINY.longest]
    assert each["nats"].sum() == pytest.approx(whole["nats"].sum(), rel=1e-6) and len(each) == TINY.longest
    assert "".join(each["text"]).encode() == bytes(window[1:].tolist())
